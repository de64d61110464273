"""Functions that several kernels share: tiles of rows, FP8 rows, the sigmoid, and sums over programs in a fixed order."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from .launch import Launch, tl, triton

# Parts and columns per tile of `sum_parts`, and elements per `row_tile`.
_PARTS, _COLUMNS, _ELEMENTS = 128, 8, 2048
_FP8 = torch.float8_e4m3fn


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


def attach_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return room for FP8 rows of x [..., columns]: numbers [rows, columns] and scales [rows, 1] in float32.

    The kernel that computes x also writes these, for a matmul in FP8. They are attached to the storage of x, where
    `quantize_rows` of a trainer's linear finds them. They count until autograd's version of x
    changes, as it does after operations in place.
    """
    rows = x.numel() // max(x.shape[-1], 1)
    data = x.new_empty((rows, x.shape[-1]), dtype=_FP8)
    scale = x.new_empty((rows, 1), dtype=torch.float32)
    # On the storage, so that views find them, and they end with the memory.
    x.untyped_storage()._fp8_rows = (data, scale, x.dtype, x._version)  # type: ignore[attr-defined]
    return data, scale


def unwritten(like: Tensor) -> Tensor:
    """Return one number in the shape of `like`, for an output of which only FP8 rows are written.

    The kernel writes NaN to it, which every other reader gets.
    """
    return like.new_empty(()).expand(like.shape)


@triton.jit
def fp8_scale(bits):
    """Return the smallest power of two that brings the float32 of these bits into the range of e4m3, and its reciprocal.

    bits: without the sign. Both are NaN for a number that is not finite, and finite for numbers below 2^-100. A trainer's own
    kernels give these bits too (`megatron_lite/fp8/kernels.py`); neither package imports the other.
    """
    smallest = 27 << 23  # 2^-100
    # The largest number of e4m3 is 1.75 * 2^8. A mantissa above 1.75 carries into the exponent.
    power = ((tl.maximum(bits, smallest) + 0x1FFFFF) & 0x7F800000) - (8 << 23)
    finite = bits < 0x7F800000
    scale = tl.where(finite, power, 0x7FC00000).to(tl.float32, bitcast=True)
    return scale, tl.where(finite, 0x7F000000 - power, 0x7FC00000).to(tl.float32, bitcast=True)


@triton.jit
def magnitude_bits(x, inside):
    """Return the bits of |x|, float32, whose order is that of the numbers, infinity and NaN last; 0 outside."""
    return tl.where(inside, x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 0)


@triton.jit
def store_fp8_rows(x, data, scale, row, at, inside, rows):
    """Store x [rows of the tile, columns], float32, to data + at in FP8, and one scale per row to scale + row."""
    of_row, reciprocal = fp8_scale(tl.max(magnitude_bits(x, inside), 1))
    tl.store(scale + row, of_row, mask=row < rows)
    tl.store(data + at, (x * reciprocal[:, None]).to(data.dtype.element_ty), mask=inside)
