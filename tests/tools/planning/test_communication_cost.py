"""The communication cost: bytes sent per step, and the time of a step."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megatron_lite.parallel.layout import Layout
from megatron_lite.planning.communication_cost import FP8_TIME, Links, Workload, step_seconds, volumes
from megatron_lite.planning.memory import GIB
from models.config import ModelConfig
from models.language_model import LanguageModel
from models.mixers import MIXERS
from tools.planning.estimate import decoding_bytes, gathered_elements, layer_flops, read_config, workload

SMALL_VOCABULARY = ["configs/default.yml", "run.device=cpu", "model.vocab_size=512", "data.tokenizer.vocab_size=512"]


@pytest.mark.parametrize(("dtype", "width"), [("fp32", 4), ("bf16", 2)])
def test_communication_width_follows_the_dtype(dtype: str, width: int) -> None:
    config = read_config([*SMALL_VOCABULARY, f"precision.dtype={dtype}", f"precision.optimizer_state={dtype}"], 1)
    planned = workload(config, layer_flops(config), dtype)
    assert (planned.width, planned.optimizer_state) == (width, dtype)


def work(**changes: object) -> Workload:
    values = {"parameters": 10**9, "layers": 24, "hidden": 2048, "state_elements": 2048 * 128, "sequence_length": 2048}
    values |= {"micro_batch_size": 4, "global_batch_size": 512, "flops_per_token": 6e9}
    return Workload(**{**values, **changes})  # type: ignore[arg-type]


def test_volumes_by_parallel_dimension():
    assert volumes(work(), Layout(), 1) == {"data": 0, "tensor": 0, "pipeline": 0, "context": 0, "muon": 0}
    assert volumes(work(), Layout(), 4)["data"] == pytest.approx(2 * 0.75 * 2e9)
    # DeepSpeed's ZeRO 1 all-reduces the gradients of other dtypes, and those of an optimizer with all state in bf16.
    assert volumes(work(dtype="fp32"), Layout(), 4)["data"] == pytest.approx(3 * 0.75 * 4e9)
    assert volumes(work(optimizer_state="bf16"), Layout(), 4)["data"] == pytest.approx(3 * 0.75 * 2e9)
    assert volumes(work(zero_stage=3), Layout(), 4)["data"] == pytest.approx(32 * 3 * 0.75 * 2e9)
    assert volumes(work(), Layout(tensor=2, pipeline=2), 16)["data"] == pytest.approx(2 * 0.75 * 2e9 / 4)
    assert volumes(work(matrices=10**6), Layout(pipeline=2), 8)["muon"] == pytest.approx(0.75 * 4 * 5e5 / 4)
    hidden = 2 * 4 * 2048 * 2048
    assert volumes(work(), Layout(tensor=2), 2)["tensor"] == pytest.approx(128 * 24 * 4 * hidden)
    assert volumes(work(recompute=True), Layout(tensor=2), 2)["tensor"] == pytest.approx(128 * 24 * 6 * hidden)
    assert volumes(work(), Layout(pipeline=4), 4)["pipeline"] == pytest.approx(128 * 2 * hidden)
    for sequence_parallel, shards in ((False, 1), (True, 2)):
        layout = Layout(tensor=2, pipeline=4, sequence_parallel=sequence_parallel)
        assert volumes(work(), layout, 8)["pipeline"] == pytest.approx(128 * 2 * hidden / shards)
    # States do not depend on the sequence length, and attention gathers the tokens of the shards.
    attention = volumes(work(state_elements=0, token_elements=100.0), Layout(context=4), 4)["context"]
    assert attention == pytest.approx(128 * 24 * 2 * 3 * 100 * 2 * 4 * 2048 / 4)
    sent = volumes(work(), Layout(context=4), 4)["context"]
    assert sent == volumes(work(sequence_length=1 << 17), Layout(context=4), 4)["context"] > 0
    assert volumes(work(), Layout(tensor=2, context=4), 8)["context"] == pytest.approx(sent / 2)


@pytest.mark.parametrize(
    ("name", "options"), [*((name, {}) for name in MIXERS), ("linear_attention", {"feature_map": "taylor"})]
)
def test_gathered_numbers_are_the_state_of_the_mixer(name: str, options: dict[str, str]):
    model = ModelConfig(
        vocab_size=64, num_layers=2, hidden_size=256, num_heads=4, mixers=(name, "attention"),
        mixer_options={name: options} if options else {},
    )  # fmt: skip
    elements, tokens = gathered_elements(model, 64)
    assert tokens == 4 * 256 / (1 if name == "attention" else 2), "queries, keys, values and outputs"
    if name == "attention":
        assert elements == 0
    elif not model.bidirectional_mixers():
        mixer = MIXERS[name](model, 0, model.options_of(name))
        with torch.no_grad():
            _, state = mixer(torch.zeros(1, 8, 256), return_state=True)
        size = state["recurrent"].numel()
        # The attention layer adds nothing to the mean over two blocks. Per-channel decays are as many as states, and the
        # delta rule has matrices.
        twice = [
            "hgrn",
            "mamba",
            "qlstm",
            "rg_lru",
            "rwkv4",
            "s5",
            "delta_net",
            "gated_delta_net",
            "gdn2",
            "kda",
            "rwkv7",
        ]
        assert size <= 2 * elements <= (2 if name in twice else 1.12) * size
    else:
        assert 2 * elements == 2 * 4 * (32 * 64 + 32)  # MetaLA's state and decays, in both directions


def test_documented_volumes_equal_the_model():
    config, muon = (read_config(["configs/metala_1.4b.yml", *words], 8) for words in ([], ["optimizer.name=muon"]))
    work = workload(config, layer_flops(config), "bf16")
    page = (Path(__file__).parents[3] / "docs" / "guide" / "parallelism.md").read_text()
    shown = {
        "data, ZeRO 1": (work, Layout(), "data"),
        "data, ZeRO 2": (replace(work, zero_stage=2), Layout(), "data"),
        "data, ZeRO 3": (replace(work, zero_stage=3), Layout(), "data"),
        "tensor 8": (work, Layout(tensor=8), "tensor"),
        "pipeline 4": (work, Layout(pipeline=4), "pipeline"),
        "context 4": (work, Layout(context=4), "context"),
        "Muon": (workload(muon, layer_flops(config), "bf16"), Layout(), "muon"),
    }
    for name, (case, layout, kind) in shown.items():
        gib = volumes(case, layout, 8)[kind] / GIB
        assert re.search(rf"^\| {name} \|.*\| ([\d,.]+) GiB \|$", page, re.MULTILINE)[1] == (
            f"{gib:.1f}" if gib < 8 else f"{gib:,.0f}"
        )


def test_step_seconds_of_compute_bubble_and_network():
    links = Links()
    alone = step_seconds(work(), Layout(), 1, 4e14, links)
    assert sum(alone.values()) == alone["compute"] == pytest.approx(6e9 * 512 * 2048 / 4e14)
    piped = step_seconds(work(), Layout(pipeline=4), 4, 4e14, links)
    assert piped["bubble"] == pytest.approx(piped["compute"] * 3 / 128)
    every = step_seconds(work(), Layout(tensor=2, pipeline=4, context=2), 16, 4e14, links)
    assert min(every["tensor"], every["context"]) > 0
    assert every["bubble"] == pytest.approx((every["compute"] + every["tensor"] + every["context"]) * 3 / 128)
    inside, outside = (step_seconds(work(), Layout(tensor=t), t, 4e14, links)["tensor"] for t in (8, 16))
    assert outside > 5 * inside  # over the network


def test_matmuls_in_fp8_take_their_measured_share_of_the_time():
    config = read_config([*SMALL_VOCABULARY, "precision.dtype=bf16", "precision.fp8.recipe=rowwise"], 1)
    model = config.model
    mixer = round(3.5 * model.hidden_size**2)  # q, v, gate, output projection
    weights = 3 * model.hidden_size * model.mlp_width + mixer
    assert workload(config, layer_flops(config), "bf16").fp8_flops_per_token == 6 * model.num_layers * weights
    plain = workload(read_config(SMALL_VOCABULARY, 1), layer_flops(config), "bf16")
    assert plain.fp8_flops_per_token == 0
    alone = step_seconds(work(fp8_flops_per_token=5e9), Layout(), 1, 4e14, Links())
    assert alone["compute"] == pytest.approx((1e9 + FP8_TIME * 5e9) * 512 * 2048 / 4e14)


def test_latency_grows_with_hops():
    links = Links(inside=1e30, latency_inside=1e-3)
    # 128 micro-batches to the next stage and back; three collectives of a ring of four.
    assert step_seconds(work(), Layout(pipeline=4), 4, 4e14, links)["pipeline"] == pytest.approx(2 * 128 * 1e-3)
    assert step_seconds(work(), Layout(context=4), 4, 4e14, links)["context"] == pytest.approx(128 * 24 * 2 * 3 * 1e-3)
    assert step_seconds(work(), Layout(), 4, 4e14, links)["data"] == pytest.approx(3 * 3 * 1e-3)
    assert step_seconds(work(), Layout(), 4, 4e14, links)["data"] == pytest.approx(3 * 3e-3)


def test_reduction_of_the_last_micro_batch_does_not_overlap():
    stage2 = work(zero_stage=2)
    slow, fast = (Links(inside=inside, latency_inside=0) for inside in (1e9, 1e15))
    sent, compute = volumes(stage2, Layout(), 4)["data"], 6e9 * 512 * 2048 / 4 / 4e14
    assert step_seconds(stage2, Layout(), 4, 4e14, slow)["data"] == pytest.approx(sent / 1e9 - compute)
    assert step_seconds(stage2, Layout(), 4, 4e14, fast)["data"] == pytest.approx(sent / 1e15 / 32 / 3)


def test_window_exchanges_its_keys_and_values_only():
    sizes = {"vocab_size": 64, "num_layers": 4, "hidden_size": 64, "num_heads": 4, "mixers": ("metala", "attention")}

    def gathered(length: int, **options: object) -> float:
        return gathered_elements(ModelConfig(**sizes, mixer_options={"attention": options}), length)[1]  # type: ignore[arg-type]

    per_token = 4 * 64 / 2
    assert gathered(512) == per_token, "queries, keys, values and outputs, in every second block"
    assert gathered(512, window=129) == per_token / 2 * 128 / 512
    assert gathered(512, window=129, full_layers=(3,)) == (gathered(512) + gathered(512, window=129)) / 2


def test_decoding_cache_of_a_hybrid_counts_states_windows_and_all_keys():
    shape = {
        "vocab_size": 64,
        "num_layers": 8,
        "hidden_size": 64,
        "num_heads": 4,
        "mixers": ("metala",) * 3 + ("attention",),
    }

    def cache_bytes(length: int, **options: object) -> int:
        return decoding_bytes(ModelConfig(**shape, mixer_options={"attention": options}), length, "bf16")

    model = LanguageModel(ModelConfig(**shape, mixer_options={"attention": {"window": 5, "full_layers": (7,)}}))
    _, state = model.to(torch.bfloat16)(torch.zeros(1, 20, dtype=torch.int64), return_state=True)
    allocated = sum(tensor.nbytes for layer in state for tensor in layer.values())
    assert cache_bytes(20, window=5, full_layers=(7,)) == allocated
    per_token = 2 * 64 * 2  # without padding the cache has no mask
    assert cache_bytes(4000) - cache_bytes(1000) == 2 * 3000 * per_token
    assert cache_bytes(4000, window=1000) == cache_bytes(999) + 2 * 999  # a window has a mask, one byte per key
    bidirectional = ModelConfig(**{**shape, "mixers": ("lion",), "mixer_options": {"lion": {"causal": False}}})
    assert decoding_bytes(bidirectional, 20, "bf16") is None


def test_newton_schulz_time_is_shared_by_the_ranks():
    config = read_config(["configs/metala_1.4b.yml", "optimizer.name=muon"], 8)
    muon = workload(config, layer_flops(config), "bf16")
    assert muon.muon_flops == pytest.approx(61e12, rel=0.02)  # 24 layers, five steps
    assert muon.matrices == pytest.approx(1.2e9, rel=0.03)
    config = read_config(["configs/metala_1.4b.yml", "optimizer.name=muon", "optimizer.muon.per_head=true"], 8)
    assert workload(config, layer_flops(config), "bf16").muon_flops < 0.9 * muon.muon_flops
    one, eight = (step_seconds(muon, Layout(), gpus, 4e14, Links(latency_inside=0))["muon"] for gpus in (1, 8))
    assert one == pytest.approx(muon.muon_flops / 7e14)
    assert one / 8 < eight < one / 4
