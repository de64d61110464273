"""Triton kernels of FP8 quantisation: rows of 16-bit numbers, SwiGLU with its gradient, and transposed copies.

They run on CUDA and in Triton's interpreter, and give the bits of the PyTorch forms in `rowwise.py` and `swiglu.py`, up to the
rounding of the sigmoid. One program computes a whole row, so that its scale needs no second kernel.
"""

# Kernels take pointers and scalars that have no Python type.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

_LARGEST_EXPONENT = tl.constexpr(8)
_ROW = 8192  # most numbers of a row in registers; a longer row is computed twice
_TOKENS, _FEATURES, _WARPS = 128, 64, 4  # a tile that is transposed


def quantize_rows(data: Tensor, scale: Tensor, first: Tensor, second: Tensor | None = None) -> None:
    """Write torch.cat([first, second], 1) to data [rows, columns], FP8, and its scales to scale [rows, 1] float32."""
    rows, columns = data.shape
    after = first if second is None else second
    block, warps = _block(columns)
    _launch(
        _rows, (rows,), warps, first, after, data, scale, columns, first.shape[1], first.stride(0), after.stride(0),
        second is not None, block, block >= columns,
    )  # fmt: skip


def swiglu_rows(gate_up: Tensor, data: Tensor, scale: Tensor) -> None:
    """Write SiLU(gate) * up to data [rows, width] and scale [rows, 1]; gate_up: [rows, 2 * width], contiguous."""
    rows, width = data.shape
    block, warps = _block(width)
    _launch(_swiglu_rows, (rows,), warps, gate_up, data, scale, width, block, block >= width)


def swiglu_backward_rows(dy: Tensor, gate_up: Tensor, data: Tensor, scale: Tensor) -> None:
    """Write the gradients of gate and up to data [rows, 2 * width] and scale [rows, 1]; dy: [rows, width], contiguous."""
    rows, width = dy.shape
    block, warps = _block(width)
    _launch(_swiglu_backward_rows, (rows,), warps, dy, gate_up, data, scale, width, block, block >= width)


def common_scale(scale: Tensor, others: Tensor | None, common: Tensor, shares: Tensor) -> None:
    """Write the largest of scale * others to every element of common, and scale * others / common to shares.

    scale, others, shares: [rows, 1]; None for ones.
    """
    sizes = len(scale), len(common)
    second = scale if others is None else others
    _launch(_common_scale, (1,), 16, scale, second, common, shares, *sizes, others is not None, 4096)


def transpose(data: Tensor, shares: Tensor | None, out: Tensor) -> None:
    """Write the transpose of data [rows, columns] times shares [rows, 1] to out [columns, at least rows], then zeros."""
    rows, columns = data.shape
    if shares is None and data.dtype.itemsize == 1:  # bytes need no conversion
        data, out = data.view(torch.uint8), out.view(torch.uint8)
    grid = triton.cdiv(columns, _FEATURES), triton.cdiv(out.shape[1], _TOKENS)
    factors = data if shares is None else shares
    _launch(
        _transpose,
        grid,
        _WARPS,
        data,
        factors,
        out,
        rows,
        columns,
        out.shape[1],
        shares is not None,
        _TOKENS,
        _FEATURES,
    )


