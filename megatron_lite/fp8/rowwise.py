"""FP8 matmuls with one scale per row of each operand (rowwise scaling, as torchao's recipes of that name).

| matmul          | result    | left operand                            | right operand          |
|-----------------|-----------|-----------------------------------------|------------------------|
| forward         | y = x w'  | x [tokens, in], scale per token         | w, scale per output    |
| input gradient  | dx = dy w | dy [tokens, out], scale per token       | w' [in, out], one scale|
| weight gradient | dw = dy'x | dy' [out, tokens], one scale            | x' [in, tokens], scale 1 |

w' is the transpose of w. Each tensor is quantised once, along its rows. Hopper's FP8 matmuls read both operands along the summed
dimension, so the gradients need transposed copies, made of the FP8 numbers (`transposed`). Scales along the summed dimension move
into one operand: those of w into w', those of dy and x into dy'. All scales are powers of two, so only exponents change.

A scale follows from the row alone, so there is no amax history. Quantisation rounds the mantissa to the same bits with every
scale, unless the number is below 2^-13 of the row's largest, or 2^-15 of the largest of a transposed copy. So a shard with
scales of its own has the same numbers, except for such small ones. Ranks exchange no scales, and every layout computes the same
matmul.

On CUDA `torch._scaled_mm` multiplies, and Triton kernels quantise (`kernels.py`). Some kernels of the model quantise their own
result, where `parallel/fp8_projections.py` switches this on: the norm before a SwiGLU MLP, the epilogue of MetaLA, and the
gradient of a norm. They attach FP8 rows of the rounded 16-bit numbers to the result, and `quantize_rows` returns these. Results
agree with those of separate kernels up to the order of sums in float32. On a CPU the operands are dequantised and multiplied in
float32, which is the reference.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

ALIGNMENT = 16  # `torch._scaled_mm` takes widths that are multiples of it
FORMAT = torch.float8_e4m3fn
_EXPONENT = 8  # of the largest number, 1.75 * 2^8
_SMALLEST = 2.0**-100  # smallest maximum of a row: the reciprocal of its scale stays finite
_SMALLEST_COMMON = 2.0**-126  # smallest scale of a transposed copy


class Quantized(NamedTuple):
    """A matrix in FP8: data [rows, columns], contiguous, and scale [rows, 1] float32. Its values are data * scale."""

    data: Tensor
    scale: Tensor


def quantize_rows(*parts: Tensor) -> Quantized:
    """Return torch.cat(parts, 1) [rows, columns] with one scale per row. A row that is not finite becomes NaN.

    parts: at most two, with adjacent elements in a row. One part with attached rows is not quantised again.
    """
    first = parts[0]
    attached = attached_rows(first) if len(parts) == 1 else None
    if attached is not None:
        return attached
    quantized = empty(first, len(first), sum(x.shape[1] for x in parts))
    write_rows(quantized, *parts)
    return quantized


def attached_rows(x: Tensor) -> Quantized | None:
    """Return the FP8 rows that the kernel of x [rows, columns] attached to its storage, or None.

    There are none for a part or a transpose of that kernel's result, and none after a change in place that autograd counts
    (collectives are not counted). If the kernel wrote FP8 rows only, x is one NaN with strides 0, and a permutation is not
    detected. So only a linear that reads the result itself may take its rows.
    """
    attached: Any = getattr(x.untyped_storage(), "_fp8_rows", None)
    if attached is None:
        return None
    data, scale, dtype, version = attached
    same = (dtype, version, data.shape) == (x.dtype, x._version, x.shape) and x.stride() in ((x.shape[1], 1), (0, 0))
    return Quantized(data, scale) if same else None


def quantize_stacked(matrices: Sequence[Tensor]) -> Quantized:
    """Return torch.cat(matrices) with one scale per row."""
    quantized = empty(matrices[0], sum(len(x) for x in matrices), matrices[0].shape[1])
    start = 0
    for matrix in matrices:
        write_rows(Quantized(*(x[start : start + len(matrix)] for x in quantized)), matrix)
        start += len(matrix)
    return quantized


def empty(like: Tensor, rows: int, columns: int) -> Quantized:
    """Return a matrix without values on the device of `like`."""
    return Quantized(like.new_empty((rows, columns), dtype=FORMAT), like.new_empty((rows, 1), dtype=torch.float32))


def write_rows(out: Quantized, *parts: Tensor) -> None:
    """Write torch.cat(parts, 1) to `out`. A row that is not finite becomes NaN."""
    if out.data.is_cuda:
        from megatron_lite.fp8 import kernels

        kernels.quantize_rows(out.data, out.scale, *(x if x.stride(1) == 1 else x.contiguous() for x in parts))
    elif out.data.is_cpu:
        x = torch.cat(parts, 1).float()
        out.scale.copy_(_scale(x.abs().amax(1, keepdim=True)))
        out.data.copy_((x * out.scale.reciprocal()).to(FORMAT))


def transposed(x: Quantized, others: Tensor | None = None) -> Quantized:
    """Return x' with one scale: each row of x takes its scale as exponents, divided by the largest of all.

    others: [rows, 1], powers of two that multiply the rows of x too. Zeros fill the rows of x up to a multiple of 16.
    """
    data, scale = x
    columns = data.shape[1]
    if data.is_cpu:
        factors = scale if others is None else scale * others
        common = factors.amax().clamp(min=_SMALLEST_COMMON)
        scaled = (data.float() * (factors / common)).to(FORMAT)
        return Quantized(_transposed(scaled), common.repeat(columns, 1))
    common, shares = scale.new_empty((columns, 1)), torch.empty_like(scale)
    if data.is_cuda:
        from megatron_lite.fp8 import kernels

        kernels.common_scale(scale, others, common, shares)
    return Quantized(_transposed(data, shares), common)


def transposed_data(x: Quantized) -> Quantized:
    """Return the transpose of x.data as a matrix with scale 1. `transposed` of the other operand takes the scales of x."""
    columns = x.data.shape[1]
    ones = torch.ones(columns, 1) if x.data.is_cpu else _ones(columns, x.data.device)
    return Quantized(_transposed(x.data), ones)


def scaled_matmul(a: Quantized, b: Quantized, dtype: torch.dtype, bias: Tensor | None = None) -> Tensor:
    """Return a b' + bias [rows of a, rows of b] in `dtype`; a and b have equal columns, bias [rows of b]."""
    if a.data.is_cpu:
        y = torch.mm(dequantized(a), dequantized(b).t()).to(dtype)
        return y if bias is None else y + bias
    return scaled_mm(a, b, dtype, bias)


