"""Rounding to FP8 (e4m3) in float64 arithmetic, without torch's FP8 types, and a record of what is quantised."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megatron_lite.fp8 import rowwise
from megatron_lite.fp8.rowwise import Quantized

MANTISSA, SMALLEST_EXPONENT, LARGEST = 3, -6, 448.0


def rounded(x: Tensor) -> Tensor:
    """Return x, float64 and in range, rounded to e4m3."""
    exponent = torch.floor(torch.log2(x.abs())).clamp(min=SMALLEST_EXPONENT)
    unit = torch.exp2(exponent - MANTISSA)
    return torch.round(x / unit) * unit


def row_scales(x: Tensor) -> Tensor:
    """Return the smallest powers of two [rows, 1] that bring the rows of x into range."""
    largest = x.double().abs().amax(1, keepdim=True)
    return torch.exp2(torch.ceil(torch.log2(largest / LARGEST))).where(largest > 0, 2.0**-108)


def emulated(x: Tensor, others: Tensor | None = None) -> Tensor:
    """Return x [rows, columns] rounded to FP8 with one scale per row, float64.

    others: row factors; then as in a transposed copy with one scale, in which the rows have these factors too.
    """
    scale = row_scales(x)
    data = rounded(x.double() / scale)
    if others is None:
        return data * scale
    common = (scale * others).max()
    return rounded(data * (scale * others / common)) * common / others


def record_quantised(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Return a list to which every call of a separate quantising kernel adds the shape of its result."""
    shapes: list[tuple[int, ...]] = []
    write_rows = rowwise.write_rows

    def recorded(out: Quantized, *parts: Tensor) -> None:
        shapes.append(tuple(out.data.shape))
        write_rows(out, *parts)

    monkeypatch.setattr(rowwise, "write_rows", recorded)
    return shapes
