"""Rowwise FP8 matmuls: scales, rounding, error bounds, and the operands of `torch._scaled_mm`."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from megatron_lite.fp8.rowwise import (
    Quantized,
    Recipe,
    dequantized,
    quantize_columns,
    quantize_rows,
    scaled_matmul,
    scaled_mm,
)
from megatron_lite.parallel.fused_projections import fp8_linear, project_inputs
from tests.megatron_lite.fp8.emulation import emulated

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
ROWWISE, HIGH_PRECISION_GW = Recipe(True, E4M3), Recipe(False, E4M3)


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return numbers whose rows and columns differ in size by up to 2^12."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator)
    for dim in range(2):
        sizes = torch.randint(-6, 6, (shape[dim],), generator=generator)
        x *= torch.exp2(sizes.float()).view(-1, *[1] * (1 - dim))
    return x.to(dtype)


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_rows_and_columns_equal_the_emulation_in_float64(dtype):
    x = draw(37, 80)
    x[3] = 0
    assert torch.equal(dequantized(quantize_rows(x, dtype)).double(), emulated(x, dtype))
    columns = quantize_columns(x, dtype)
    assert columns.data.shape == (80, 48)
    assert columns.data.is_contiguous()
    assert torch.equal(dequantized(columns)[:, :37].double(), emulated(x.t(), dtype))
    assert not dequantized(columns)[:, 37:].any()
    for scale in (columns.scale, quantize_rows(x, dtype).scale):
        assert torch.equal(scale, torch.exp2(torch.log2(scale).round()))  # powers of two


@pytest.mark.parametrize("largest", [448.0, 448.001, 449.0, 3.0e38, 2.0**-60, 1e-45, 0.0])
def test_largest_number_of_a_row_stays_in_range(largest):
    q = quantize_rows(torch.tensor([[largest, -largest / 3, 0.0]]))
    assert torch.isfinite(q.scale).all()
    assert torch.isfinite(q.scale.reciprocal()).all()
    error = abs(dequantized(q)[0, 0].item() - torch.tensor(largest).item())
    assert error <= max(largest / 16, 2.0**-100)


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_a_row_that_is_not_finite_gives_outputs_that_are_not_finite(value):
    x, w = draw(4, 32), draw(16, 32, seed=1)
    x[2, 5] = value
    finite = torch.isfinite(scaled_matmul(quantize_rows(x), quantize_rows(w), torch.float32))
    assert finite[[0, 1, 3]].all()
    assert not finite[2].any()


def test_shards_of_a_row_give_the_numbers_of_the_whole_row():
    """Numbers above 2^-13 of the row's largest are equal; the others differ by at most 2^-16 of it."""
    x = draw(64, 256)
    whole = dequantized(quantize_rows(x))
    shards = torch.cat([dequantized(quantize_rows(shard)) for shard in x.chunk(4, 1)], 1)
    largest = x.abs().amax(1, keepdim=True)
    large = x.abs() > largest * 2.0**-13
    assert 0.5 < large.float().mean() < 1
    assert torch.equal(whole[large], shards[large])
    assert not torch.equal(whole, shards)
    assert ((whole - shards).abs() <= largest * 2.0**-16).all()


def _takes_row_scales() -> bool:
    """Say whether `_scaled_mm` of this torch takes a scale per row on a CPU; torch 2.11 does not."""
    x = quantize_rows(torch.ones(16, 16))
    try:
        scaled_mm(x, x, torch.float32, fast=False)
    except RuntimeError:
        return False
    return True


@pytest.mark.skipif(not _takes_row_scales(), reason="needs a torch whose _scaled_mm takes a scale per row on a CPU")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("left", "tokens"), [(E4M3, 48), (E5M2, 48), (E4M3, 37)])
def test_scaled_mm_of_torch_agrees_with_the_reference(left, tokens, dtype):
    """Compare with the CPU's `_scaled_mm`, with the operands of CUDA: contiguous rows, scales [rows, 1] and [1, columns]."""
    x, w, g = draw(tokens, 64), draw(32, 64, seed=1), draw(tokens, 32, seed=2)
    pairs: list[tuple[Quantized, Quantized]] = [
        (quantize_rows(x), quantize_rows(w)),
        (quantize_rows(g, left), quantize_columns(w)),
        (quantize_columns(g, left), quantize_columns(x)),
    ]
    for a, b in pairs:
        actual, expected = scaled_mm(a, b, dtype, fast=False), scaled_matmul(a, b, dtype)
        scale = expected.float().abs().amax(1, keepdim=True)
        tolerance = 2.0**-8 if dtype == torch.bfloat16 else 1e-5
        assert ((actual.float() - expected.float()).abs() <= tolerance * scale).all()


