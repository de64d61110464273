"""Triton kernels of FP8 quantisation: along the rows of a matrix, and of its transpose.

They run on CUDA and in Triton's interpreter, and give the bits of the PyTorch form in `rowwise.py`. That form reads and writes
float32 copies; a kernel reads 16 bits and writes 8.
"""

# Kernels take pointers and scalars that have no Python type.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_COLUMNS = 4096  # of a row at a time; a longer row is read twice, the second time from the cache
_TOKENS, _FEATURES = 128, 64  # rows and columns of a tile that is transposed
_TILES = 8  # tiles per program of the maxima


def quantize_rows(x: Tensor, data: Tensor, scale: Tensor, exponent: int) -> None:
    """Write x [rows, columns] to data, FP8 of the same shape, and its scales to scale [rows, 1] float32.

    exponent: that of the largest number of the format, 1.75 * 2^exponent.
    """
    rows, columns = x.shape
    block = min(triton.next_power_of_2(columns), _COLUMNS)
    _rows[(rows,)](x, data, scale, columns, x.stride(0), exponent, BLOCK=block, num_warps=4)


def quantize_columns(x: Tensor, data: Tensor, scale: Tensor, exponent: int) -> None:
    """Write the transpose of x [rows, columns] to data [columns, at least rows], then zeros; scale [columns, 1] float32."""
    rows, columns = x.shape
    height = _TOKENS * _TILES
    parts = x.new_empty((triton.cdiv(rows, height), columns), dtype=torch.int32)
    tiles = triton.cdiv(columns, _FEATURES)
    _column_maxima[(tiles, len(parts))](
        x, parts, rows, columns, x.stride(0), TOKENS=_TOKENS, FEATURES=_FEATURES, TILES=_TILES, num_warps=4
    )
    largest = parts.amax(0)
    _transposed[(tiles, triton.cdiv(data.shape[1], _TOKENS))](
        x, largest, data, scale, rows, columns, x.stride(0), data.shape[1], exponent,
        TOKENS=_TOKENS, FEATURES=_FEATURES, num_warps=4,
    )  # fmt: skip


@triton.jit
def _largest_bits(x):
    # The order of the bits is that of the numbers, infinity and NaN last.
    return x.to(tl.float32).to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def _scale_and_reciprocal(bits, exponent):
    """Return the smallest power of two that brings the number of these bits into the range, and its reciprocal; else NaN."""
    smallest = 27 << 23  # 2^-100
    power = ((tl.maximum(bits, smallest) + 0x1FFFFF) & 0x7F800000) - (exponent << 23)
    finite = bits < 0x7F800000
    scale = tl.where(finite, power, 0x7FC00000).to(tl.float32, bitcast=True)
    return scale, tl.where(finite, 0x7F000000 - power, 0x7FC00000).to(tl.float32, bitcast=True)


@triton.jit
def _rows(x, data, scale, columns, stride, exponent, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    x += row * stride
    data += row * columns
    largest = tl.zeros([BLOCK], tl.int32)
    for first in range(0, columns, BLOCK):
        column = first + tl.arange(0, BLOCK)
        largest = tl.maximum(largest, _largest_bits(tl.load(x + column, mask=column < columns, other=0.0)))
    of_row, reciprocal = _scale_and_reciprocal(tl.max(largest, 0), exponent)
    tl.store(scale + row, of_row)
    for first in range(0, columns, BLOCK):
        column = first + tl.arange(0, BLOCK)
        value = tl.load(x + column, mask=column < columns, other=0.0).to(tl.float32) * reciprocal
        tl.store(data + column, value.to(data.dtype.element_ty), mask=column < columns)


@triton.jit
def _column_maxima(
    x, parts, rows, columns, stride, TOKENS: tl.constexpr, FEATURES: tl.constexpr, TILES: tl.constexpr
):  # fmt: skip
    column = tl.program_id(0) * FEATURES + tl.arange(0, FEATURES)
    largest = tl.zeros([FEATURES], tl.int32)
    for tile in range(TILES):
        row = ((tl.program_id(1) * TILES + tile) * TOKENS + tl.arange(0, TOKENS)).to(tl.int64)
        mask = (row < rows)[:, None] & (column < columns)[None, :]
        value = tl.load(x + row[:, None] * stride + column[None, :], mask=mask, other=0.0)
        largest = tl.maximum(largest, tl.max(_largest_bits(value), 0))
    tl.store(parts + tl.program_id(1) * columns + column, largest, mask=column < columns)


@triton.jit
def _transposed(
    x, largest, data, scale, rows, columns, stride, width, exponent, TOKENS: tl.constexpr, FEATURES: tl.constexpr
):  # fmt: skip
    column = tl.program_id(0) * FEATURES + tl.arange(0, FEATURES)
    row = (tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)).to(tl.int64)
    bits = tl.load(largest + column, mask=column < columns, other=0)
    of_column, reciprocal = _scale_and_reciprocal(bits, exponent)
    tl.store(scale + column, of_column, mask=(column < columns) & (tl.program_id(1) == 0))
    mask = (row < rows)[:, None] & (column < columns)[None, :]
    value = tl.load(x + row[:, None] * stride + column[None, :], mask=mask, other=0.0).to(tl.float32)
    value = tl.where(mask, value * reciprocal[None, :], 0.0)
    out = data + column.to(tl.int64)[:, None] * width + row[None, :]
    tl.store(out, tl.trans(value.to(data.dtype.element_ty)), mask=(column < columns)[:, None] & (row < width)[None, :])
