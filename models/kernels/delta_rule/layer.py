"""The elementwise steps around the delta rule, one kernel forward and one backward each, computed in float32.

    unit_length: x / sqrt(sum x^2 + e)      gated_norm: act(gate) w o / rms_head(o)      channel_decay: -exp(a) softplus(x + b)
References: `models/layers/delta_rule_mixer.py`, and `models/operators/delta_rule/softplus_decay.py` for the decay.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..launch import Launch, aligned, tl, triton
from ..primitives import row_tile, sum_parts

# Programs of all heads in backward passes that sum over tokens.
_PROGRAMS = 1056


def unit_length(x: Tensor, eps: float) -> Tensor:
    """Return x / sqrt(sum x^2 + eps) over the last axis, in x's shape and dtype."""
    return _UnitLength.apply(x, eps)


def gated_norm(o: Tensor, gate: Tensor, weight: Tensor, eps: float, silu: bool) -> Tensor:
    """Return act(gate) * weight * o / rms_head(o) in gate's shape and o's dtype. act: SiLU, or the sigmoid.

    o: [batch, length, heads, head_dim]; gate: [batch, length, heads * head_dim]; weight: [head_dim].
    """
    return _GatedNorm.apply(o, gate, weight, eps, silu)


def channel_decay(x: Tensor, a_log: Tensor, bias: Tensor) -> Tensor:
    """Return -exp(a_log) softplus(x + bias) in float32. x: [batch, length, heads, dim]; a_log: [heads]; bias: [heads, dim]."""
    return _ChannelDecay.apply(x, a_log, bias)


class _UnitLength(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, eps: float) -> Tensor:
        x = aligned(x)
        y = torch.empty_like(x)
        ctx.case = x.device, x.dtype, x.shape, eps
        if x.numel():
            _launches(*ctx.case)[0](x, y)
        ctx.save_for_backward(x)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        dx = torch.empty_like(x)
        if x.numel():
            _launches(*ctx.case)[1](aligned(dy), x, dx)
        return dx, None


class _GatedNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, o: Tensor, gate: Tensor, weight: Tensor, eps: float, silu: bool) -> Tensor:
        o, gate, weight = aligned(o), aligned(gate), weight.contiguous()
        y = torch.empty_like(gate, dtype=o.dtype)
        ctx.case = o.device, (o.dtype, gate.dtype, weight.dtype), o.shape, eps, silu
        if o.numel():
            _norm_launches(*ctx.case)[0](o, gate, weight, y)
        ctx.save_for_backward(o, gate, weight)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        o, gate, weight = ctx.saved_tensors
        do, d_gate = torch.empty_like(o), torch.empty_like(gate)
        parts = o.new_zeros((1, _programs(o.shape) * o.shape[2], weight.numel()), dtype=torch.float32)
        if o.numel():
            _norm_launches(*ctx.case)[1](aligned(dy), o, gate, weight, do, d_gate, parts)
        return do, d_gate, sum_parts(parts, weight.dtype)[0], None, None


class _ChannelDecay(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, a_log: Tensor, bias: Tensor) -> Tensor:
        x, a_log, bias = aligned(x), aligned(a_log), aligned(bias)
        g = torch.empty_like(x, dtype=torch.float32)
        ctx.case = x.device, (x.dtype, a_log.dtype, bias.dtype), x.shape
        if x.numel():
            _decay_launches(*ctx.case)[0](x, a_log, bias, g)
        ctx.save_for_backward(x, a_log, bias)
        return g

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dg: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x, a_log, bias = ctx.saved_tensors
        dx = torch.empty_like(x)
        parts = x.new_zeros((2, _programs(x.shape), bias.numel()), dtype=torch.float32)
        if x.numel():
            _decay_launches(*ctx.case)[1](aligned(dg), x, a_log, bias, dx, parts[0], parts[1])
        d_bias, d_rate = sum_parts(parts, torch.float32)
        return dx, d_rate.view_as(bias).sum(1).to(a_log.dtype), d_bias.view_as(bias).to(bias.dtype)