@pytest.mark.parametrize("recipe", [ROWWISE, HIGH_PRECISION_GW, Recipe(True, E5M2)])
@pytest.mark.parametrize("bias", [False, True])
def test_linear_equals_the_emulation_in_float64(recipe, bias):
    x, weight, dy = draw(30, 64).requires_grad_(), draw(48, 64, seed=1).requires_grad_(), draw(30, 48, seed=2)
    offset = torch.linspace(-1, 1, 48, requires_grad=True) if bias else None
    y = fp8_linear(x.view(2, 15, 64), weight, offset, recipe=recipe)
    y.backward(dy.view(2, 15, 48))
    wide_x, wide_w, wide_dy = x.detach().double(), weight.detach().double(), dy.double()
    expected = emulated(wide_x) @ emulated(wide_w).t() + (0 if offset is None else offset.detach().double())
    dx = emulated(wide_dy, recipe.gradient_dtype) @ emulated(wide_w.t()).t()
    dw = emulated(wide_dy.t(), recipe.gradient_dtype) @ emulated(wide_x.t()).t()
    if not recipe.weight_gradient:
        dw = wide_dy.t() @ wide_x
    for actual, wanted in ((y.detach().view(30, 48), expected), (x.grad, dx), (weight.grad, dw)):
        assert ((actual.double() - wanted).norm() / wanted.norm()).item() < 1e-6
    if offset is not None:
        torch.testing.assert_close(offset.grad, dy.sum(0))


def test_error_of_the_matmuls_is_that_of_three_mantissa_bits():
    """Rounding to e4m3 has a relative error of at most 2^-4, of 0.026 in the mean square; a matmul of two adds both."""
    x, weight, dy = (
        torch.randn(size, generator=torch.Generator().manual_seed(3)) for size in ((256, 512), (128, 512), (256, 128))
    )
    x.requires_grad_(), weight.requires_grad_()
    y = fp8_linear(x, weight, recipe=ROWWISE)
    y.backward(dy)
    exact = x.detach() @ weight.detach().t(), dy @ weight.detach(), dy.t() @ x.detach()
    for actual, wanted in zip((y.detach(), x.grad, weight.grad), exact, strict=True):
        assert 0.02 < ((actual - wanted).norm() / wanted.norm()).item() < 0.045


def test_shards_of_a_linear_sum_to_the_whole_linear():
    """Row-parallel outputs and column-parallel input gradients: equal to the last bit where the sums themselves are exact."""
    generator = torch.Generator().manual_seed(4)
    x, weight, dy = (
        torch.randint(-15, 16, size, generator=generator).float() for size in ((32, 64), (48, 64), (32, 48))
    )
    weight *= torch.tensor([1.0, 2.0**-6]).repeat_interleave(32)  # the shards have other scales

    def gradients(*inputs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        leaves = [leaf.clone().requires_grad_() for leaf in inputs[:2]]
        y = fp8_linear(*leaves, recipe=ROWWISE)
        return y.detach(), *torch.autograd.grad(y, leaves, inputs[2])

    y, dx, dw = gradients(x, weight, dy)
    row = [gradients(*pair, dy) for pair in zip(x.chunk(2, 1), weight.chunk(2, 1), strict=True)]
    assert torch.equal(row[0][0] + row[1][0], y)
    assert torch.equal(torch.cat([row[0][1], row[1][1]], 1), dx)
    assert torch.equal(torch.cat([row[0][2], row[1][2]], 1), dw)
    column = [gradients(x, *pair) for pair in zip(weight.chunk(3), dy.chunk(3, 1), strict=True)]
    assert torch.equal(torch.cat([part[0] for part in column], 1), y)
    assert torch.equal(sum(part[1] for part in column), dx)
    assert torch.equal(torch.cat([part[2] for part in column]), dw)
    tokens = [gradients(*pair) for pair in zip(x.chunk(2), [weight] * 2, dy.chunk(2), strict=True)]
    assert torch.equal(tokens[0][2] + tokens[1][2], dw)  # data and context parallelism, and accumulation


@pytest.mark.parametrize("return_input", [False, True])
def test_fused_projections_mix_fp8_and_other_linears(return_input):
    """Results follow the order of the linears, and each has the rounding of its own format."""
    x = draw(32, 64)
    linears = [nn.Linear(64, 16), nn.Linear(64, 32, bias=False), nn.Linear(64, 48)]
    quantized = {0, 2}
    for index in quantized:
        linears[index].fp8_recipe = ROWWISE  # type: ignore[assignment]
    leaf = x.clone().requires_grad_()
    outputs = project_inputs(None, leaf, linears, return_input=return_input)
    grads = [draw(32, y.shape[1], seed=5 + i) for i, y in enumerate(outputs)]
    dx = grads[3].clone() if return_input else torch.zeros_like(x)
    torch.autograd.backward(outputs, grads)
    for index, (linear, y, dy) in enumerate(zip(linears, outputs, grads, strict=False)):
        q = emulated if index in quantized else torch.Tensor.double
        bias = 0 if linear.bias is None else linear.bias.detach()
        expected = q(x) @ q(linear.weight.detach()).t() + bias
        assert ((y.detach() - expected).norm() / expected.norm()).item() < 1e-5
        dw = q(dy.t()) @ q(x.t()).t()
        assert ((linear.weight.grad - dw).norm() / dw.norm()).item() < 1e-5
    of_fp8 = [linears[i].weight.detach() for i in sorted(quantized)]
    dx = dx + grads[1] @ linears[1].weight.detach()
    dx = dx + emulated(torch.cat([grads[0], grads[2]], 1)) @ emulated(torch.cat(of_fp8).t()).t()
    assert ((leaf.grad - dx).norm() / dx.norm()).item() < 1e-5
