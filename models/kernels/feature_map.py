"""LION's feature map of queries and keys, one kernel forward and one backward, computed in float32.

    s = SiLU(x) + 1/2, or SiLU(x + 1/2)      y = s / |s|      dx = (dy - (y . dy) y) / |s| s'(x)
Reference: `models.mixers.lion`. By PyTorch's kernels the float32 values in between are read and written some ten times.
"""

# Kernels take pointers and scalars that have no Python type.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .launch import Launch, aligned

try:
    import triton
    import triton.language as tl
except ImportError as error:
    raise ImportError("LION's kernels need Triton (pip install triton)") from error

# Elements of a program.
_BLOCK = 2048


def normalised_silu(x: Tensor, inside: bool, dtype: torch.dtype) -> Tensor:
    """x: [..., head_dim] -> the same shape in `dtype`. inside: the half is added before the SiLU, not after it."""
    return _NormalisedSiLU.apply(x, inside, dtype)


class _NormalisedSiLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, inside: bool, dtype: torch.dtype) -> Tensor:
        x = aligned(x)
        y = torch.empty_like(x, dtype=dtype)
        if x.numel():
            _launches(x.device, x.dtype, dtype, x.numel(), x.shape[-1], inside)[0](x, y)
        ctx.save_for_backward(x)
        ctx.inside, ctx.dtype = inside, dtype
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        (x,) = ctx.saved_tensors
        dx = torch.empty_like(x)
        if x.numel():
            _launches(x.device, x.dtype, ctx.dtype, x.numel(), x.shape[-1], ctx.inside)[1](aligned(dy), x, dx)
        return dx, None, None


@lru_cache(4096)
def _launches(
    device: torch.device, dtype: torch.dtype, out: torch.dtype, numel: int, dim: int, inside: bool
) -> tuple[Launch, Launch]:
    """Forward and backward."""
    rows, block = numel // dim, triton.next_power_of_2(dim)
    tile = max(1, _BLOCK // block)
    values = rows, dim, block, tile, inside
    forward, backward = (
        Launch(kernel, (triton.cdiv(rows, tile),), *values, num_warps=4) for kernel in (_forward, _backward)
    )
    return forward, backward


@triton.jit
def _tile(rows, dim: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr):
    """Addresses of the program's rows and which of them exist."""
    row, channel = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE), tl.arange(0, BLOCK)
    mask = (row < rows)[:, None]
    if dim != BLOCK:
        mask = mask & (channel < dim)[None, :]
    return row[:, None] * dim + channel[None, :], mask


@triton.jit
def _silu(x, mask, INSIDE: tl.constexpr):
    """s, 0 outside the rows; its derivative; and 1 / |s| a row."""
    shifted = x + 0.5 if INSIDE else x
    gate = tl.sigmoid(shifted)
    s = shifted * gate
    slope = gate * (1.0 + shifted * (1.0 - gate))
    if not INSIDE:
        s += 0.5
    s = tl.where(mask, s, 0.0)
    return s, slope, 1.0 / tl.maximum(tl.sqrt(tl.sum(s * s, 1)), 1e-12)


@triton.jit
def _forward(x, y, rows, dim: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr, INSIDE: tl.constexpr):
    at, mask = _tile(rows, dim, BLOCK, TILE)
    s, _, inverse = _silu(tl.load(x + at, mask=mask, other=0.0).to(tl.float32), mask, INSIDE)
    tl.store(y + at, (s * inverse[:, None]).to(y.dtype.element_ty), mask=mask)


@triton.jit
def _backward(dy, x, dx, rows, dim: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr, INSIDE: tl.constexpr):
    at, mask = _tile(rows, dim, BLOCK, TILE)
    s, slope, inverse = _silu(tl.load(x + at, mask=mask, other=0.0).to(tl.float32), mask, INSIDE)
    d = tl.load(dy + at, mask=mask, other=0.0).to(tl.float32)
    y = s * inverse[:, None]
    d = (d - y * tl.sum(d * y, 1)[:, None]) * inverse[:, None] * slope
    tl.store(dx + at, d.to(dx.dtype.element_ty), mask=mask)
