"""Compare the memory estimate with allocations, measured memory and the sums of saved tensors."""

from __future__ import annotations

import gc
import importlib.util
import re
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_lite.config.fp8_schema import Fp8Config
from megatron_lite.config.schema import ParallelConfig
from megatron_lite.engine import parallelize
from megatron_lite.parallel.grid import init_grid
from megatron_lite.parallel.layout import Layout
from megatron_lite.planning.memory import (
    GIB,
    Allocations,
    LayerCost,
    Setting,
    idle_bytes_in_graph_pools,
    muon_bytes,
    step_bytes,
)
from models.backend import available
from models.config import ModelConfig
from tools.loading.engine import build_engine
from tools.planning import measure_memory
from tools.planning.estimate import layer_flops, layers_by_stage, layers_of, memory, muon_blocks, read_config
from tools.planning.layer_memory import layer_costs
from tools.planning.meta_device import kernels_of_cuda

SMALL = [
    "configs/default.yml",
    "run.device=cpu",
    "optimizer.name=adamw",
    "model.vocab_size=512",
    "data.tokenizer.vocab_size=512",
    "model.num_layers=3",
    "model.hidden_size=64",
    "model.tie_embeddings=false",
    "batch.sequence_length=256",
    "batch.micro_batch_size=1",
]


@pytest.mark.parametrize(
    ("accumulation", "dtype", "state"),
    [(1, "bf16", "fp32"), (2, "bf16", "fp32"), (2, "bf16", "bf16"), (1, "fp32", "fp32")],
)
def test_estimate_is_within_15_percent_of_allocation(dtype, state, accumulation, capsys):
    words = [*SMALL, f"precision.dtype={dtype}", f"batch.global_batch_size={accumulation}"]
    words.append(f"precision.optimizer_state={state}")
    cases = [(stage, "none") for stage in (1, 2, 3)] + [(1, "elementwise")]
    if state == "fp32":
        cases += [(1, "full"), (3, "full"), (1, "selective")]
    assert measure_memory.measure(words, cases) == 0, capsys.readouterr().out
    rows = re.findall(r"^ +(\d)  (\w+) +([\d.]+) +([\d.]+) +([\d.]+)$", capsys.readouterr().out, re.MULTILINE)
    assert [(int(stage), mode) for stage, mode, *_ in rows] == cases


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_estimate_of_muon_is_within_15_percent_of_allocation(dtype, capsys):
    words = [*SMALL, "optimizer.name=muon", "batch.sequence_length=64", f"precision.dtype={dtype}"]
    assert measure_memory.measure(words, [(1, "none"), (2, "none")]) == 0, capsys.readouterr().out


def test_matrices_of_muon_are_those_of_a_tensor_rank():
    model = read_config(SMALL, 1).model
    common = {"dtype": torch.float32, "micro_batch_size": 1, "sequence_length": 64, "parallel": ParallelConfig()}
    whole, half = (sum(c.matrices for c in layer_costs(model, layout=Layout(tensor=n), **common)) for n in (1, 2))
    assert whole == sum(rows * columns for rows, columns in muon_blocks(model, False))
    assert half == whole / 2
    # Its processes exchange the matrices: those sent, received and assembled are more than the steps of a small matrix need.
    alone, exchanged = (muon_bytes(half, Setting("fp32", 1, 1, momentum=4, released=False, tensor=n)) for n in (1, 2))
    assert exchanged - alone == 4 * half


def test_masked_model_head_is_sharded_over_tensor_ranks():
    shape = {"vocab_size": 512, "num_layers": 2, "hidden_size": 64, "num_heads": 4, "head": "mlm"}
    model = ModelConfig(**shape, mixers=("lion",), mixer_options={"lion": {"causal": False}})
    common = {"dtype": torch.float32, "micro_batch_size": 2, "sequence_length": 64, "parallel": ParallelConfig()}
    *_, head = layer_costs(model, layout=Layout(), **common)
    *_, half = layer_costs(model, layout=Layout(tensor=2), **common)
    assert head.parameters == 64 * 64 + 64 + 4 * 64 + 512  # the tied matrix counts with the embedding
    assert half.parameters == head.parameters - 256


def test_masked_model_head_flops_are_proportional_to_predicted_tokens():
    words = ["configs/lion_s_base.yml", "run.device=cpu"]
    *body, head = layer_flops(read_config(words, 1))
    *same, head_at_half = layer_flops(read_config([*words, "data.masked.rate=0.5"], 1))
    assert body == same
    assert head / head_at_half == pytest.approx(0.3 / 0.5)


