"""Residual sum and norm in one kernel, and their gradients in one. Reference: `models.layers.norm.Norm`.

    h = x + d      y = norm(h) * weight + bias      dx = dd = dh + (gradient of the norm for dy)
All arithmetic is in float32. Every program sums the gradients of weight and bias over its rows. A second kernel sums over
programs in a fixed order, so the result does not depend on timing. Both kernels can write FP8 rows (`attach_rows`) of the
rounded numbers: of y instead of its 16 bits, and of dx beside them.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .launch import Launch, aligned, dtypes, tl, triton
from .primitives import attach_rows, store_fp8_rows, sum_parts, unwritten

# Programs of the backward pass: four per multiprocessor of an H200, and three for long rows, because no fourth one fits.
_PROGRAMS, _PROGRAMS_LONG = 528, 396


def add_norm(
    x: Tensor,
    delta: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    centred: bool,
    fp8_output: bool = False,
    fp8_gradient: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return h = x + delta (x if delta is None) and y, both in x's shape [..., size] and dtype.

    fp8_output: of y only FP8 rows are written, and its 16-bit numbers read as NaN. fp8_gradient: the gradient of x and delta has
    FP8 rows too.
    """
    return _AddNorm.apply(x, delta, weight, bias, eps, centred, fp8_output, fp8_gradient)


