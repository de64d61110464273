"""FP8 rows that a kernel of the model attaches to its result: which linears take them, what each kernel writes, and memory."""

from __future__ import annotations

import math
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_lite.fp8.rowwise import attached_rows, dequantized, quantize_rows
from megatron_lite.parallel import fp8_projections
from megatron_lite.parallel.fp8_projections import select_projections, use_fp8
from megatron_lite.parallel.fused_projections import fp8_linear, fuse_projections
from megatron_lite.planning.memory import Allocations
from models.block import Block
from models.recompute import recompute_elementwise
from tests.megatron_lite.conftest import model_config
from tests.megatron_lite.fp8.emulation import record_quantised
from tests.megatron_lite.fp8.test_rowwise import draw
from tools.planning.meta_device import import_kernels, kernels_of_cuda


def with_rows(x: Tensor, values: Tensor) -> Tensor:
    """Return x, to which the FP8 rows of `values` are attached."""
    import_kernels()
    from models.kernels.primitives import attach_rows

    for to, of in zip(attach_rows(x), quantize_rows(values.reshape(-1, x.shape[-1])), strict=True):
        to.copy_(of)
    return x


def only_rows(values: Tensor) -> Tensor:
    """Return a result in the shape of `values` that has FP8 rows only, as a kernel writes it."""
    import_kernels()
    from models.kernels.primitives import unwritten

    y = unwritten(values)
    y.untyped_storage().fill_(0xFF)  # NaN
    return with_rows(y, values)


