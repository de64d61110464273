"""The Triton kernels of FP8 against the PyTorch forms."""

from __future__ import annotations

import pytest
import torch

from megatron_lite.fp8.rowwise import (
    FORMAT,
    Quantized,
    attached_rows,
    dequantized,
    quantize_rows,
    transposed,
    transposed_data,
)
from megatron_lite.fp8.swiglu import swiglu_backward_rows, swiglu_rows
from tests.megatron_lite.fp8.test_rowwise import draw
from tests.models.kernels.conftest import Replace, device, replace

__all__ = ["device", "replace"]


def output(rows: int, columns: int, device: str) -> Quantized:
    # The interpreter does not round to the nearest FP8 number. It writes the scaled numbers, which torch rounds.
    data = torch.empty((rows, columns), dtype=FORMAT if device == "cuda" else torch.float32, device=device)
    return Quantized(data, torch.full((rows, 1), torch.nan, device=device))


def check(actual: Quantized, expected: Quantized) -> None:
    actual = Quantized(actual.data.to(FORMAT).cpu(), actual.scale.cpu())
    assert torch.equal(actual.scale, expected.scale)
    assert torch.equal(dequantized(actual), dequantized(expected))


def check_to_rounding(actual: Quantized, expected: Quantized) -> None:
    """Allow the other neighbour in FP8 for a few numbers, whose float32 numbers differ in the last bits."""
    actual = Quantized(actual.data.to(FORMAT).cpu(), actual.scale.cpu())
    assert torch.equal(actual.scale, expected.scale)
    difference = (actual.data.float() - expected.data.float()).abs()
    assert (difference <= expected.data.float().abs() / 8 + 2**-9).all()
    assert (difference > 0).float().mean() < 0.01


@pytest.fixture
def kernels():
    return pytest.importorskip("megatron_lite.fp8.kernels", reason="needs Triton")


@pytest.mark.parametrize("width", [80, 8208])  # a row in one and in two parts
@pytest.mark.parametrize("second", [False, True])
def test_rows_equal_the_pytorch_form(device: str, kernels, width: int, second: bool) -> None:
    """Compare bits, also of rows of zeros and of numbers at the limit of the range, in a matrix with a longer stride."""
    x = draw(5, width + 16)
    x[1] = 0
    x[2, :3] = torch.tensor([448.0, 448.0 + 2**-15, 57344.0])
    parts = (x[:, :32], x[:, 48:]) if second else (x[:, :width],)
    out = output(5, width, device)
    kernels.quantize_rows(*out, *(part.to(device) for part in parts))
    check(out, quantize_rows(*parts))


@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
def test_a_row_that_is_not_finite_becomes_nan(device: str, kernels, value: float) -> None:
    x, out = draw(32, 32), output(32, 32, device)
    x[4, 4] = value
    kernels.quantize_rows(*out, x.to(device))
    values = dequantized(Quantized(out.data.to(FORMAT), out.scale)).cpu()
    assert values[4].isnan().all()
    assert values[[0, 1, 2, 3, *range(5, 32)]].isfinite().all()