def _block(columns: int) -> tuple[int, int]:
    block = min(triton.next_power_of_2(columns), _ROW)
    return block, min(8, max(1, block // 512))


_launchers: dict[tuple[Any, ...], Callable[..., None]] = {}


def _launch(kernel: Any, grid: tuple[int, ...], warps: int, *arguments: Any) -> None:
    """Launch a kernel with its arguments in order, constants included.

    Triton inspects all arguments of a launch, which takes the host longer than a short kernel takes the device. Here it does so
    once per case: dtypes, alignment of the pointers, and values.
    """
    case = [(x.dtype, x.data_ptr() & 15) if isinstance(x, Tensor) else x for x in arguments]
    key = (id(kernel), grid, warps, arguments[0].device, *case)
    launcher = _launchers.get(key)
    if launcher is not None:
        launcher(*arguments)
        return
    compiled = kernel[grid](*arguments, num_warps=warps)
    if compiled is not None:  # Triton's interpreter compiles nothing
        _launchers[key] = compiled[(*grid, 1, 1)[:3]]


@triton.jit
def _largest_bits(x):
    # The order of the bits is that of the numbers, infinity and NaN last.
    return x.to(tl.float32).to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def _scale_and_reciprocal(bits):
    """Return the smallest power of two that brings the number of these bits into the range, and its reciprocal; else NaN."""
    smallest = 27 << 23  # 2^-100
    power = ((tl.maximum(bits, smallest) + 0x1FFFFF) & 0x7F800000) - (_LARGEST_EXPONENT << 23)
    finite = bits < 0x7F800000
    scale = tl.where(finite, power, 0x7FC00000).to(tl.float32, bitcast=True)
    return scale, tl.where(finite, 0x7F000000 - power, 0x7FC00000).to(tl.float32, bitcast=True)


@triton.jit
def _load_row(first, second, column, columns, width, SECOND: tl.constexpr):
    if SECOND:
        x = tl.load(first + column, mask=column < width, other=0.0)
        y = tl.load(second + (column - width), mask=(column >= width) & (column < columns), other=0.0)
        return tl.where(column < width, x, y).to(tl.float32)
    return tl.load(first + column, mask=column < columns, other=0.0).to(tl.float32)


@triton.jit
def _rows(
    first, second, data, scale, columns, width, stride, second_stride,
    SECOND: tl.constexpr, BLOCK: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    first += row * stride
    second += row * second_stride
    data += row * columns
    column = tl.arange(0, BLOCK)
    x = _load_row(first, second, column, columns, width, SECOND)
    largest = _largest_bits(x)
    if not WHOLE:
        for start in range(BLOCK, columns, BLOCK):
            x = _load_row(first, second, start + column, columns, width, SECOND)
            largest = tl.maximum(largest, _largest_bits(x))
    of_row, reciprocal = _scale_and_reciprocal(tl.max(largest, 0))
    tl.store(scale + row, of_row)
    if WHOLE:
        tl.store(data + column, (x * reciprocal).to(data.dtype.element_ty), mask=column < columns)
    else:
        for start in range(0, columns, BLOCK):
            x = _load_row(first, second, start + column, columns, width, SECOND) * reciprocal
            tl.store(data + start + column, x.to(data.dtype.element_ty), mask=start + column < columns)


@triton.jit
def _swiglu(gate_up, column, width):
    a = tl.load(gate_up + column, mask=column < width, other=0.0).to(tl.float32)
    b = tl.load(gate_up + width + column, mask=column < width, other=0.0).to(tl.float32)
    return a * tl.sigmoid(a) * b


@triton.jit
def _swiglu_rows(gate_up, data, scale, width, BLOCK: tl.constexpr, WHOLE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    gate_up += row * 2 * width
    data += row * width
    column = tl.arange(0, BLOCK)
    y = _swiglu(gate_up, column, width)
    largest = _largest_bits(y)
    if not WHOLE:
        for start in range(BLOCK, width, BLOCK):
            largest = tl.maximum(largest, _largest_bits(_swiglu(gate_up, start + column, width)))
    of_row, reciprocal = _scale_and_reciprocal(tl.max(largest, 0))
    tl.store(scale + row, of_row)
    if WHOLE:
        tl.store(data + column, (y * reciprocal).to(data.dtype.element_ty), mask=column < width)
    else:
        for start in range(0, width, BLOCK):
            y = _swiglu(gate_up, start + column, width) * reciprocal
            tl.store(data + start + column, y.to(data.dtype.element_ty), mask=start + column < width)


@triton.jit
def _swiglu_gradients(dy, gate_up, column, width):
    d = tl.load(dy + column, mask=column < width, other=0.0).to(tl.float32)
    a = tl.load(gate_up + column, mask=column < width, other=0.0).to(tl.float32)
    b = tl.load(gate_up + width + column, mask=column < width, other=0.0).to(tl.float32)
    s = tl.sigmoid(a)
    return d * b * s * (1.0 + a * (1.0 - s)), d * a * s


@triton.jit
def _swiglu_backward_rows(dy, gate_up, data, scale, width, BLOCK: tl.constexpr, WHOLE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    dy += row * width
    gate_up += row * 2 * width
    data += row * 2 * width
    column = tl.arange(0, BLOCK)
    of_gate, of_up = _swiglu_gradients(dy, gate_up, column, width)
    largest = tl.maximum(_largest_bits(of_gate), _largest_bits(of_up))
    if not WHOLE:
        for start in range(BLOCK, width, BLOCK):
            of_gate, of_up = _swiglu_gradients(dy, gate_up, start + column, width)
            largest = tl.maximum(largest, tl.maximum(_largest_bits(of_gate), _largest_bits(of_up)))
    of_row, reciprocal = _scale_and_reciprocal(tl.max(largest, 0))
    tl.store(scale + row, of_row)
    if WHOLE:
        tl.store(data + column, (of_gate * reciprocal).to(data.dtype.element_ty), mask=column < width)
        tl.store(data + width + column, (of_up * reciprocal).to(data.dtype.element_ty), mask=column < width)
    else:
        for start in range(0, width, BLOCK):
            at = start + column
            of_gate, of_up = _swiglu_gradients(dy, gate_up, at, width)
            tl.store(data + at, (of_gate * reciprocal).to(data.dtype.element_ty), mask=at < width)
            tl.store(data + width + at, (of_up * reciprocal).to(data.dtype.element_ty), mask=at < width)


@triton.jit
def _factors(scale, others, row, rows, OTHERS: tl.constexpr):
    x = tl.load(scale + row, mask=row < rows, other=0.0)
    if OTHERS:
        x *= tl.load(others + row, mask=row < rows, other=0.0)
    return x


@triton.jit
def _common_scale(scale, others, common, shares, rows, columns, OTHERS: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    bits = tl.zeros([BLOCK], tl.int32)
    for start in range(0, rows, BLOCK):
        bits = tl.maximum(bits, _largest_bits(_factors(scale, others, start + i, rows, OTHERS)))
    largest = tl.maximum(tl.max(bits, 0), 1 << 23)  # 2^-126
    finite = largest < 0x7F800000
    value = largest.to(tl.float32, bitcast=True)
    reciprocal = tl.where(finite, 0x7F000000 - largest, 0x7FC00000).to(tl.float32, bitcast=True)
    for start in range(0, columns, BLOCK):
        tl.store(common + start + i, tl.zeros([BLOCK], tl.float32) + value, mask=start + i < columns)
    for start in range(0, rows, BLOCK):
        share = _factors(scale, others, start + i, rows, OTHERS) * reciprocal
        tl.store(shares + start + i, share, mask=start + i < rows)


@triton.jit
def _transpose(
    data, shares, out, rows, columns, width, SHARES: tl.constexpr, TOKENS: tl.constexpr, FEATURES: tl.constexpr
):  # fmt: skip
    column = tl.program_id(0) * FEATURES + tl.arange(0, FEATURES)
    row = (tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)).to(tl.int64)
    mask = (row < rows)[:, None] & (column < columns)[None, :]
    at = data + row[:, None] * columns + column[None, :]
    if SHARES:
        share = tl.load(shares + row, mask=row < rows, other=0.0)
        x = (tl.load(at, mask=mask, other=0.0).to(tl.float32) * share[:, None]).to(out.dtype.element_ty)
    else:
        x = tl.load(at, mask=mask, other=0)
    at = out + column.to(tl.int64)[:, None] * width + row[None, :]
    tl.store(at, tl.trans(x), mask=(column < columns)[:, None] & (row < width)[None, :])