@lru_cache(4096)
def _launches(device: torch.device, dtype: torch.dtype, shape: torch.Size, eps: float) -> tuple[Launch, Launch]:
    tile, rows = row_tile(shape[-1]), shape.numel() // shape[-1]
    grid, values = (triton.cdiv(rows, tile[0]),), (rows, eps, shape[-1], *tile)
    return Launch(_unit_length, grid, *values, num_warps=4), Launch(_unit_length_backward, grid, *values, num_warps=4)


@lru_cache(4096)
def _norm_launches(
    device: torch.device, dtypes: tuple[torch.dtype, ...], shape: torch.Size, eps: float, silu: bool
) -> tuple[Launch, Launch]:
    batch, length, heads, dim = shape
    tile = row_tile(dim)
    values = batch * length, heads, eps, dim, silu, *tile
    forward = Launch(_gated_norm, (triton.cdiv(batch * length, tile[0]), heads), *values, num_warps=4)
    return forward, Launch(_gated_norm_backward, (_programs(shape), heads), *values, num_warps=4)


@lru_cache(4096)
def _decay_launches(device: torch.device, dtypes: tuple[torch.dtype, ...], shape: torch.Size) -> tuple[Launch, Launch]:
    batch, length, heads, dim = shape
    tile = row_tile(dim)
    values = batch * length, heads, dim, *tile
    forward = Launch(_channel_decay, (triton.cdiv(batch * length, tile[0]), heads), *values, num_warps=4)
    return forward, Launch(_channel_decay_backward, (_programs(shape), heads), *values, num_warps=4)


