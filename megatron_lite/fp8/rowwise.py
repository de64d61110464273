"""FP8 matmuls with one scale per row of each operand (rowwise scaling, as torchao's recipes of that name).

| matmul          | result   | left operand, scale per     | right operand, scale per  |
|-----------------|----------|-----------------------------|---------------------------|
| forward         | y = x w' | x [tokens, in], token       | w [out, in], output       |
| input gradient  | dx = dy w| dy [tokens, out], token     | w' [in, out], input       |
| weight gradient | dw = dy'x| dy' [out, tokens], output   | x' [in, tokens], input    |

A scale follows from the row alone, so there is no amax history. Scales are powers of two: quantisation rounds the mantissa to
the same bits with every scale, unless the number is below 2^-13 of the row's largest. A shard of a row has its own scale and
therefore the same numbers, except that those small ones may differ by 2^-16 of the largest. So no rank exchanges a scale, and
every layout computes the same matmul.

On CUDA `torch._scaled_mm` multiplies, and Triton kernels quantise (`kernels.py`). On a CPU the operands are dequantised and
multiplied in float32, which is the reference.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

ALIGNMENT = 16  # `torch._scaled_mm` takes widths that are multiples of it
_EXPONENTS = {torch.float8_e4m3fn: 8, torch.float8_e5m2: 15}  # of the largest number, 1.75 * 2^exponent
_SMALLEST = 2.0**-100  # smaller rows count as this: the reciprocal of a scale stays finite


@dataclass(frozen=True)
class Recipe:
    """Which matmuls of a linear layer run in FP8, besides the forward one and the input gradient.

    Attributes:
        weight_gradient: the weight gradient runs in FP8 too.
        gradient_dtype: number format of the output gradients; everything else is e4m3.
    """

    weight_gradient: bool
    gradient_dtype: torch.dtype


class Quantized(NamedTuple):
    """A matrix in FP8: data [rows, columns], contiguous, and scale [rows, 1] float32. Its values are data * scale."""

    data: Tensor
    scale: Tensor


def quantize_rows(x: Tensor, dtype: torch.dtype = torch.float8_e4m3fn) -> Quantized:
    """Return x [rows, columns] with one scale per row. A row that is not finite becomes NaN."""
    if x.is_cpu:
        scale = _scale(x.abs().amax(1, keepdim=True), dtype)
        return Quantized((x.float() * scale.reciprocal()).to(dtype), scale)
    quantized = _empty(x, x.shape, dtype)
    if x.is_cuda:
        from megatron_lite.fp8 import kernels

        kernels.quantize_rows(_with_unit_stride(x), *quantized, _EXPONENTS[dtype])
    return quantized


def quantize_columns(x: Tensor, dtype: torch.dtype = torch.float8_e4m3fn) -> Quantized:
    """Return the transpose of x [rows, columns] with one scale per column of x.

    Hopper's FP8 matmuls read both operands along the sum, so the weight gradient needs transposed copies. Zeros fill the rows
    of x up to a multiple of 16.
    """
    padding = -len(x) % ALIGNMENT
    if x.is_cpu:
        scale = _scale(x.abs().amax(0), dtype)
        data = F.pad((x.float() * scale.reciprocal()).to(dtype).t(), (0, padding))
        return Quantized(data.contiguous(), scale.unsqueeze(1))
    quantized = _empty(x, (x.shape[1], len(x) + padding), dtype)
    if x.is_cuda:
        from megatron_lite.fp8 import kernels

        kernels.quantize_columns(_with_unit_stride(x), *quantized, _EXPONENTS[dtype])
    return quantized


def scaled_matmul(a: Quantized, b: Quantized, dtype: torch.dtype, *, fast: bool = False) -> Tensor:
    """Return a b' [rows of a, rows of b] in `dtype`; a and b have equal columns.

    fast: Hopper's tensor cores add partial sums with fewer bits ("fast accumulation").
    """
    if a.data.is_cpu:
        return torch.mm(dequantized(a), dequantized(b).t()).to(dtype)
    return scaled_mm(a, b, dtype, fast=fast)


def scaled_mm(a: Quantized, b: Quantized, dtype: torch.dtype, *, fast: bool) -> Tensor:
    """Compute `scaled_matmul` with `torch._scaled_mm`."""
    return torch._scaled_mm(
        a.data, b.data.t(), scale_a=a.scale, scale_b=b.scale.t(), out_dtype=dtype, use_fast_accum=fast
    )


def dequantized(x: Quantized) -> Tensor:
    """Return the values of x in float32."""
    return x.data.float() * x.scale


def input_gradient(recipe: Recipe, gradient: Tensor, weight: Tensor) -> Tensor:
    """Return gradient [tokens, out] times weight [out, in], in FP8."""
    return scaled_matmul(quantize_rows(gradient, recipe.gradient_dtype), quantize_columns(weight), gradient.dtype)


def weight_gradient(recipe: Recipe, gradient: Tensor, x: Tensor) -> Tensor:
    """Return the transpose of gradient [tokens, out] times x [tokens, in], in FP8 if the recipe says so."""
    if not recipe.weight_gradient:
        return torch.mm(gradient.t(), x)
    return scaled_matmul(quantize_columns(gradient, recipe.gradient_dtype), quantize_columns(x), gradient.dtype)


def _scale(largest: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the smallest powers of two, float32, that bring `largest` into the range of `dtype`; NaN if it is not finite."""
    bits = largest.float().clamp(min=_SMALLEST).view(torch.int32)
    # A mantissa above 1.75 carries into the exponent.
    power = ((bits + 0x1FFFFF) & 0x7F800000) - (_EXPONENTS[dtype] << 23)
    return power.view(torch.float32).where(largest.isfinite(), torch.nan)


def _empty(x: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Quantized:
    return Quantized(x.new_empty(shape, dtype=dtype), x.new_empty((shape[0], 1), dtype=torch.float32))


def _with_unit_stride(x: Tensor) -> Tensor:
    return x if x.stride(1) == 1 else x.contiguous()