@pytest.mark.parametrize(("estimated", "ratio", "off"), [(1.2e9, "1.200", "20%"), (0.8e9, "0.800", "25%")])
def test_wrong_estimate_exits_with_1(monkeypatch, capsys, estimated, ratio, off):
    monkeypatch.setattr(measure_memory, "allocation", lambda *_: 1e9)
    monkeypatch.setattr(measure_memory, "estimate", lambda *_: estimated)
    assert measure_memory.measure(SMALL, [(1, "none")]) == 1
    out, error = capsys.readouterr()
    assert out.splitlines()[-1].split()[-1] == ratio
    assert f"off by {off}" in error


def test_measurement_omits_stages_that_the_configuration_excludes(monkeypatch, capsys):
    """Tensor-parallel overlap excludes ZeRO 3."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    grid = SimpleNamespace(is_main=True, device=torch.device("cpu"), world_size=1)
    monkeypatch.setattr(measure_memory, "init_grid", lambda *_, **__: grid)
    for name in ("allocation", "estimate"):
        monkeypatch.setattr(measure_memory, name, lambda *_: 1e9)
    words = [*SMALL, "batch.micro_batch_size=2", "parallel.tensor=2", "parallel.tensor_overlap=true"]
    assert measure_memory.measure(words) == 0
    stages = [line.split()[0] for line in capsys.readouterr().out.splitlines()[2:]]
    assert stages == ["1"] * 4 + ["2"] * 4


def test_image_classifier_with_an_average_of_its_weights_is_measured(capsys):
    words = ["configs/model/lion_s_vit_tiny.yml", "data.images.train=-", "optimizer.lr=1e-3", "schedule.train_steps=1"]
    words += ["model.vocab_size=10", "model.num_layers=2", "batch.global_batch_size=4", "batch.micro_batch_size=4"]
    words += ["run.device=cpu", "precision.dtype=bf16", "optimizer.ema_decay=0.9"]
    assert measure_memory.measure(words, [(1, "none"), (2, "none")]) == 0, capsys.readouterr().out


@pytest.mark.parametrize(
    ("state", "bytes_per_parameter", "ema"), [("fp32", 2 + 4 + 4 + 8, 0), ("bf16", 2 + 4, 0), ("fp32", 18 + 4, 0.9)]
)
def test_optimizer_state_bytes_are_exact(state, bytes_per_parameter, ema):
    words = ["precision.dtype=bf16", f"precision.optimizer_state={state}", f"optimizer.ema_decay={ema}"]
    config = read_config([*SMALL, *words], 1)
    grid = init_grid("cpu")
    with Allocations("cpu") as count:
        engine = build_engine(config, grid, "bf16")
        allocated = count.now
    elements = sum(p.numel() for p in engine.layers[0].parameters()) + sum(
        p.numel() for layer in engine.layers[1:] for p in layer.parameters()
    )
    assert allocated == pytest.approx(bytes_per_parameter * elements, rel=0.01)
    with count:
        engine.close()
    del engine
    gc.collect()
    assert count.now == 0  # the next engine of a process finds its memory free


def costs(
    mode: str = "none",
    mixers: tuple[str, ...] = ("metala",),
    fp8: Fp8Config | None = None,
    options: dict[str, Any] | None = None,
    **sizes: object,
) -> list[LayerCost]:
    config = ModelConfig(
        vocab_size=1024,
        num_layers=4,
        hidden_size=256,
        num_heads=8,
        mixers=mixers,
        mixer_options=options or {},
        tie_embeddings=False,
    )
    return layer_costs(
        config,
        dtype=torch.bfloat16,
        micro_batch_size=2,
        sequence_length=512,
        layout=Layout(**sizes),  # type: ignore[arg-type]
        parallel=ParallelConfig(activation_checkpointing={"mode": mode}),  # type: ignore[arg-type]
        fp8=fp8,
    )


def test_fp8_saves_the_inputs_of_projections_in_8_bits():
    plain, fp8 = costs(), costs(fp8=Fp8Config(recipe="rowwise", num_layers_at_end_in_bf16=1))
    assert fp8[1].saved < plain[1].saved
    assert fp8[4].forward == pytest.approx(plain[4].forward, rel=0.01)  # the last block


def test_layer_costs_by_layout_and_checkpointing_mode():
    whole, cut, split = costs(), costs(tensor=2), costs(tensor=2, sequence_parallel=True)
    tokens = 2 * 512 * 256 * 2  # bytes of hidden states
    assert whole[1].parameters == pytest.approx(2 * cut[1].parameters, rel=0.02)
    # Sharded tensors need half. Norms, residual streams and the convolution are whole, or sharded by sequence parallelism.
    assert whole[1].saved / 2 < split[1].saved < cut[1].saved < whole[1].saved
    # Context parallelism adds gathered states and decays, and saves `a`, because the core is not fused.
    assert 1 < costs(context=2)[1].saved / (whole[1].saved / 2) < 1.06
    assert costs("full")[1].saved == tokens  # the output
    assert costs("full")[1].backward > whole[1].saved - tokens
    assert tokens < costs("selective")[1].saved < costs("elementwise")[1].saved < whole[1].saved
    # The kernel saves its inputs and output; the plain form would save 512 x 512 weights per head.
    assert costs(mixers=("attention",))[1].saved < 30 * tokens
    for name in ("lion", "mamba2", "hgrn2", "retnet"):
        assert costs(mixers=(name,))[1].saved > tokens
    windowed, full = costs(mixers=("attention",), options={"attention": {"window": 9, "full_layers": (1,)}}, context=2)[
        1:3
    ]
    assert windowed.saved < full.saved, "a window reads the end of the previous shard, a full layer all shards"


# Largest GiB per process, torch.cuda.max_memory_allocated over all steps of `tools.benchmark layouts`: MetaLA 1.4B, bf16,
# ZeRO 1, on H200 of one host, torch 2.11.0, triton 3.6.0, 2026-11-21. docs/guide/parallelism.md shows the same table. The
# memory of CUDA graphs (tensor parallelism) is neither in the allocator's figure nor in the estimate.
LONG = ["batch.sequence_length=131072", "parallel.activation_checkpointing.mode=full"]


MEASURED = {
    "1 GPU": (Layout(), 1, 8, 4, [], 55.565),
    "1 GPU, 131,072 tokens": (Layout(), 1, 1, 1, LONG, 43.929),
    "data 2": (Layout(), 2, 8, 4, [], 47.520),
    "data 4": (Layout(), 4, 8, 4, [], 43.497),
    "tensor 2": (Layout(tensor=2), 2, 8, 4, [], 31.937),
    "tensor 4": (Layout(tensor=4), 4, 8, 4, [], 20.094),
    "tensor 2, sequence parallel": (Layout(tensor=2, sequence_parallel=True), 2, 8, 4, [], 30.531),
    "tensor 4, sequence parallel": (Layout(tensor=4, sequence_parallel=True), 4, 8, 4, [], 17.906),
    "pipeline 2": (Layout(pipeline=2), 2, 8, 16, [], 46.586),
    "pipeline 4": (Layout(pipeline=4), 4, 8, 16, [], 38.149),
    "context 2, 131,072 tokens": (Layout(context=2), 2, 1, 1, LONG, 23.573),
}


@pytest.mark.parametrize("name", MEASURED)
def test_estimate_is_within_3_percent_of_gpu_measurements(name):
    layout, gpus, micro, accumulation, words, measured = MEASURED[name]
    samples = micro * accumulation * gpus // (layout.pipeline * layout.tensor * layout.context)
    words = [*words, f"batch.micro_batch_size={micro}", f"batch.global_batch_size={samples}"]
    words += [f"parallel.{size}={getattr(layout, size)}" for size in ("tensor", "pipeline", "context")]
    words.append(f"parallel.sequence_parallel={str(layout.sequence_parallel).lower()}")
    config = read_config(["configs/metala_1.4b.yml", *words], gpus)
    layers = layers_of(config, layout, "bf16")
    parts = memory(layers, layer_flops(config), config, layout, "bf16", 1)
    estimated = sum(parts.values()) / GIB
    assert estimated == pytest.approx(measured, rel=0.03)
    page = (Path(__file__).parents[3] / "docs" / "guide" / "parallelism.md").read_text()
    assert f"| {name} | {estimated:.1f} | {measured:.1f} | {estimated / measured:.3f} |" in page


def test_block_saves_tensors_of_each_kernel():
    """Count the elements of 16 bits per token in `save_for_backward` of each kernel."""
    d, width = 256, ModelConfig(vocab_size=1024, num_layers=4, hidden_size=256, num_heads=8).mlp_width
    norms_and_sums = 4 * d  # the norms' outputs, the sum between them, the block's output
    convolution = d
    projections = d // 2 + d + d  # q, v, gate
    decay, key = d, d // 2  # the decay is half as wide, in float32
    states = 16 * 32 * 8 // 64  # 8 heads, every 64 tokens
    output, epilogue = d, d
    mlp = 3 * width
    saved = norms_and_sums + convolution + projections + decay + key + states + output + epilogue + mlp
    assert costs()[1].saved == pytest.approx(2 * 2 * 512 * saved, rel=0.01)
    # Decay and key are recomputed from `a`, which is saved in their place.
    recomputed = 2 * d + convolution + decay + key - d // 2 + states + epilogue + width
    assert costs("elementwise")[1].saved == pytest.approx(2 * 2 * 512 * (saved - recomputed), rel=0.01)


@pytest.mark.skipif(importlib.util.find_spec("triton") is not None, reason="Triton is installed")
def test_kernels_without_triton_refuse_to_launch():
    with kernels_of_cuda():
        assert available(torch.empty(1, device="meta"))
        assert not available(torch.empty(1))
    assert not available(torch.empty(1, device="meta"))
    assert "triton" not in sys.modules
    from models.kernels.swiglu import swiglu

    with pytest.raises(ImportError, match="pip install triton"):
        swiglu(torch.ones(2), torch.ones(2))


def test_projections_are_fused_in_the_estimate_as_in_the_engine(monkeypatch):
    fused = []
    monkeypatch.setattr(parallelize, "fuse_projections", lambda layer, tensor: fused.append(tensor))
    for stage, words in ((1, []), (3, []), (1, ["parallel.compile=true"])):
        fused.clear()
        layers_of(read_config([*SMALL, f"parallel.zero_stage={stage}", *words], 1), Layout(), "bf16")
        assert bool(fused) == (stage < 3 and not words)
    layers_of(read_config(SMALL, 1), Layout(tensor=2), "bf16")
    assert fused[-1].count == 2


def test_step_bytes_are_those_of_the_peak():
    layer = LayerCost(parameters=100, largest=100, saved=1e6, forward=1e6, backward=5e5)
    parts = step_bytes([layer] * 4, Setting("bf16", 1, 1, released=False))
    assert parts == {"weights": 800, "gradients": 1600, "optimizer": 4800, "activations": 4e6, "workspace": 5e5}
    pipeline = step_bytes([layer] * 4, Setting("bf16", 1, 1, accumulation=8, in_flight=3))
    assert pipeline["activations"] == 12e6
    assert pipeline["gradients"] == 1600  # the 16-bit gradients of the previous micro-batch share this memory
    light = LayerCost(parameters=1000, largest=1000, saved=1, forward=1, backward=1)
    assert step_bytes([light], Setting("bf16", 1, 4))["gradients"] == 4000 + 2000
    summed = Setting("bf16", 1, 1, accumulation=2)
    assert step_bytes([light], summed)["gradients"] == 4000 + 2000
    assert step_bytes([light], Setting("bf16", 1, 1))["gradients"] == 2000  # one micro-batch needs no accumulation
    # Released gradients do not coexist with the activations, except those of an earlier micro-batch.
    assert step_bytes([layer] * 4, Setting("bf16", 1, 1))["gradients"] == 0
    assert step_bytes([layer] * 4, summed)["gradients"] == 1600
    assert step_bytes([light], Setting("bf16", 1, 4))["optimizer"] == 3000
    assert step_bytes([light], Setting("bf16", 1, 4, averaged=True))["optimizer"] == 4000
    narrow = step_bytes([light], Setting("bf16", 1, 1, optimizer_state="bf16"))
    assert (narrow["weights"], narrow["gradients"], narrow["optimizer"]) == (2000, 2000, 4000)
    copied = Setting("bf16", 2, 1, optimizer_state="bf16")
    assert step_bytes([light], copied)["gradients"] == 4000
    assert step_bytes([light], Setting("bf16", 3, 4, optimizer_state="bf16"))["optimizer"] == 1500
    muon = LayerCost(parameters=1000, largest=1000, saved=1, forward=1, backward=1, matrices=800)
    assert step_bytes([muon], Setting("bf16", 1, 1, momentum=4))["optimizer"] == 12000 - 800 * 4
    assert step_bytes([muon], Setting("bf16", 1, 4, momentum=2))["optimizer"] == (12000 - 800 * 6) / 4
    assert step_bytes([muon], Setting("bf16", 1, 1))["optimizer"] == 12000
    narrow = Setting("bf16", 1, 4, optimizer_state="bf16", momentum=2)
    assert step_bytes([muon], narrow)["optimizer"] == (4000 - 800 * 2) / 4


def test_buffers_of_large_models_have_limits():
    light = LayerCost(parameters=10**9, largest=10**9, saved=1, forward=1, backward=1)
    heavy = replace(light, backward=1e12)
    # 6 bytes per parameter for gradients and their 16-bit copy; two buckets of 500 million, one billion gathered weights.
    assert step_bytes([heavy, light], Setting("bf16", 3, 2))["gradients"] == 6e9 + 2 * 1e9 + 2e9
    # One process gathers nothing. After the backward pass a bucket is copied and converted to float32.
    assert step_bytes([light, light], Setting("bf16", 3, 1))["gradients"] == 12e9 + 2e9 + 1e9 + 1e9
    # Two buckets, and the reduced gradients of this process.
    narrow = Setting("bf16", 1, 2, optimizer_state="bf16")
    assert step_bytes([heavy, light], narrow)["gradients"] == 2 * 1e9 + 2e9


def test_memory_pool_of_cuda_graphs_is_separate_from_head_and_optimizer_step():
    first = LayerCost(parameters=10, largest=10, saved=10, forward=10, backward=10)
    block = LayerCost(parameters=1000, largest=1000, saved=5000, forward=6000, backward=9000)
    last = LayerCost(parameters=10, largest=10, saved=2e5, forward=3e5, backward=4e5)
    layers = [first, block, block, last]
    pool = 2 * 5000 + 9000 + 3 * 10  # the peak is at the start of the backward pass
    # The peak is in the head's backward pass: with graphs beside the whole pool, without graphs beside the saved tensors.
    with_graphs = step_bytes(layers, Setting("bf16", 1, 1, graphs=True))
    assert (with_graphs["activations"], with_graphs["workspace"]) == (pool + 2e5, 4e5)
    without = step_bytes(layers, Setting("bf16", 1, 1))
    assert without["activations"] == 10 + 2 * 5000 + 2e5
    # With a small head the peak is in the optimizer step, beside the pool, which holds the blocks' gradients.
    small = LayerCost(parameters=10, largest=10, saved=10, forward=10, backward=10)
    setting = Setting("bf16", 1, 1, accumulation=2, graphs=True)
    parts = step_bytes([first, block, block, small], setting)
    assert parts["activations"] == pool
    assert parts["gradients"] == 4 * 2020 + 2 * 20
    # Gradients that outlive the backward pass are copied out of the pool at once.
    narrow = step_bytes([first, block, block, small], Setting("bf16", 1, 1, optimizer_state="bf16", graphs=True))
    assert narrow["gradients"] == 2 * 2020


def test_memory_of_cuda_graphs_is_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Count what a graph's pool holds beyond its allocated part, which PyTorch reports itself."""
    segments = [
        {"segment_pool_id": (0, 0), "total_size": 100, "allocated_size": 60},
        {"segment_pool_id": (0, 3), "total_size": 50, "allocated_size": 10},
        {"segment_pool_id": (0, 3), "total_size": 7, "allocated_size": 7},
    ]
    monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda: segments)
    assert idle_bytes_in_graph_pools() == 40


def test_last_pipeline_stage_holds_a_copy_of_a_tied_embedding() -> None:
    """Build an embedding of 70 weights and a head with 5 of its own; the first stage holds most micro-batches."""
    layers = [
        LayerCost(parameters, largest, 0.0, 0.0, 0.0) for parameters, largest in ((70, 70), (9, 4), (9, 4), (5, 5))
    ]

    def stages(layout: Layout, *, tied: bool) -> list[tuple[list[int], int]]:
        config: Any = SimpleNamespace(
            model=SimpleNamespace(tie_embeddings=tied), batch=SimpleNamespace(gradient_accumulation_steps=8)
        )
        return [
            ([layer.parameters for layer in of_stage], in_flight)
            for of_stage, in_flight in layers_by_stage(layers, [1.0] * 4, config, layout)
        ]

    assert stages(Layout(pipeline=2), tied=True) == [([70, 9], 2), ([9, 75], 1)]
    assert stages(Layout(pipeline=2), tied=False) == [([70, 9], 2), ([9, 5], 1)]
    assert stages(Layout(), tied=True) == [([70, 9, 9, 5], 1)], "one process holds the matrix once"
