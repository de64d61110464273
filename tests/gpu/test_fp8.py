"""FP8 matmuls on CUDA compared with the float32 reference of a CPU: linears, fused projections, an engine, CUDA graphs."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from megatron_lite.config.fp8_schema import Fp8Config
from megatron_lite.config.schema import OptimizerConfig, ParallelConfig, PrecisionConfig
from megatron_lite.engine.engine import Engine
from megatron_lite.fp8.rowwise import dequantized, quantize_rows, transposed
from megatron_lite.optim.lr_schedule import learning_rate
from megatron_lite.parallel.fp8_projections import use_fp8
from megatron_lite.parallel.fused_projections import project_inputs
from megatron_lite.parallel.grid import Grid, init_grid
from models.language_model import build_layer, layer_specs
from models.layers.mlp import GatedMLP
from models.recompute import recompute_elementwise
from tests import oracle
from tests.megatron_lite.conftest import batches, model_config

LR, WARMUP, STEPS = 3e-4, 3, 6
CONFIG = model_config(("metala", "attention"), hidden_size=256)

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() < (9, 0),
    reason="needs a CUDA device of compute capability 9.0",
)


@pytest.fixture(scope="module")
def grid() -> Grid:
    return init_grid("cuda")


@pytest.mark.parametrize("shape", [(16, 16), (77, 2048), (1000, 5632), (40, 9008)])
def test_quantisation_equals_that_of_a_cpu(shape):
    x = torch.randn(shape).bfloat16() * torch.exp2(torch.randint(-20, 20, (shape[0], 1)).float()).bfloat16()
    x[3] = 0
    others = torch.exp2(torch.randint(-9, 9, (shape[0], 1)).float())
    actual, expected = quantize_rows(x.cuda()), quantize_rows(x)
    pairs = (actual, expected), (transposed(actual, others.cuda()), transposed(expected, others))
    for of_cuda, of_cpu in (*pairs, (quantize_rows(*x.cuda().split([8, shape[1] - 8], 1)), expected)):
        assert torch.equal(of_cuda.scale.cpu(), of_cpu.scale)
        assert torch.equal(dequantized(of_cuda).cpu(), dequantized(of_cpu))


@pytest.mark.parametrize("tokens", [1, 37, 4096])
def test_projections_equal_the_reference(tokens):
    """Compare outputs and all gradients, which are rounded to bf16. Fast accumulation of the outputs keeps about 14 bits."""
    sizes = (256, 512, 256, 512)
    linears = [torch.nn.Linear(1024, size, bias=size == 512).bfloat16() for size in sizes]
    for linear in (linears[0], linears[2], linears[3]):
        linear.in_fp8 = True  # type: ignore[assignment]
    x = torch.randn(1, tokens, 1024).bfloat16()
    # Gradients that are adjacent in memory, as those of MetaLA.
    dy = torch.randn(1, tokens, sum(sizes)).bfloat16().split(sizes, -1)
    results = []
    for device in ("cuda", "cpu"):
        for linear in linears:
            linear.to(device).zero_grad()
        leaf = x.to(device).requires_grad_()
        outputs = project_inputs(None, leaf, linears)
        whole = torch.cat(dy, -1).to(device).split(sizes, -1)
        torch.autograd.backward(outputs, whole)
        gradients = [parameter.grad for linear in linears for parameter in linear.parameters()]
        results.append([tensor.float().cpu() for tensor in (*outputs, leaf.grad, *gradients)])
    for actual, expected in zip(*results, strict=True):
        assert ((actual - expected).norm() / expected.norm()).item() < 1e-2


@pytest.mark.parametrize(("tokens", "width"), [(1, 64), (37, 5632), (300, 9008)])
def test_mlp_equals_the_reference(tokens, width):
    """Allow the rounding of FP8: sigmoids differ in the last bit, so some numbers are rounded to the other neighbour."""
    layer = GatedMLP(dataclasses.replace(CONFIG, intermediate_size=width)).bfloat16()
    use_fp8(layer, ("gate_proj", "up_proj", "down_proj"))
    x, dy = torch.randn(2, tokens, 256).bfloat16(), torch.randn(2, tokens, 256).bfloat16()
    results = []
    for device in ("cuda", "cpu"):
        layer.to(device).zero_grad()
        leaf = x.to(device).requires_grad_()
        y = layer(leaf)
        y.backward(dy.to(device))
        results.append([t.float().cpu() for t in (y, leaf.grad, *(p.grad for p in layer.parameters()))])
    for actual, expected in zip(*results, strict=True):
        assert ((actual - expected).norm() / expected.norm()).item() < 1.5e-2


def engine_on(grid: Grid, recipe: str = "rowwise", **parallel) -> Engine:
    return Engine(
        layer_specs(CONFIG),
        build_layer,
        seed=11,
        grid=grid,
        dtype="bf16",
        micro_batch_size=2,
        accumulation=2,
        optimizer=OptimizerConfig(lr=LR),
        parallel=ParallelConfig(**parallel),
        precision=PrecisionConfig(dtype="bf16", fp8=Fp8Config(recipe=recipe)),  # type: ignore[arg-type]
        recompute=recompute_elementwise,
    )


def losses(engine: Engine) -> list[float]:
    out = []
    for index, step in enumerate(batches(STEPS)):
        lr = learning_rate(index, kind="cosine", peak=LR, warmup_steps=WARMUP, decay_steps=STEPS, min_ratio=0.1)
        out.append(engine.train_step(step, lr=lr).loss)
    engine.close()
    return out


def test_training_is_deterministic_and_near_float32(grid):
    first = losses(engine_on(grid))
    assert losses(engine_on(grid)) == first
    assert first != losses(engine_on(grid, "none"))
    reference = oracle.train(CONFIG, batches(STEPS), seed=11, lr=LR, warmup=WARMUP, total=STEPS, device="cuda")
    assert first == pytest.approx([loss for loss, _ in reference], rel=1e-2)


@pytest.mark.parametrize("mode", ["elementwise", "selective", "full"])
def test_recomputation_gives_the_same_losses(grid, mode):
    assert losses(engine_on(grid, activation_checkpointing={"mode": mode})) == losses(engine_on(grid))


def test_cuda_graphs_give_the_same_losses(grid):
    assert losses(engine_on(grid, cuda_graph=True)) == losses(engine_on(grid))
