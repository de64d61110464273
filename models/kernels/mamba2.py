"""The steps before and after Mamba-2's recurrence, one kernel forward and one backward each, computed in float32.

    v = dt u        y = w x / rms_head(x)  with x = (o + D u) SiLU(z)
PyTorch's kernels would write and read about thirty intermediate float32 tensors. Reference: `models/mixers/mamba2.py`.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .launch import Launch, aligned, dtypes, tl, triton
from .primitives import row_tile, sum_parts

# Programs of all heads in the backward pass.
_PROGRAMS = 1056


def apply_time_step(dt: Tensor, u: Tensor) -> Tensor:
    """Return dt * u in u's shape and dtype. dt: float32 [batch, length, heads]; u: [batch, length, heads, head_dim]."""
    return _ApplyTimeStep.apply(dt, u)


def gated_norm(o: Tensor, u: Tensor, skip: Tensor, z: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return y = weight x / rms_head(x) with x = (o + skip u) SiLU(z), in o's dtype and z's shape.

    o, u: [batch, length, heads, head_dim]; skip: [heads]; z: [batch, length, heads * head_dim]; weight: [heads * head_dim].
    """
    return _GatedNorm.apply(o, u, skip, z, weight, eps)


class _ApplyTimeStep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, dt: Tensor, u: Tensor) -> Tensor:
        dt, u = aligned(dt.float()), aligned(u)
        v = torch.empty_like(u)
        if u.numel():
            _step_launches(u.device, u.dtype, dt.numel(), u.shape[-1])[0](dt, u, v)
        ctx.save_for_backward(dt, u)
        return v

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dv: Tensor) -> tuple[Tensor, Tensor]:
        dt, u = ctx.saved_tensors
        d_dt, du = torch.empty_like(dt), torch.empty_like(u)
        if u.numel():
            _step_launches(u.device, u.dtype, dt.numel(), u.shape[-1])[1](aligned(dv), dt, u, d_dt, du)
        return d_dt, du


class _GatedNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, o: Tensor, u: Tensor, skip: Tensor, z: Tensor, weight: Tensor, eps: float) -> Tensor:
        o, u, z = aligned(o), aligned(u), aligned(z)
        skip, weight = skip.contiguous(), weight.contiguous()
        y = torch.empty_like(z, dtype=o.dtype)
        case = o.device, dtypes(o, u, skip, z, weight), o.shape, eps
        if o.numel():
            _norm_launches(*case)[0](o, u, skip, z, weight, y)
        ctx.save_for_backward(o, u, skip, z, weight)
        ctx.case = case
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        o, u, skip, z, weight = ctx.saved_tensors
        do, du, dz = torch.empty_like(o), torch.empty_like(u), torch.empty_like(z)
        programs = _programs(o.shape)
        of_skip, of_weight = (o.new_empty((1, programs, x.numel()), dtype=torch.float32) for x in (skip, weight))
        if o.numel():
            _norm_launches(*ctx.case)[1](aligned(dy), o, u, skip, z, weight, do, du, dz, of_skip, of_weight)
        return do, du, sum_parts(of_skip, skip.dtype)[0], dz, sum_parts(of_weight, weight.dtype)[0], None


@lru_cache(4096)
def _step_launches(device: torch.device, dtype: torch.dtype, rows: int, dim: int) -> tuple[Launch, Launch]:
    tile = row_tile(dim)
    grid = (triton.cdiv(rows, tile[0]),)
    forward, backward = (
        Launch(kernel, grid, rows, dim, *tile, num_warps=4) for kernel in (_mamba2_step, _mamba2_step_backward)
    )
    return forward, backward


@lru_cache(4096)
def _norm_launches(
    device: torch.device, key: tuple[torch.dtype | None, ...], shape: torch.Size, eps: float
) -> tuple[Launch, Launch]:
    """Return the forward and the backward launch. key: `dtypes` of o, u, skip, z and weight."""
    batch, length, heads, dim = shape
    tile = row_tile(dim)
    values = batch * length, heads, eps, dim, *tile
    forward = Launch(_mamba2_norm, (triton.cdiv(batch * length, tile[0]), heads), *values, num_warps=4)
    return forward, Launch(_mamba2_norm_backward, (_programs(shape), heads), *values, num_warps=4)


def _programs(shape: torch.Size) -> int:
    """Return the programs per head of the backward pass."""
    batch, length, heads, dim = shape
    return min(triton.cdiv(batch * length, row_tile(dim)[0]), max(1, _PROGRAMS // heads))


@triton.jit
def _mamba2_step(dt, u, v, N, D: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    r, c = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS), tl.arange(0, BLOCK)
    at, inside = r[:, None] * D + c[None, :], (r < N)[:, None] & (c < D)[None, :]
    x = tl.load(u + at, mask=inside, other=0.0).to(tl.float32) * tl.load(dt + r, mask=r < N, other=0.0)[:, None]
    tl.store(v + at, x.to(v.dtype.element_ty), mask=inside)


@triton.jit
def _mamba2_step_backward(dv, dt, u, d_dt, du, N, D: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    r, c = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS), tl.arange(0, BLOCK)
    at, inside = r[:, None] * D + c[None, :], (r < N)[:, None] & (c < D)[None, :]
    grad = tl.load(dv + at, mask=inside, other=0.0).to(tl.float32)
    x = tl.load(u + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(d_dt + r, tl.sum(grad * x, 1), mask=r < N)
    step = tl.load(dt + r, mask=r < N, other=0.0)[:, None]
    tl.store(du + at, (grad * step).to(du.dtype.element_ty), mask=inside)


@triton.jit
def _mamba2_norm(
    o, u, skip, z, weight, y, N, H, eps, D: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    h, c = tl.program_id(1), tl.arange(0, BLOCK)
    t = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    at, inside = (t[:, None] * H + h) * D + c[None, :], (t < N)[:, None] & (c < D)[None, :]
    x = tl.load(o + at, mask=inside, other=0.0).to(tl.float32)
    x += tl.load(skip + h).to(tl.float32) * tl.load(u + at, mask=inside, other=0.0).to(tl.float32)
    gate = tl.load(z + at, mask=inside, other=0.0).to(tl.float32)
    x *= gate * tl.sigmoid(gate)
    inverse = 1.0 / tl.sqrt(tl.sum(x * x, 1) / D + eps)
    x *= inverse[:, None] * tl.load(weight + h * D + c, mask=c < D, other=0.0).to(tl.float32)[None, :]
    tl.store(y + at, x.to(y.dtype.element_ty), mask=inside)


@triton.jit
def _mamba2_norm_backward(
    dy, o, u, skip, z, weight, do, du, dz, of_skip, of_weight, N, H, eps,
    D: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute all gradients. of_skip: [programs, heads], of_weight: [programs, heads, D], sums over a program's tokens."""
    program, h, c = tl.program_id(0), tl.program_id(1), tl.arange(0, BLOCK)
    through = tl.load(skip + h).to(tl.float32)
    scale = tl.load(weight + h * D + c, mask=c < D, other=0.0).to(tl.float32)[None, :]
    d_skip, d_weight = tl.zeros((ROWS,), tl.float32), tl.zeros((ROWS, BLOCK), tl.float32)
    for first in range(program * ROWS, N, tl.num_programs(0) * ROWS):
        t = tl.cast(first, tl.int64) + tl.arange(0, ROWS)
        at, inside = (t[:, None] * H + h) * D + c[None, :], (t < N)[:, None] & (c < D)[None, :]
        value = tl.load(u + at, mask=inside, other=0.0).to(tl.float32)
        sum_ = tl.load(o + at, mask=inside, other=0.0).to(tl.float32) + through * value
        gate = tl.load(z + at, mask=inside, other=0.0).to(tl.float32)
        grad = tl.load(dy + at, mask=inside, other=0.0).to(tl.float32)
        sigmoid = tl.sigmoid(gate)
        x = sum_ * gate * sigmoid
        inverse = (1.0 / tl.sqrt(tl.sum(x * x, 1) / D + eps))[:, None]
        normal = x * inverse
        d_weight += grad * normal
        grad *= scale
        d_x = (grad - normal * (tl.sum(grad * normal, 1) / D)[:, None]) * inverse
        d_gate = d_x * sum_ * sigmoid * (1.0 + gate * (1.0 - sigmoid))
        d_sum = d_x * gate * sigmoid
        d_skip += tl.sum(d_sum * value, 1)
        tl.store(dz + at, d_gate.to(dz.dtype.element_ty), mask=inside)
        tl.store(do + at, d_sum.to(do.dtype.element_ty), mask=inside)
        tl.store(du + at, (d_sum * through).to(du.dtype.element_ty), mask=inside)
    tl.store(of_skip + program * H + h, tl.sum(d_skip, 0))
    tl.store(of_weight + (program * H + h) * D + c, tl.sum(d_weight, 0), mask=c < D)
