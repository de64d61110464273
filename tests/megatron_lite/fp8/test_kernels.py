"""The Triton kernels of FP8 quantisation against the PyTorch form."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megatron_lite.fp8.rowwise import Quantized, dequantized, quantize_columns, quantize_rows
from tests.megatron_lite.fp8.test_rowwise import draw
from tests.models.kernels.conftest import device

__all__ = ["device"]

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def by_kernels(x: Tensor, dtype: torch.dtype, *, transpose: bool) -> Quantized:
    kernels = pytest.importorskip("megatron_lite.fp8.kernels", reason="needs Triton")
    shape = (x.shape[1], -(-len(x) // 16) * 16) if transpose else x.shape
    # The interpreter does not round to the nearest FP8 number. It writes the scaled numbers, which torch rounds.
    data = torch.empty(shape, dtype=dtype if x.is_cuda else torch.float32, device=x.device)
    scale = torch.full((shape[0], 1), torch.nan, device=x.device)
    function = kernels.quantize_columns if transpose else kernels.quantize_rows
    function(x, data, scale, 8 if dtype == E4M3 else 15)
    return Quantized(data.to(dtype).cpu(), scale.cpu())


@pytest.mark.parametrize(
    ("transpose", "shape", "dtype"),
    [
        *((False, shape, E4M3) for shape in ((37, 80), (3, 4112))),  # a row in one and in two parts
        *((True, shape, E4M3) for shape in ((37, 80), (1100, 48))),  # tokens of one program and of two
        (False, (3, 16), E5M2),
        (True, (3, 16), E5M2),
    ],
)
def test_kernels_equal_the_pytorch_form(
    device: str, shape: tuple[int, int], dtype: torch.dtype, transpose: bool
) -> None:
    """Compare bits, also of rows of zeros and of numbers at the limit of the range, in a matrix with a longer stride."""
    x = draw(shape[0], shape[1] + 16)[:, :-16]
    x[1] = 0
    x[2, :3] = torch.tensor([448.0, 448.0 + 2**-15, 57344.0])
    expected = (quantize_columns if transpose else quantize_rows)(x, dtype)
    actual = by_kernels(x.to(device), dtype, transpose=transpose)
    assert torch.equal(actual.scale, expected.scale)
    assert torch.equal(dequantized(actual), dequantized(expected))


@pytest.mark.parametrize("transpose", [False, True])
@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
def test_a_row_that_is_not_finite_becomes_nan(device: str, value: float, transpose: bool) -> None:
    x = draw(32, 32)
    x[4, 4] = value
    values = dequantized(by_kernels(x.to(device), E4M3, transpose=transpose))
    assert values[4].isnan().all()
    assert values[[0, 1, 2, 3, *range(5, 32)]].isfinite().all()
