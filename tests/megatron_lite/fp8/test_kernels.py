"""The Triton kernels of FP8 against the PyTorch forms."""

from __future__ import annotations

import pytest
import torch

from megatron_lite.fp8.rowwise import FORMAT, Quantized, dequantized, quantize_rows, transposed, transposed_data
from megatron_lite.fp8.swiglu import swiglu_backward_rows, swiglu_rows
from tests.megatron_lite.fp8.test_rowwise import draw
from tests.models.kernels.conftest import device

__all__ = ["device"]


def output(rows: int, columns: int, device: str) -> Quantized:
    # The interpreter does not round to the nearest FP8 number. It writes the scaled numbers, which torch rounds.
    data = torch.empty((rows, columns), dtype=FORMAT if device == "cuda" else torch.float32, device=device)
    return Quantized(data, torch.full((rows, 1), torch.nan, device=device))


def check(actual: Quantized, expected: Quantized) -> None:
    actual = Quantized(actual.data.to(FORMAT).cpu(), actual.scale.cpu())
    assert torch.equal(actual.scale, expected.scale)
    assert torch.equal(dequantized(actual), dequantized(expected))


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
        actual = Quantized(out.data.to(FORMAT).cpu(), out.scale.cpu())
        assert torch.equal(actual.scale, expected.scale)
        difference = (actual.data.float() - expected.data.float()).abs()
        assert (difference <= expected.data.float().abs() / 8 + 2**-9).all()
        assert (difference > 0).float().mean() < 0.01
