"""Rowwise FP8 matmuls: scales, rounding, error bounds, and the operands of `torch._scaled_mm`."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from megatron_lite.fp8.rowwise import (
    dequantized,
    quantize_rows,
    quantize_stacked,
    scaled_matmul,
    scaled_mm,
    transposed,
    transposed_data,
)
from megatron_lite.parallel.fp8_projections import use_fp8
from megatron_lite.parallel.fused_projections import fp8_linear, project_inputs
from models.layers.mlp import GatedMLP
from tests.megatron_lite.conftest import model_config
from tests.megatron_lite.fp8.emulation import emulated, row_scales


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return numbers whose rows and columns differ in size by up to 2^12."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator)
    for dim in range(2):
        sizes = torch.randint(-6, 6, (shape[dim],), generator=generator)
        x *= torch.exp2(sizes.float()).view(-1, *[1] * (1 - dim))
    return x.to(dtype)


def test_rows_and_transposed_copies_equal_the_emulation_in_float64():
    x, others = draw(37, 80), torch.exp2(torch.arange(37.0) % 7 - 3).view(-1, 1)
    x[3] = 0
    rows = quantize_rows(x)
    assert torch.equal(dequantized(rows).double(), emulated(x))
    assert torch.equal(rows.scale.double(), row_scales(x))
    assert torch.equal(dequantized(quantize_stacked([x[:7], x[7:]])), dequantized(rows))
    assert torch.equal(dequantized(quantize_rows(x[:, :16], x[:, 16:])), dequantized(rows))
    for copy, factors in ((transposed(rows), torch.ones(37, 1)), (transposed(rows, others), others)):
        assert copy.data.shape == (80, 48)
        assert copy.data.is_contiguous()
        assert len(set(copy.scale.flatten().tolist())) == 1
        assert torch.equal(dequantized(copy)[:, :37].t().double(), emulated(x, factors.double()) * factors)
        assert not dequantized(copy)[:, 37:].any()
    assert torch.equal(transposed_data(rows).data[:, :37].t().float(), rows.data.float())


def test_transposed_copies_of_zeros_are_zeros():
    """Multiply the scales of two tensors of zeros, whose product is below the smallest float32."""
    zeros = quantize_rows(torch.zeros(16, 16))
    assert not dequantized(transposed(zeros, zeros.scale)).any()


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
        scaled_mm(x, x, torch.float32)
    except RuntimeError:
        return False
    return True


@pytest.mark.skipif(not _takes_row_scales(), reason="needs a torch whose _scaled_mm takes a scale per row on a CPU")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokens", [48, 37])
def test_scaled_mm_of_torch_agrees_with_the_reference(tokens, dtype):
    """Compare with the CPU's `_scaled_mm`, with the operands of CUDA: contiguous rows, scales [rows, 1] and [1, columns]."""
    x, w, g = (quantize_rows(draw(*size, seed=sum(size))) for size in ((tokens, 64), (32, 64), (tokens, 32)))
    for a, b in ((x, w), (g, transposed(w)), (transposed(g, x.scale), transposed_data(x))):
        actual, expected = scaled_mm(a, b, dtype), scaled_matmul(a, b, dtype)
        scale = expected.float().abs().amax(1, keepdim=True)
        tolerance = 2.0**-8 if dtype == torch.bfloat16 else 1e-5
        assert ((actual.float() - expected.float()).abs() <= tolerance * scale).all()


def relative_error(actual: Tensor, expected: Tensor) -> float:
    return ((actual.detach().double() - expected).norm() / expected.norm()).item()


