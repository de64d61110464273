"""Rotation of pairs of channels in one kernel, computed in float32. Reference: `models.operators.rotary.rotate`."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..backend import disable_compile
from .launch import Launch, aligned, packed, tl, triton
from .primitives import row_tile

# One program adds the gradients of the angles over this many sequences.
_SEQUENCES = 16


@disable_compile
def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return `models.operators.rotary.rotate` of x [batch, length, heads, head_dim], in x's dtype.

    cos, sin: [batch or 1, length, heads or 1, at most head_dim / 2] in float32.
    """
    return _Rotate.apply(x, cos, sin)


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x, cos, sin = _tokens_in_rows(x), aligned(cos), aligned(sin)
        ctx.save_for_backward(x if any(ctx.needs_input_grad[1:]) else None, cos, sin)
        return _rotated(x, cos, sin, 1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None]:
        x, cos, sin = ctx.saved_tensors
        dy = packed(dy)
        dx = _rotated(dy, cos, sin, -1)
        if x is None:
            return dx, None, None
        shared = _SEQUENCES if len(cos) == 1 else 1
        parts = cos.new_empty(2, triton.cdiv(len(x), shared), *x.shape[1:3], cos.shape[-1])
        if parts.numel():
            _gradient_launch(x.device, x.dtype, x.shape, x.stride(1), cos.shape[-1], shared)(x, dy, parts)
        dcos, dsin = parts.sum_to_size(2, *cos.shape)
        return dx, dcos, dsin


class _Sizes(NamedTuple):
    """Hold the sizes of a case: elements between two tokens of x, heads, channels, pairs, heads of cos."""

    stride: int
    heads: int
    dim: int
    pairs: int
    cos_heads: int


def _tokens_in_rows(x: Tensor) -> Tensor:
    """Return x if all neighbouring tokens are equally far apart in memory, as in a part of a fused projection, else a copy."""
    batch, length, _, dim = x.shape
    dense = x.stride(3) == 1 and x.stride(2) == dim and (batch == 1 or x.stride(0) == length * x.stride(1))
    return x if dense and x.data_ptr() % 16 == 0 else packed(x)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor, sign: int) -> Tensor:
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if y.numel():
        batch, length, heads, dim = x.shape
        sizes = _Sizes(x.stride(1), heads, dim, cos.shape[-1], cos.shape[2])
        period = length if len(cos) == 1 else batch * length
        _launch(x.device, x.dtype, batch * length, period, sizes, sign)(x, cos, sin, y)
    return y


@lru_cache(4096)
def _launch(device: torch.device, dtype: torch.dtype, tokens: int, period: int, sizes: _Sizes, sign: int) -> Launch:
    rows, pairs = row_tile(sizes.pairs)
    rest = triton.next_power_of_2(sizes.dim - 2 * sizes.pairs) if sizes.dim > 2 * sizes.pairs else 0
    grid = (triton.cdiv(tokens * sizes.heads, rows),)
    return Launch(_rotate, grid, tokens, period, *sizes, sign, rows, pairs, rest, num_warps=4)


@lru_cache(4096)
def _gradient_launch(
    device: torch.device, dtype: torch.dtype, shape: torch.Size, stride: int, pairs: int, shared: int
) -> Launch:
    batch, length, heads, dim = shape
    rows, block = row_tile(pairs)
    grid = triton.cdiv(length * heads, rows), triton.cdiv(batch, shared)
    return Launch(_angle_gradients, grid, batch, length, shared, stride, heads, dim, pairs, rows, block, num_warps=4)


@triton.jit(do_not_specialize=["N", "P"])
def _rotate(
    x, cos, sin, y, N, P, STRIDE: tl.constexpr, H: tl.constexpr, D: tl.constexpr, PAIRS: tl.constexpr,
    COS_H: tl.constexpr, SIGN: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, REST: tl.constexpr,
):  # fmt: skip
    """Rotate the pairs of N tokens x [N, H, D]. Token n has the angles n modulo P of cos and sin [P, COS_H, PAIRS]."""
    row, c = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS), tl.arange(0, BLOCK)
    token, head = row // H, row % H
    inside = (token < N)[:, None] & (c < PAIRS)[None, :]
    angle = ((token % P) * COS_H + head % COS_H)[:, None] * PAIRS + c[None, :]
    real, imaginary = tl.load(cos + angle, mask=inside), tl.load(sin + angle, mask=inside) * SIGN
    start, out = (token * STRIDE + head * D)[:, None], row[:, None] * D
    first = tl.load(x + start + c[None, :], mask=inside).to(tl.float32)
    second = tl.load(x + start + PAIRS + c[None, :], mask=inside).to(tl.float32)
    tl.store(y + out + c[None, :], (first * real - second * imaginary).to(y.dtype.element_ty), mask=inside)
    tl.store(y + out + PAIRS + c[None, :], (second * real + first * imaginary).to(y.dtype.element_ty), mask=inside)
    if REST:
        c = 2 * PAIRS + tl.arange(0, REST)
        inside = (token < N)[:, None] & (c < D)[None, :]
        tl.store(y + out + c[None, :], tl.load(x + start + c[None, :], mask=inside), mask=inside)


@triton.jit(do_not_specialize=["B", "T"])
def _angle_gradients(
    x, dy, parts, B, T, SHARED: tl.constexpr, STRIDE: tl.constexpr, H: tl.constexpr, D: tl.constexpr,
    PAIRS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the gradients of cos and sin, each summed over SHARED sequences: parts [2, groups of sequences, T, H, PAIRS]."""
    row, c = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS), tl.arange(0, BLOCK)
    token, head = row // H, row % H
    inside = (token < T)[:, None] & (c < PAIRS)[None, :]
    dcos, dsin = tl.zeros([ROWS, BLOCK], tl.float32), tl.zeros([ROWS, BLOCK], tl.float32)
    group = tl.program_id(1)
    for b in range(group * SHARED, tl.minimum(B, group * SHARED + SHARED)):
        at = ((b * T + token) * STRIDE + head * D)[:, None] + c[None, :]
        first = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
        second = tl.load(x + at + PAIRS, mask=inside, other=0.0).to(tl.float32)
        at = ((b * T + token) * (H * D) + head * D)[:, None] + c[None, :]
        d_first = tl.load(dy + at, mask=inside, other=0.0).to(tl.float32)
        d_second = tl.load(dy + at + PAIRS, mask=inside, other=0.0).to(tl.float32)
        dcos += first * d_first + second * d_second
        dsin += first * d_second - second * d_first
    out = (group.to(tl.int64) * T * H + row)[:, None] * PAIRS + c[None, :]
    groups = tl.num_programs(1).to(tl.int64)
    tl.store(parts + out, dcos, mask=inside)
    tl.store(parts + groups * T * H * PAIRS + out, dsin, mask=inside)