class _AddNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        delta: Tensor | None,
        weight: Tensor | None,
        bias: Tensor | None,
        eps: float,
        centred: bool,
        fp8_output: bool,
        fp8_gradient: bool,
    ) -> tuple[Tensor, Tensor]:
        x = aligned(x)
        delta = None if delta is None else aligned(delta)
        weight, bias = (None if p is None else p.contiguous() for p in (weight, bias))
        h = x if delta is None else torch.empty_like(x)
        y = unwritten(x) if fp8_output else torch.empty_like(x)
        rows = attach_rows(y) if fp8_output else (None, None)
        added, *parameters = dtypes(delta, weight, bias)
        case = (x.device, x.dtype, *parameters, eps, centred)
        if x.numel():
            launch = _forward_launch(*case, x.numel(), x.shape[-1], added, fp8_output)
            launch(x, delta, weight, bias, h, y, *rows)
        ctx.save_for_backward(h, weight, bias)
        ctx.case, ctx.added, ctx.fp8_gradient = case, delta is not None, fp8_gradient
        # If nothing reads h, its gradient is None and is not added.
        ctx.set_materialize_grads(False)
        return h, y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dh: Tensor | None, dy: Tensor | None) -> tuple[Tensor | None, ...]:
        h, weight, bias = ctx.saved_tensors
        size = h.shape[-1]
        dx = torch.empty_like(h)
        rows = attach_rows(dx) if ctx.fp8_gradient else (None, None)
        dy = torch.zeros_like(h) if dy is None else dy
        parameters = [p for p in (weight, bias) if p is not None]
        programs = _programs(h.numel() // size, size)
        partial = h.new_empty((len(parameters), programs, size), dtype=torch.float32) if parameters else None
        if h.numel():
            launch = _backward_launch(*ctx.case, h.numel(), size, dh is not None, ctx.fp8_gradient)
            launch(aligned(dy), None if dh is None else aligned(dh), h, weight, dx, partial, *rows)
        d_weight = d_bias = None
        if partial is not None:
            totals = iter(sum_parts(partial, parameters[0].dtype))
            d_weight, d_bias = (None if p is None else next(totals) for p in (weight, bias))
        return dx, dx if ctx.added else None, d_weight, d_bias, None, None, None, None


@lru_cache(4096)
def _forward_launch(
    device: torch.device, dtype: torch.dtype, weight: torch.dtype | None, bias: torch.dtype | None, eps: float,
    centred: bool, numel: int, size: int, delta: torch.dtype | None, fp8: bool,
) -> Launch:  # fmt: skip
    tile, rows = _tile(size), numel // size
    flags = delta is not None, weight is not None, bias is not None, centred, fp8
    return Launch(
        _add_norm_forward, (triton.cdiv(rows, tile[0]),), rows, size, eps, *tile, *flags, num_warps=_warps(tile)
    )


@lru_cache(4096)
def _backward_launch(
    device: torch.device, dtype: torch.dtype, weight: torch.dtype | None, bias: torch.dtype | None, eps: float,
    centred: bool, numel: int, size: int, through: bool, fp8: bool,
) -> Launch:  # fmt: skip
    tile, rows = _tile(size), numel // size
    flags = weight is not None, bias is not None, centred, through, fp8
    return Launch(_add_norm_backward, (_programs(rows, size),), rows, size, eps, *tile, *flags, num_warps=_warps(tile))


def _tile(size: int) -> tuple[int, int]:
    """Return the rows per tile (several if they are short) and the channels per row."""
    block = triton.next_power_of_2(size)
    return max(1, 1024 // block), block


def _programs(rows: int, size: int) -> int:
    """Return the number of programs of the backward pass."""
    tile = _tile(size)
    return min(triton.cdiv(rows, tile[0]), _PROGRAMS_LONG if tile[1] >= 2048 else _PROGRAMS)


def _warps(tile: tuple[int, int]) -> int:
    return min(16, max(1, tile[0] * tile[1] // 512))


@triton.jit
def _normalized(h, inside, size, eps, CENTRED: tl.constexpr):
    """Return the normalized rows before weight and bias, 0 outside, and 1 / the standard deviation of each."""
    if CENTRED:
        h = tl.where(inside, h - tl.sum(h, 1)[:, None] / size, 0.0)
    inverse = 1.0 / tl.sqrt(tl.sum(h * h, 1) / size + eps)[:, None]
    return h * inverse, inverse


@triton.jit
def _add_norm_forward(
    x, delta, weight, bias, h, y, data, scale, rows, size, eps,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, ADD: tl.constexpr, WEIGHT: tl.constexpr, BIAS: tl.constexpr,
    CENTRED: tl.constexpr, FP8: tl.constexpr,
):  # fmt: skip
    i = tl.arange(0, BLOCK)
    r = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inside = (r < rows)[:, None] & (i < size)[None, :]
    at = r[:, None] * size + i[None, :]
    row = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        row += tl.load(delta + at, mask=inside, other=0.0).to(tl.float32)
        # Normalize the sum after rounding, as it is stored.
        rounded = row.to(h.dtype.element_ty)
        tl.store(h + at, rounded, mask=inside)
        row = rounded.to(tl.float32)
    out, _ = _normalized(row, inside, size, eps, CENTRED)
    if WEIGHT:
        out *= tl.load(weight + i, mask=i < size, other=0.0).to(tl.float32)[None, :]
    if BIAS:
        out += tl.load(bias + i, mask=i < size, other=0.0).to(tl.float32)[None, :]
    rounded = out.to(y.dtype.element_ty)
    if FP8:
        store_fp8_rows(rounded.to(tl.float32), data, scale, r, at, inside, rows)
        tl.store(y, float("nan"), mask=tl.program_id(0) == 0)
    else:
        tl.store(y + at, rounded, mask=inside)


@triton.jit
def _add_norm_backward(
    dy, dh, h, weight, dx, partial, data, row_scale, rows, size, eps,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, WEIGHT: tl.constexpr, BIAS: tl.constexpr, CENTRED: tl.constexpr,
    THROUGH: tl.constexpr, FP8: tl.constexpr,
):  # fmt: skip
    """Compute all gradients. partial: [weight and bias, those that exist][program][channel]."""
    i = tl.arange(0, BLOCK)
    if WEIGHT:
        scale = tl.load(weight + i, mask=i < size, other=0.0).to(tl.float32)[None, :]
        of_weight = tl.zeros((ROWS, BLOCK), tl.float32)
    if BIAS:
        of_bias = tl.zeros((ROWS, BLOCK), tl.float32)
    next_r = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inside = (next_r < rows)[:, None] & (i < size)[None, :]
    next_at = next_r[:, None] * size + i[None, :]
    next_h, next_dy = tl.load(h + next_at, mask=inside, other=0.0), tl.load(dy + next_at, mask=inside, other=0.0)
    if THROUGH:
        next_dh = tl.load(dh + next_at, mask=inside, other=0.0)
    for first in range(tl.program_id(0) * ROWS, rows, tl.num_programs(0) * ROWS):
        row, d = next_h.to(tl.float32), next_dy.to(tl.float32)
        if THROUGH:
            through = next_dh.to(tl.float32)
        # Prefetch for the next iteration.
        r = tl.cast(first, tl.int64) + tl.arange(0, ROWS)
        next_r = r + tl.num_programs(0) * ROWS
        inside_next = (next_r < rows)[:, None] & (i < size)[None, :]
        next_at = next_r[:, None] * size + i[None, :]
        next_h, next_dy = (
            tl.load(h + next_at, mask=inside_next, other=0.0),
            tl.load(dy + next_at, mask=inside_next, other=0.0),
        )
        if THROUGH:
            next_dh = tl.load(dh + next_at, mask=inside_next, other=0.0)
        inside = (r < rows)[:, None] & (i < size)[None, :]
        at = r[:, None] * size + i[None, :]
        normal, inverse = _normalized(row, inside, size, eps, CENTRED)
        if BIAS:
            of_bias += d
        if WEIGHT:
            of_weight += d * normal
            d *= scale
        d_row = d - normal * (tl.sum(d * normal, 1)[:, None] / size)
        if CENTRED:
            d_row -= tl.sum(d, 1)[:, None] / size
        d_row *= inverse
        if THROUGH:
            d_row += through
        rounded = d_row.to(dx.dtype.element_ty)
        tl.store(dx + at, rounded, mask=inside)
        if FP8:
            store_fp8_rows(rounded.to(tl.float32), data, row_scale, r, at, inside, rows)
    at = tl.program_id(0) * size + i
    if WEIGHT:
        tl.store(partial + at, tl.sum(of_weight, 0), mask=i < size)
        at += tl.num_programs(0) * size
    if BIAS:
        tl.store(partial + at, tl.sum(of_bias, 0), mask=i < size)