def _programs(shape: torch.Size) -> int:
    """Return the programs per head of a backward pass."""
    batch, length, heads, dim = shape
    return min(triton.cdiv(batch * length, row_tile(dim)[0]), max(1, _PROGRAMS // heads))


@triton.jit
def _unit_length(x, y, N, eps, D: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    at, inside = _rows(tl.program_id(0) * ROWS, 0, N, 1, D, ROWS, BLOCK)
    value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    value *= (1.0 / tl.sqrt(tl.sum(value * value, 1) + eps))[:, None]
    tl.store(y + at, value.to(y.dtype.element_ty), mask=inside)


@triton.jit
def _unit_length_backward(dy, x, dx, N, eps, D: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    at, inside = _rows(tl.program_id(0) * ROWS, 0, N, 1, D, ROWS, BLOCK)
    value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    grad = tl.load(dy + at, mask=inside, other=0.0).to(tl.float32)
    inverse = (1.0 / tl.sqrt(tl.sum(value * value, 1) + eps))[:, None]
    value *= inverse
    grad = (grad - value * tl.sum(grad * value, 1)[:, None]) * inverse
    tl.store(dx + at, grad.to(dx.dtype.element_ty), mask=inside)


@triton.jit
def _gated_norm(
    o, gate, weight, y, N, H, eps, D: tl.constexpr, SILU: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    at, inside = _rows(tl.program_id(0) * ROWS, tl.program_id(1), N, H, D, ROWS, BLOCK)
    c = tl.arange(0, BLOCK)
    x = tl.load(o + at, mask=inside, other=0.0).to(tl.float32)
    x *= (1.0 / tl.sqrt(tl.sum(x * x, 1) / D + eps))[:, None]
    x *= tl.load(weight + c, mask=c < D, other=0.0).to(tl.float32)[None, :]
    z = tl.load(gate + at, mask=inside, other=0.0).to(tl.float32)
    x *= tl.sigmoid(z)
    if SILU:
        x *= z
    tl.store(y + at, x.to(y.dtype.element_ty), mask=inside)


@triton.jit
def _gated_norm_backward(
    dy, o, gate, weight, do, d_gate, parts, N, H, eps, D: tl.constexpr, SILU: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute all gradients. parts: [programs, heads, D], the weight's gradient from a program's tokens."""
    program, h, c = tl.program_id(0), tl.program_id(1), tl.arange(0, BLOCK)
    scale = tl.load(weight + c, mask=c < D, other=0.0).to(tl.float32)[None, :]
    d_weight = tl.zeros((ROWS, BLOCK), tl.float32)
    for first in range(program * ROWS, N, tl.num_programs(0) * ROWS):
        at, inside = _rows(first, h, N, H, D, ROWS, BLOCK)
        x = tl.load(o + at, mask=inside, other=0.0).to(tl.float32)
        z = tl.load(gate + at, mask=inside, other=0.0).to(tl.float32)
        grad = tl.load(dy + at, mask=inside, other=0.0).to(tl.float32)
        inverse = (1.0 / tl.sqrt(tl.sum(x * x, 1) / D + eps))[:, None]
        normal = x * inverse
        open_ = tl.sigmoid(z)
        d_open = grad * normal * scale * open_
        if SILU:
            d_open *= 1.0 + z * (1.0 - open_)
            grad *= z * open_
        else:
            d_open *= 1.0 - open_
            grad *= open_
        d_weight += grad * normal
        grad *= scale
        grad = (grad - normal * (tl.sum(grad * normal, 1) / D)[:, None]) * inverse
        tl.store(d_gate + at, d_open.to(d_gate.dtype.element_ty), mask=inside)
        tl.store(do + at, grad.to(do.dtype.element_ty), mask=inside)
    tl.store(parts + (program * H + h) * D + c, tl.sum(d_weight, 0), mask=c < D)


@triton.jit
def _channel_decay(x, a_log, bias, g, N, H, D: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    h, c = tl.program_id(1), tl.arange(0, BLOCK)
    at, inside = _rows(tl.program_id(0) * ROWS, h, N, H, D, ROWS, BLOCK)
    z = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    z += tl.load(bias + h * D + c, mask=c < D, other=0.0).to(tl.float32)[None, :]
    tl.store(g + at, -tl.exp(tl.load(a_log + h).to(tl.float32)) * softplus(z), mask=inside)


@triton.jit
def _channel_decay_backward(
    dg, x, a_log, bias, dx, d_bias, d_rate, N, H, D: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Compute all gradients. d_bias, d_rate: [programs, heads, D], sums over a program's tokens."""
    program, h, c = tl.program_id(0), tl.program_id(1), tl.arange(0, BLOCK)
    rate = -tl.exp(tl.load(a_log + h).to(tl.float32))
    offset = tl.load(bias + h * D + c, mask=c < D, other=0.0).to(tl.float32)[None, :]
    of_bias, of_rate = tl.zeros((ROWS, BLOCK), tl.float32), tl.zeros((ROWS, BLOCK), tl.float32)
    for first in range(program * ROWS, N, tl.num_programs(0) * ROWS):
        at, inside = _rows(first, h, N, H, D, ROWS, BLOCK)
        z = tl.load(x + at, mask=inside, other=0.0).to(tl.float32) + offset
        grad = tl.load(dg + at, mask=inside, other=0.0).to(tl.float32) * rate
        of_rate += grad * softplus(z)
        grad *= tl.sigmoid(z)
        of_bias += grad
        tl.store(dx + at, grad.to(dx.dtype.element_ty), mask=inside)
    at = (program * H + h) * D + c
    tl.store(d_bias + at, tl.sum(of_bias, 0), mask=c < D)
    tl.store(d_rate + at, tl.sum(of_rate, 0), mask=c < D)


@triton.jit
def _rows(first, h, N, H, D: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Return the offsets of head h of ROWS tokens in [tokens, heads, D], and which are inside."""
    t, c = tl.cast(first, tl.int64) + tl.arange(0, ROWS), tl.arange(0, BLOCK)
    return (t[:, None] * H + h) * D + c[None, :], (t < N)[:, None] & (c < D)[None, :]


@triton.jit
def softplus(x):
    """Return log(1 + exp(x)), to about 1e-6 of the result. A logarithm has more instructions."""
    small = tl.exp(-tl.abs(x))
    # log(1 + u) = 2 artanh(u / (2 + u)), with an argument of at most 1/3.
    y = small / (2.0 + small)
    z = y * y
    series = 1.0 + z * (1 / 3 + z * (1 / 5 + z * (1 / 7 + z * (1 / 9 + z * (1 / 11)))))
    return tl.maximum(x, 0.0) + 2.0 * y * series