@pytest.mark.parametrize("rows", [37, 300])
@pytest.mark.parametrize("others", [False, True])
def test_transposed_copies_equal_the_pytorch_form(device: str, kernels, rows: int, others: bool) -> None:
    x = quantize_rows(draw(rows, 80))
    x.scale[5] = 2.0**-100
    factors = torch.exp2(torch.arange(float(rows)) % 5 - 2).view(-1, 1) if others else None
    padded = -(-rows // 16) * 16
    data = x.data.to(output(1, 1, device).data.dtype).to(device)
    common, shares, out = (
        torch.empty(80, 1, device=device),
        torch.empty(rows, 1, device=device),
        output(80, padded, device),
    )
    kernels.common_scale(x.scale.to(device), None if factors is None else factors.to(device), common, shares)
    kernels.transpose(data, shares, out.data)
    check(Quantized(out.data, common), transposed(x, factors))
    kernels.transpose(data, None, out.data)
    check(Quantized(out.data, torch.ones(80, 1)), transposed_data(x))


def test_the_common_scale_of_a_row_that_is_not_finite_is_nan(device: str, kernels) -> None:
    scale = torch.tensor([[1.0], [torch.nan], [4.0]], device=device)
    common, shares = torch.empty(2, 1, device=device), torch.empty(3, 1, device=device)
    kernels.common_scale(scale, None, common, shares)
    assert common.isnan().all()
    assert shares.isnan().all()


@pytest.mark.parametrize("width", [48, 8208])
def test_swiglu_equals_the_pytorch_form(device: str, kernels, width: int) -> None:
    """Compare to the rounding of FP8: the sigmoids differ in the last bit, which moves some numbers to the other neighbour."""
    gate_up, dy = draw(3, 2 * width).clamp(-30, 30), draw(3, width, seed=1)
    forward, backward = output(3, width, device), output(3, 2 * width, device)
    kernels.swiglu_rows(gate_up.to(device), *forward)
    kernels.swiglu_backward_rows(dy.to(device), gate_up.to(device), *backward)
    for out, expected in ((forward, swiglu_rows(gate_up)), (backward, swiglu_backward_rows(dy, gate_up))):
        check_to_rounding(out, expected)


def rows_of(x: torch.Tensor) -> Quantized:
    """Return the rows that a kernel attached to x [..., columns]."""
    rows = attached_rows(x.reshape(-1, x.shape[-1]))
    assert rows is not None
    return rows


@pytest.fixture
def primitives(device: str, monkeypatch: pytest.MonkeyPatch):
    from models.kernels import primitives

    if device == "cpu":  # as `output`
        monkeypatch.setattr(primitives, "_FP8", torch.float32)
    return primitives


@pytest.mark.parametrize("size", [48, 1100])
@pytest.mark.parametrize("centred", [False, True])
@pytest.mark.parametrize("affine", [False, True])
def test_rows_of_a_norm_equal_those_of_a_separate_kernel(
    device: str, primitives, replace: Replace, size: int, centred: bool, affine: bool
) -> None:
    """Compare short rows with a partial last tile, and long rows; only FP8 is written of the output.

    The interpreter gives the same bits. On a GPU the compiler may order the sums of the kernel with rows in another way.
    """
    from models.kernels import add_norm as kernel

    replace(kernel, [kernel._backward_launch], _PROGRAMS=2, _PROGRAMS_LONG=2)
    x, delta, dy, dh = (draw(45, size, seed=seed).to(device) for seed in range(4))
    x[7] = 0
    weight = torch.linspace(-2, 3, size, device=device) if affine else None
    bias = torch.linspace(-1, 1, size, device=device) if affine and centred else None
    results = []
    for fp8 in (False, True):
        leaves = [leaf.view(3, 15, size).clone().requires_grad_() for leaf in (x, delta)]
        h, y = kernel.add_norm(*leaves, weight, bias, 1e-5, centred, fp8, fp8)
        gradients = torch.autograd.grad((h, y), leaves, (dh.view_as(h), dy.view_as(y)))
        results.append((h, y, *gradients))
    (h, y, dx, _), (same_h, rows_only, *same_dx) = results
    assert torch.equal(h, same_h)
    assert rows_only.isnan().all()
    check_output = check if device == "cpu" else check_to_rounding
    check_output(rows_of(rows_only), quantize_rows(y.detach().reshape(-1, size).cpu()))
    for gradient in same_dx:
        assert torch.equal(gradient, dx) if device == "cpu" else torch.allclose(gradient, dx, rtol=1e-5, atol=1e-5)
        check(rows_of(gradient), quantize_rows(gradient.reshape(-1, size).cpu().clone()))


@pytest.mark.parametrize("heads", [3, 8])
@pytest.mark.parametrize(("dim_k", "dim_v"), [(32, 32), (24, 48), (64, 128)])
def test_rows_of_the_epilogue_equal_those_of_a_separate_kernel(
    device: str, primitives, replace: Replace, heads: int, dim_k: int, dim_v: int
) -> None:
    from models.kernels import metala as kernel

    replace(kernel, [kernel._launches, kernel._rows_launch], _FORWARD=(512, 8, 1))
    o, q, k, v = (
        draw(2 * 13 * heads, dim, seed=dim + i).view(2, 13, heads, dim).to(device).clamp(-9, 9)
        for i, dim in enumerate((dim_v, dim_k, dim_k, dim_v))
    )
    weight, gate = torch.linspace(-1, 1, heads * dim_k, device=device), draw(26, heads * dim_v, seed=9)
    gate = gate.view(2, 13, -1).to(device)
    gate[1, 3] = 0
    y = kernel.epilogue_forward(o, q, k, v, weight, gate, 1e-5)
    rows_only = kernel.epilogue_rows(o, q, k, v, weight, gate, 1e-5)
    assert rows_only.shape == y.shape
    assert rows_only.isnan().all()
    check_output = check if device == "cpu" else check_to_rounding  # the compiler may order sums in another way
    check_output(rows_of(rows_only), quantize_rows(y.reshape(26, -1).cpu()))


def test_rows_that_are_not_finite_become_nan_in_a_norm(device: str, primitives) -> None:
    from models.kernels.add_norm import add_norm

    x = draw(32, 64).to(device)
    x[4, 5] = torch.inf
    rows = rows_of(add_norm(x, None, None, None, 1e-5, False, True)[1])
    values = dequantized(Quantized(rows.data.to(FORMAT), rows.scale)).cpu()
    assert values[4].isnan().all()
    assert values[[0, 1, 2, 3, *range(5, 32)]].isfinite().all()
