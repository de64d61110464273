"""Functions that several kernels share: tiles of rows, the sigmoid, and sums over programs in a fixed order."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from .launch import Launch, tl, triton

# Parts and columns per tile of `sum_parts`, and elements per `row_tile`.
_PARTS, _COLUMNS, _ELEMENTS = 128, 8, 2048


def row_tile(dim: int) -> tuple[int, int]:
    """Return the rows and channels of a tile of rows of `dim` channels."""
    block = triton.next_power_of_2(dim)
    return max(1, _ELEMENTS // block), block


def sum_parts(parts: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the sums over `parts` [count, parts, columns], contiguous float32, as [count, columns] in `dtype`.

    The order of the additions is fixed. That of atomic additions would depend on timing.
    """
    count, number, columns = parts.shape
    out = parts.new_empty((count, columns), dtype=dtype)
    if out.numel():
        _launch(parts.device, dtype, count, number, columns)(parts, out)
    return out


@lru_cache(4096)
def _launch(device: torch.device, dtype: torch.dtype, count: int, parts: int, columns: int) -> Launch:
    return Launch(_sum_parts, (triton.cdiv(columns, _COLUMNS), count), parts, columns, _PARTS, _COLUMNS, num_warps=4)


@triton.jit(do_not_specialize=["number"])
def _sum_parts(parts, out, number, columns, PARTS: tl.constexpr, COLUMNS: tl.constexpr):
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    parts += tl.program_id(1).to(tl.int64) * number * columns
    total = tl.zeros([PARTS, COLUMNS], tl.float32)
    for first in range(0, number, PARTS):
        row = first + tl.arange(0, PARTS)
        mask = (row < number)[:, None] & (column < columns)[None, :]
        total += tl.load(parts + row[:, None] * columns + column[None, :], mask=mask, other=0.0)
    out += tl.program_id(1) * columns + column
    tl.store(out, tl.sum(total, 0).to(out.dtype.element_ty), mask=column < columns)


@triton.jit
def sigmoid(x):
    """Return 1 / (1 + exp(-x)) of float32, with a relative error of 1e-6.

    A squared reciprocal root takes two instructions. The quotient of `tl.sigmoid` takes seven.
    """
    root = tl.rsqrt(1.0 + tl.exp2(x * -1.4426950408889634))
    return root * root
