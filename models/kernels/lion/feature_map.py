"""LION's feature map of queries and keys, one kernel forward and one backward, computed in float32.

    s = SiLU(x) + 1/2, or SiLU(x + 1/2)      y = s / |s|      dx = (dy - (y . dy) y) / |s| s'(x)
Reference: `models.operators.lion.feature_map`. PyTorch's kernels would read or write float32 values about ten times. It is not
part of LION's kernels, which are limited by arithmetic: there it was slower.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..launch import Launch, aligned, tl, triton

# Codes of the names of `models.operators.lion.feature_map`; 0 means none.
PHI = {"silu": 1, "silu_paper": 2}
# Elements per program.
_BLOCK = 2048


def normalized_silu(x: Tensor, phi: str, dtype: torch.dtype) -> Tensor:
    """Return the feature map of x [..., head_dim], in the same shape and `dtype`. phi: a key of `PHI`."""
    return _NormalizedSiLU.apply(x, PHI[phi], dtype)


def feature_maps(q: Tensor, k: Tensor, phi: int) -> tuple[Tensor, Tensor]:
    """Return the feature maps of q and k, of one shape and dtype, both `aligned`; no autograd. phi: a value of `PHI`."""
    y, z = torch.empty_like(q), torch.empty_like(k)
    if q.numel():
        _launches(q.device, q.dtype, q.dtype, q.numel(), q.shape[-1], phi, 2)[0](q, y, k, z)
    return y, z


def feature_map_gradients(dy: Tensor, dz: Tensor, q: Tensor, k: Tensor, phi: int) -> tuple[Tensor, Tensor]:
    """Replace dy and dz, the gradients of the results of `feature_maps`, by those of q and k, and return them."""
    if q.numel():
        _launches(q.device, q.dtype, q.dtype, q.numel(), q.shape[-1], phi, 2)[1](dy, q, dy, dz, k, dz)
    return dy, dz


class _NormalizedSiLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, phi: int, dtype: torch.dtype) -> Tensor:
        x = aligned(x)
        y = torch.empty_like(x, dtype=dtype)
        if x.numel():
            _launches(x.device, x.dtype, dtype, x.numel(), x.shape[-1], phi, 1)[0](x, y, None, None)
        ctx.save_for_backward(x)
        ctx.phi, ctx.dtype = phi, dtype
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        (x,) = ctx.saved_tensors
        dx = torch.empty_like(x)
        if x.numel():
            launch = _launches(x.device, x.dtype, ctx.dtype, x.numel(), x.shape[-1], ctx.phi, 1)[1]
            launch(aligned(dy), x, dx, None, None, None)
        return dx, None, None


@lru_cache(4096)
def _launches(
    device: torch.device, dtype: torch.dtype, out: torch.dtype, numel: int, dim: int, phi: int, tensors: int
) -> tuple[Launch, Launch]:
    """Return the forward and the backward launch."""
    rows, block = numel // dim, triton.next_power_of_2(dim)
    tile = max(1, _BLOCK // block)
    values = rows, dim, block, tile, phi
    forward, backward = (
        Launch(kernel, (triton.cdiv(rows, tile), tensors), *values, num_warps=4)
        for kernel in (_normalized_silu_forward, _normalized_silu_backward)
    )
    return forward, backward


@triton.jit
def _tile(rows, dim: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr):
    """Return the addresses of the program's rows, and their mask."""
    row, channel = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE), tl.arange(0, BLOCK)
    mask = (row < rows)[:, None]
    if dim != BLOCK:
        mask = mask & (channel < dim)[None, :]
    return row[:, None] * dim + channel[None, :], mask


@triton.jit
def _silu(x, mask, PHI: tl.constexpr):
    """Return s (0 outside the rows), its derivative, and 1 / |s| per row."""
    x = x.to(tl.float32)
    if PHI == 2:
        x += 0.5
    # The sigmoid, as `primitives.sigmoid`.
    root = tl.rsqrt(1.0 + tl.exp2(x * -1.4426950408889634))
    gate = root * root
    s = x * gate
    slope = gate + s * (1.0 - gate)
    if PHI == 1:
        s += 0.5
    s = tl.where(mask, s, 0.0)
    norm_squared = tl.maximum(tl.sum(s * s, 1), 1e-24, propagate_nan=tl.PropagateNan.ALL)
    return s, slope, tl.rsqrt(norm_squared)[:, None]


@triton.jit(do_not_specialize=["rows"])
def _normalized_silu_forward(
    x, y, x_2, y_2, rows, dim: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr, PHI: tl.constexpr
):
    """Compute y of x, and by the programs of the second grid row y_2 of x_2."""
    if x_2 is not None:  # noqa: SIM102 (decided when the kernel is compiled)
        if tl.program_id(1) == 1:
            x, y = x_2, y_2
    at, mask = _tile(rows, dim, BLOCK, TILE)
    s, _, inverse = _silu(tl.load(x + at, mask=mask, other=0.0), mask, PHI)
    tl.store(y + at, (s * inverse).to(y.dtype.element_ty), mask=mask)


@triton.jit
def _normalized_silu_backward(
    dy, x, dx, dy_2, x_2, dx_2, rows, dim: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr, PHI: tl.constexpr
):  # fmt: skip
    if x_2 is not None:  # noqa: SIM102 (decided when the kernel is compiled)
        if tl.program_id(1) == 1:
            dy, x, dx = dy_2, x_2, dx_2
    at, mask = _tile(rows, dim, BLOCK, TILE)
    s, slope, inverse = _silu(tl.load(x + at, mask=mask, other=0.0), mask, PHI)
    d = tl.load(dy + at, mask=mask, other=0.0).to(tl.float32)
    y = s * inverse
    d = (d - y * tl.sum(d * y, 1)[:, None]) * (inverse * slope)
    tl.store(dx + at, d.to(dx.dtype.element_ty), mask=mask)