@pytest.mark.parametrize("shape", [(2, 15, 32), (30, 32), (1, 1, 32), (1, 32, 32)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_linear_takes_the_rows_of_its_input(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x, weight = (draw(*size).to(dtype) for size in ((math.prod(shape[:-1]), 32), (16, 32)))
    x = x.view(shape)
    expected = fp8_linear(x, weight)
    y = only_rows(x)
    assert y.untyped_storage().nbytes() == dtype.itemsize
    assert y.isnan().all()
    assert torch.equal(fp8_linear(y, weight), expected)
    assert torch.equal(fp8_linear(with_rows(torch.zeros_like(x), x), weight), expected)


def test_a_result_that_has_rows_only_is_nan_for_other_readers() -> None:
    y = only_rows(draw(32, 32))
    for other in (y[:16], y[:, :16], y.clone(), y.bfloat16(), y + 0, y.view(16, 64)):
        assert attached_rows(other) is None
        assert dequantized(quantize_rows(other)).isnan().all()


def test_rows_are_those_of_the_whole_unchanged_result() -> None:
    x = with_rows(draw(32, 32), draw(32, 32, seed=1))
    assert attached_rows(x) is not None
    for other in (x[:16], x[:, :16], x.t(), x.clone(), x.view(torch.int32), x.view(16, 64)):
        assert attached_rows(other) is None
    assert not torch.equal(quantize_rows(x[:, :16], x[:, 16:]).data, quantize_rows(x).data)
    x.view(2, 16, 32)[0].mul_(2)
    assert attached_rows(x) is None
    assert torch.equal(dequantized(quantize_rows(x)), dequantized(quantize_rows(x.clone())))


class _WithRows(torch.autograd.Function):
    """Pass x on. Its gradient has rows of other numbers, zeros, so that a reader shows which it took."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        dx = dy.clone()
        return with_rows(dx, torch.zeros_like(dx))


@pytest.mark.parametrize("readers", [1, 2])
def test_a_sum_of_gradients_has_no_rows(readers: int) -> None:
    """One reader: the linear before takes the rows. Two: autograd adds the gradients, in place where it can."""
    weight = draw(16, 32, seed=1).requires_grad_()
    y = fp8_linear(draw(32, 32), weight)
    loss = sum((_WithRows.apply(y) * (2 + i)).sum() for i in range(readers))
    (gradient,) = torch.autograd.grad(loss, weight)
    assert bool(gradient.any()) == (readers == 2)


def written(block: Block) -> dict[str, bool]:
    modules = {"norm1": block.norm1, "norm2": block.norm2, "mixer": block.mixer}
    return {
        f"{name}.{attribute}": True
        for name, module in modules.items()
        for attribute in ("fp8_output", "fp8_gradient")
        if getattr(module, attribute, False)
    }


OF_GRADIENTS = {"norm1.fp8_gradient", "norm2.fp8_gradient"}


@pytest.mark.parametrize(
    ("options", "sequence", "expected"),
    [
        ({}, False, {*OF_GRADIENTS, "norm2.fp8_output", "mixer.fp8_output"}),
        ({}, True, {"mixer.fp8_output"}),
        ({"mixers": ("attention",)}, False, {*OF_GRADIENTS, "norm2.fp8_output"}),
        ({"mlp": "geglu"}, False, {*OF_GRADIENTS, "mixer.fp8_output"}),
        ({"mlp_bias": True}, False, {*OF_GRADIENTS, "mixer.fp8_output"}),
        ({"intermediate_size": 152}, False, {"norm2.fp8_gradient", "mixer.fp8_output"}),
        ({"parallel_residual": True}, False, {"norm1.fp8_gradient", "norm2.fp8_output", "mixer.fp8_output"}),
    ],
)
def test_results_are_quantised_where_an_fp8_linear_reads_them(options: Any, sequence: bool, expected: set[str]) -> None:
    block = Block(model_config(**options), 0)
    assert written(block) == {}
    names = select_projections(block, 1)[0]
    use_fp8(block, [])
    assert written(block) == {}
    use_fp8(block, names, SimpleNamespace(sequence=sequence, group=None))  # type: ignore[arg-type]
    assert set(written(block)) == expected


@pytest.mark.parametrize("recompute", [nullcontext, recompute_elementwise])
@pytest.mark.parametrize("mixer", ["metala", "attention"])
def test_kernels_between_blocks_quantise_their_results(mixer: str, recompute: Any, monkeypatch) -> None:
    """Run two blocks on "meta", which takes the paths of CUDA, and list what a separate kernel quantises."""
    size, width, tokens = 256, 512, 2 * 80  # no weight has as many rows
    config = model_config((mixer,), hidden_size=size, intermediate_size=width, num_heads=4)
    shapes = record_quantised(monkeypatch)
    with torch.device("meta"):
        blocks = [Block(config, index).bfloat16() for index in range(2)]
        x = torch.empty(2, 80, size, dtype=torch.bfloat16, requires_grad=True)
    for block in blocks:
        use_fp8(block, select_projections(block, 1)[0])
        fuse_projections(block, None)
    with kernels_of_cuda(), recompute():
        y = blocks[1](blocks[0](x))
        # Of each block the input of the first projections, which has 16 bits, and the output of softmax attention.
        expected = {"metala": 1, "attention": 2}[mixer]
        assert [shape for shape in shapes if shape[0] == tokens] == [(tokens, size)] * 2 * expected
        shapes.clear()
        y.backward(torch.empty_like(y))
    gradients = [shape[1] for shape in shapes if shape[0] == tokens]
    # The gradients of the first projections, and of the last down_proj, which no norm of a block computes.
    inner = {"metala": size // 2 + 2 * size, "attention": 3 * size}[mixer]
    assert gradients == [size, inner, inner]
    assert x.grad is not None


@pytest.mark.parametrize("recompute", [nullcontext, recompute_elementwise])
@pytest.mark.parametrize("mixer", ["metala", "attention"])
def test_rows_take_no_more_memory_than_separate_kernels(mixer: str, recompute: Any, monkeypatch) -> None:
    """Run two blocks of MetaLA 360M on "meta", which takes the paths of CUDA, and compare live bytes and peaks."""
    config = model_config((mixer,), hidden_size=1024, num_heads=8, intermediate_size=2816)

    def measured() -> dict[str, int]:
        with torch.device("meta"):
            blocks = [Block(config, index).bfloat16() for index in range(2)]
            x = torch.empty(4, 480, 1024, dtype=torch.bfloat16, requires_grad=True)
        for block in blocks:
            use_fp8(block, select_projections(block, 1)[0])
            fuse_projections(block, None)
        parameters = [p for block in blocks for p in block.parameters()]
        with kernels_of_cuda(), Allocations("meta", [x, *parameters]) as count:
            with recompute():
                y = blocks[1](blocks[0](x))
            saved, forward = count.now, count.peak
            y.backward(torch.empty_like(y))
            x.grad = None  # the rows of this gradient, which no FP8 linear reads, end with it
            return {"saved": saved, "forward": forward, "peak": count.peak, "after": count.now}

    measured()  # fills caches
    fused = measured()
    monkeypatch.setattr(fp8_projections, "_quantize_results", lambda *_: None)
    separate = measured()
    # While the MLP runs, the norm's output exists in FP8 only. Without attached rows it also exists in 16 bits.
    assert fused.pop("forward") < separate.pop("forward")
    for name, size in fused.items():
        assert size <= separate[name], name