def of_gradients(dy: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of x and weight, float64, in the emulation."""
    dx = emulated(dy) @ emulated(weight, torch.ones(len(weight), 1).double())
    return dx, emulated(dy, row_scales(x)).t() @ emulated(x)


@pytest.mark.parametrize("bias", [False, True])
def test_linear_equals_the_emulation_in_float64(bias):
    x, weight, dy = draw(30, 64).requires_grad_(), draw(48, 64, seed=1).requires_grad_(), draw(30, 48, seed=2)
    offset = torch.linspace(-1, 1, 48, requires_grad=True) if bias else None
    y = fp8_linear(x.view(2, 15, 64), weight, offset)
    y.backward(dy.view(2, 15, 48))
    expected = emulated(x.detach()) @ emulated(weight.detach()).t() + (
        0 if offset is None else offset.detach().double()
    )
    dx, dw = of_gradients(dy, x.detach(), weight.detach())
    for actual, wanted in ((y.view(30, 48), expected), (x.grad, dx), (weight.grad, dw)):
        assert relative_error(actual, wanted) < 1e-6
    if offset is not None:
        torch.testing.assert_close(offset.grad, dy.sum(0))


def test_swiglu_mlp_equals_the_emulation():
    """Compare the fused node, which quantises its input, the hidden numbers, and the gradients of gate and up side by side."""
    mlp = GatedMLP(model_config(hidden_size=32, intermediate_size=48))
    with torch.no_grad():
        for parameter in mlp.parameters():
            parameter *= 10
    use_fp8(mlp, ("gate_proj", "up_proj", "down_proj"))
    gate, up, down = (p.detach() for p in (mlp.gate_proj.weight, mlp.up_proj.weight, mlp.down_proj.weight))
    x, dy = draw(20, 32).requires_grad_(), draw(20, 32, seed=1)
    y = mlp(x.view(4, 5, 32))
    y.backward(dy.view(4, 5, 32))
    both = torch.cat([gate, up])
    wide = emulated(x.detach()) @ emulated(both).t()
    leaf = wide.clone().requires_grad_()
    hidden = torch.nn.functional.silu(leaf[:, :48]) * leaf[:, 48:]
    of_hidden, of_down = of_gradients(dy, hidden.detach(), down)
    hidden.backward(of_hidden)
    dx, of_both = of_gradients(leaf.grad, x.detach(), both)
    pairs = (
        (y.view(20, 32), emulated(hidden.detach()) @ emulated(down).t()),
        (x.grad, dx),
        (torch.cat([mlp.gate_proj.weight.grad, mlp.up_proj.weight.grad]), of_both),
        (mlp.down_proj.weight.grad, of_down),
    )
    for actual, wanted in pairs:
        assert relative_error(actual, wanted) < 2e-3  # float32 sums move some numbers to the other neighbour


def test_swiglu_mlp_keeps_its_biases():
    """Compare with the three linears one after the other."""
    mlp = GatedMLP(model_config(hidden_size=32, intermediate_size=48, mlp_bias=True))
    with torch.no_grad():
        for parameter in mlp.parameters():
            parameter += draw(*parameter.shape) if parameter.ndim == 2 else 1
    x = draw(20, 32)
    gate, up = (fp8_linear(x, linear.weight, linear.bias) for linear in (mlp.gate_proj, mlp.up_proj))
    expected = fp8_linear(torch.nn.functional.silu(gate) * up, mlp.down_proj.weight, mlp.down_proj.bias)
    use_fp8(mlp, ("gate_proj", "up_proj", "down_proj"))
    torch.testing.assert_close(mlp(x), expected)


def test_error_of_the_matmuls_is_that_of_three_mantissa_bits():
    """Rounding to e4m3 has a relative error of at most 2^-4, of 0.026 in the mean square; a matmul of two adds both."""
    x, weight, dy = (
        torch.randn(size, generator=torch.Generator().manual_seed(3)) for size in ((256, 512), (128, 512), (256, 128))
    )
    x.requires_grad_(), weight.requires_grad_()
    y = fp8_linear(x, weight)
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
        y = fp8_linear(*leaves)
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
    linears = [nn.Linear(64, 16), nn.Linear(64, 32, bias=False), nn.Linear(64, 48), nn.Linear(64, 16)]
    quantized = {0, 2, 3}
    for index in quantized:
        linears[index].in_fp8 = True  # type: ignore[assignment]
    leaf = x.clone().requires_grad_()
    outputs = project_inputs(None, leaf, linears, return_input=return_input)
    grads = [draw(32, y.shape[1], seed=5 + i) for i, y in enumerate(outputs)]
    # The last two are adjacent in memory, as after a split.
    grads[2], grads[3] = torch.cat(grads[2:4], 1).split([48, 16], 1)
    dx = grads[4].clone() if return_input else torch.zeros_like(x)
    torch.autograd.backward(outputs, grads)
    in_fp8 = sorted(quantized)
    of_fp8 = of_gradients(
        torch.cat([grads[i] for i in in_fp8], 1), x, torch.cat([linears[i].weight.detach() for i in in_fp8])
    )
    of_weights = dict(zip(in_fp8, of_fp8[1].split([16, 48, 16]), strict=True))
    for index, (linear, y) in enumerate(zip(linears, outputs, strict=False)):
        q = emulated if index in quantized else torch.Tensor.double
        bias = 0 if linear.bias is None else linear.bias.detach()
        assert relative_error(y, q(x) @ q(linear.weight.detach()).t() + bias) < 1e-5
        dw = of_weights[index] if index in quantized else grads[index].double().t() @ x.double()
        assert relative_error(linear.weight.grad, dw) < 1e-5
    dx = dx + grads[1] @ linears[1].weight.detach() + of_fp8[0]
    assert relative_error(leaf.grad, dx) < 1e-5
