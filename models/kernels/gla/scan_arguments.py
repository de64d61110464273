"""The arguments of the backward scan of `models.operators.lion.scans`, in one kernel, with their gradients.

Token t of the flipped sequence has the query of token T-1-t, and key, value and decay of the token after it:
    q'_t = q_(T-1-t)      k'_t = alpha_(T-t) k_(T-t)      v'_t = v_(T-t)      g'_t = g_(T-t)      alpha = exp(g)
The last token of a segment has no next token: k', v' and g' are 0. The kernel of the backward pass adds the gradients of both
scans. Reference: `models.operators.lion.scans.scan_arguments`.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..launch import Launch, aligned, tl, triton

_TOKENS, _CHANNELS = 32, 128


def scan_arguments(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, last: Tensor | None) -> tuple[Tensor, ...]:
    """Compute `models.operators.lion.scans.scan_arguments` for q, k and v of one dtype, with log decays in float32."""
    return _ScanArguments.apply(q, k, v, log_decay.float(), last)


class _ScanArguments(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, g: Tensor, last: Tensor | None) -> tuple[Tensor, ...]:
        q, k, v, g = (aligned(x) for x in (q, k, v, g))
        backward = tuple(torch.empty_like(x) for x in (q, k, v, g))
        ctx.launches = _launches(q.device, q.dtype, q.shape, v.shape[-1], last is not None)
        ctx.launches[0](q, k, v, g, last, *backward)
        ctx.save_for_backward(k, g, last)
        return q, k, v, g, *backward

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        k, g, last = ctx.saved_tensors
        gradients = tuple(aligned(x) for x in gradients)
        sums = tuple(torch.empty_like(x) for x in gradients[:4])
        ctx.launches[1](k, g, last, *gradients, *sums)
        return *sums, None


@lru_cache(4096)
def _launches(
    device: torch.device, dtype: torch.dtype, shape: torch.Size, dim_v: int, packed: bool
) -> tuple[Launch, Launch]:
    """Return the forward and the backward launch for queries of this shape."""
    batch, length, heads, dim_k = shape
    blocks = triton.cdiv(length, _TOKENS)
    values = length, blocks, heads * dim_k, heads * dim_v, _TOKENS, _CHANNELS, packed
    forward, backward = (
        Launch(kernel, (batch * blocks,), *values, num_warps=4) for kernel in (_reverse_forward, _reverse_backward)
    )
    return forward, backward


@triton.jit
def _place(T, BLOCKS, TOKENS: tl.constexpr):
    """Return the tokens of a program, and the first token of its sequence in the batch."""
    program = tl.program_id(0)
    return program % BLOCKS * TOKENS + tl.arange(0, TOKENS), (program // BLOCKS).to(tl.int64) * T


@triton.jit
def _reverse_forward(
    q, k, v, g, last, reversed_q, reversed_k, reversed_v, reversed_g, T, BLOCKS, KEYS: tl.constexpr, VALUES: tl.constexpr,
    TOKENS: tl.constexpr, CHANNELS: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    t, sequence = _place(T, BLOCKS, TOKENS)
    inside = t < T
    own, following = sequence + T - 1 - t, sequence + T - t
    followed = inside & (t > 0)
    if PACKED:
        followed &= tl.load(last + own, mask=inside, other=1) == 0
    for first in tl.range(0, KEYS, CHANNELS):
        c = first + tl.arange(0, CHANNELS)
        known = (c < KEYS)[None, :]
        to = (sequence + t)[:, None] * KEYS + c[None, :]
        written = inside[:, None] & known
        query = tl.load(q + own[:, None] * KEYS + c[None, :], mask=written)
        tl.store(reversed_q + to, query, mask=written)
        source, real = following[:, None] * KEYS + c[None, :], followed[:, None] & known
        decay = tl.load(g + source, mask=real, other=0.0)
        key = tl.load(k + source, mask=real, other=0.0).to(tl.float32) * tl.exp(decay)
        tl.store(reversed_g + to, decay, mask=written)
        tl.store(reversed_k + to, key.to(k.dtype.element_ty), mask=written)
    for first in tl.range(0, VALUES, CHANNELS):
        c = first + tl.arange(0, CHANNELS)
        known = (c < VALUES)[None, :]
        value = tl.load(v + following[:, None] * VALUES + c[None, :], mask=followed[:, None] & known, other=0.0)
        tl.store(reversed_v + (sequence + t)[:, None] * VALUES + c[None, :], value, mask=inside[:, None] & known)


@triton.jit
def _reverse_backward(
    k, g, last, dq, dk, dv, dg, reversed_dq, reversed_dk, reversed_dv, reversed_dg, sum_q, sum_k, sum_v, sum_g, T, BLOCKS,
    KEYS: tl.constexpr, VALUES: tl.constexpr, TOKENS: tl.constexpr, CHANNELS: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    i, sequence = _place(T, BLOCKS, TOKENS)
    inside = i < T
    own, following = sequence + T - 1 - i, sequence + T - i
    follows = inside & (i > 0)
    if PACKED:
        follows &= tl.load(last + sequence + i - 1, mask=follows, other=1) == 0
    for first in tl.range(0, KEYS, CHANNELS):
        c = first + tl.arange(0, CHANNELS)
        known = (c < KEYS)[None, :]
        to, written = (sequence + i)[:, None] * KEYS + c[None, :], inside[:, None] & known
        source, real = following[:, None] * KEYS + c[None, :], follows[:, None] & known
        query = tl.load(dq + to, mask=written, other=0.0).to(tl.float32)
        query += tl.load(reversed_dq + own[:, None] * KEYS + c[None, :], mask=written, other=0.0).to(tl.float32)
        tl.store(sum_q + to, query.to(dq.dtype.element_ty), mask=written)
        alpha = tl.exp(tl.load(g + to, mask=written, other=0.0))
        passed = tl.load(reversed_dk + source, mask=real, other=0.0).to(tl.float32) * alpha
        key = tl.load(dk + to, mask=written, other=0.0).to(tl.float32) + passed
        tl.store(sum_k + to, key.to(dk.dtype.element_ty), mask=written)
        decay = tl.load(dg + to, mask=written, other=0.0) + tl.load(reversed_dg + source, mask=real, other=0.0)
        decay += passed * tl.load(k + to, mask=written, other=0.0).to(tl.float32)
        tl.store(sum_g + to, decay, mask=written)
    for first in tl.range(0, VALUES, CHANNELS):
        c = first + tl.arange(0, CHANNELS)
        known = (c < VALUES)[None, :]
        to, written = (sequence + i)[:, None] * VALUES + c[None, :], inside[:, None] & known
        source, real = following[:, None] * VALUES + c[None, :], follows[:, None] & known
        value = tl.load(dv + to, mask=written, other=0.0).to(tl.float32)
        value += tl.load(reversed_dv + source, mask=real, other=0.0).to(tl.float32)
        tl.store(sum_v + to, value.to(dv.dtype.element_ty), mask=written)