def scaled_mm(a: Quantized, b: Quantized, dtype: torch.dtype, bias: Tensor | None = None) -> Tensor:
    """Compute `scaled_matmul` with `torch._scaled_mm`. Hopper adds partial sums with about 14 bits ("fast accumulation")."""
    return torch._scaled_mm(
        a.data, b.data.t(), bias=bias, scale_a=a.scale, scale_b=b.scale.t(), out_dtype=dtype, use_fast_accum=True
    )


def dequantized(x: Quantized) -> Tensor:
    """Return the values of x in float32."""
    return x.data.float() * x.scale


def input_gradient(gradient: Quantized, weight: Quantized, dtype: torch.dtype) -> Tensor:
    """Return gradient [tokens, out] times weight [out, in]."""
    return scaled_matmul(gradient, transposed(weight), dtype)


def weight_gradient(gradient: Quantized, x: Quantized, dtype: torch.dtype) -> Tensor:
    """Return the transpose of gradient [tokens, out] times x [tokens, in]."""
    return scaled_matmul(transposed(gradient, x.scale), transposed_data(x), dtype)


def _scale(largest: Tensor) -> Tensor:
    """Return the smallest powers of two, float32, that bring `largest` into the range of FP8; NaN if it is not finite."""
    bits = largest.clamp(min=_SMALLEST).view(torch.int32)
    # A mantissa above 1.75 carries into the exponent.
    power = ((bits + 0x1FFFFF) & 0x7F800000) - (_EXPONENT << 23)
    return power.view(torch.float32).where(largest.isfinite(), torch.nan)


def _transposed(data: Tensor, shares: Tensor | None = None) -> Tensor:
    """Return the transpose [columns, rows and zeros up to a multiple of 16] of data, whose rows `shares` multiplies."""
    padding = -len(data) % ALIGNMENT
    if data.is_cpu:
        return F.pad(data.view(torch.uint8).t(), (0, padding)).contiguous().view(FORMAT)
    out = data.new_empty((data.shape[1], len(data) + padding))
    if data.is_cuda:
        from megatron_lite.fp8 import kernels

        kernels.transpose(data, shares, out)
    return out


@lru_cache(64)
def _ones(rows: int, device: torch.device) -> Tensor:
    return torch.ones((rows, 1), device=device)
