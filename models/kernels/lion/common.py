"""Functions that LION's tile and chunk kernels share: loads and stores of tiles, log decays, row statistics."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...precision import NORMALIZER_EPS
from ..launch import Launch, tl, triton

# Source of the decay: none; the log decay; log decay = logsigmoid(logits), or logsigmoid(logits + bias of the head); or
# logsigmoid(bias) for every token.
NO_DECAY, LOG_DECAY, LOGITS, BIASED_LOGITS, BIAS = 0, 1, 2, 3, 4


@dataclass(frozen=True, eq=False, slots=True)
class LionCase:
    """Hold everything that decides how the kernels are compiled and launched. `lion._case` caches it: equal is identical."""

    device: int
    batch: int
    length: int
    heads: int
    dim_k: int
    dim_v: int
    dtype: torch.dtype
    decay_dtype: torch.dtype | None
    mode: int
    normalized: bool
    packed: bool
    bias_dtype: torch.dtype | None = None

    def sizes(self) -> tuple[int, int, float]:
        return self.length, self.heads, NORMALIZER_EPS

    def flags(self) -> tuple[int, bool, bool, str]:
        """Return mode, normalized, packed, and the precision of float32 matmuls.

        It is float32: the gradient of the decay is a running sum of differences that nearly cancel, too imprecise with three TF32
        matmuls.
        """
        return self.mode, self.normalized, self.packed, "ieee" if self.dtype == torch.float32 else "tf32"


class LionInputs(NamedTuple):
    """Hold the inputs of a kernel, contiguous.

    q, k: [batch, length, heads, head_dim_k]; v: [..., head_dim_v]. decay: [batch, length, heads], log decays or their logits as
    `LionCase.mode` says, or None; bias: [heads] or None. segments: int32 [length], rising segment numbers (batch 1), or None.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    decay: Tensor | None
    bias: Tensor | None
    segments: Tensor | None


class Kernel(NamedTuple):
    """Hold one of the two kernels of `lion`: tokens after which its running sums restart, forward and backward pass."""

    chunk: Callable[[LionCase], int | None]
    forward: Callable[..., Any]
    backward: Callable[..., Any]


@triton.jit
def base(x, bh, T, H, D):
    """Return the address of token 0 of batch element and head `bh` in x: [batch, T, H, D]."""
    b = (bh // H).to(tl.int64)
    return x + (b * T * H + bh % H) * D


@triton.jit
def load_rows(x, t, d, T, H, D: tl.constexpr, BD: tl.constexpr, EVEN: tl.constexpr = False):
    """Load a tile [tokens, channels] at tokens t and channels d; 0 outside. x: a `base`. EVEN: the tile is inside."""
    if EVEN:
        return tl.load(x + t[:, None] * (H * D) + d[None, :])
    mask = (t < T)[:, None]
    if D % BD != 0:
        mask = mask & (d < D)[None, :]
    return tl.load(x + t[:, None] * (H * D) + d[None, :], mask=mask, other=0.0)


@triton.jit
def load_columns(x, t, d, T, H, D: tl.constexpr, BD: tl.constexpr):
    """Load the same tile transposed, [channels, tokens]."""
    mask = (t < T)[None, :]
    if D % BD != 0:
        mask = mask & (d < D)[:, None]
    return tl.load(x + t[None, :] * (H * D) + d[:, None], mask=mask, other=0.0)


@triton.jit
def store_rows(x, value, t, d, T, H, D: tl.constexpr, BD: tl.constexpr, EVEN: tl.constexpr = False):
    value = value.to(x.dtype.element_ty)
    if EVEN:
        tl.store(x + t[:, None] * (H * D) + d[None, :], value)
    else:
        mask = (t < T)[:, None]
        if D % BD != 0:
            mask = mask & (d < D)[None, :]
        tl.store(x + t[:, None] * (H * D) + d[None, :], value, mask=mask)


@triton.jit
def store_columns(x, value, t, d, T, H, D: tl.constexpr, BD: tl.constexpr, EVEN: tl.constexpr = False):
    value = value.to(x.dtype.element_ty)
    if EVEN:
        tl.store(x + t[None, :] * (H * D) + d[:, None], value)
    else:
        mask = (t < T)[None, :]
        if D % BD != 0:
            mask = mask & (d < D)[:, None]
        tl.store(x + t[None, :] * (H * D) + d[:, None], value, mask=mask)


@triton.jit
def _load_decay(decay, bias, bh, t, T, H, DECAY: tl.constexpr):
    if DECAY == 4:
        x = tl.where(t < T, tl.load(bias + bh % H).to(tl.float32), 0.0)
    else:
        x = tl.load(base(decay, bh, T, H, 1) + t * H, mask=t < T, other=0.0).to(tl.float32)
    if DECAY == 3:
        x += tl.load(bias + bh % H).to(tl.float32)
    return x


@triton.jit
def log_decay(x, DECAY: tl.constexpr):
    """Return the log decay to base 2 in float32 of log decays or logits x."""
    if DECAY >= 2:
        x = tl.minimum(x, 0.0) - tl.log(1.0 + tl.exp(-tl.abs(x)))
    return tl.maximum(x, -100.0, propagate_nan=tl.PropagateNan.ALL) * 1.4426950408889634


@triton.jit
def load_log_decay(decay, bias, bh, t, T, H, DECAY: tl.constexpr):
    """Return `log_decay` of tokens t; 0 outside."""
    return tl.where(t < T, log_decay(_load_decay(decay, bias, bh, t, T, H, DECAY), DECAY), 0.0)


@triton.jit
def store_decay_gradient(d_decay, decay, bias, bh, d_log_decay, t, T, H, DECAY: tl.constexpr, part=0, parts=1):
    """Store the gradient of the log decay or its logits at tokens t; for a bias alone, their sum as one part."""
    if DECAY >= 2:
        d_log_decay = d_log_decay * tl.sigmoid(-_load_decay(decay, bias, bh, t, T, H, DECAY))
    if DECAY == 4:
        total = tl.sum(tl.where(t < T, d_log_decay, 0.0), 0)
        tl.store(d_decay + ((bh // H) * parts + part) * H + bh % H, total)
    else:
        tl.store(base(d_decay, bh, T, H, 1) + t * H, d_log_decay.to(d_decay.dtype.element_ty), mask=t < T)


@triton.jit
def row_scale(den, bh, t, T, eps):
    """Return 1 / (row sum + eps) per row, 0 for padding."""
    total = tl.load(den + bh.to(tl.int64) * T + t, mask=t < T, other=0.0)
    return tl.where(total != 0.0, 1.0 / (total + eps), 0.0)


@triton.jit
def load_scale(den, delta, bh, t, T, eps, NORMALIZED: tl.constexpr):
    """Return `row_scale` and dy . y per row."""
    if NORMALIZED:
        scale = row_scale(den, bh, t, T, eps)
        inner = tl.load(delta + bh.to(tl.int64) * T + t, mask=t < T, other=0.0)
    else:
        scale = tl.where(t < T, 1.0, 0.0)
        inner = scale * 0.0
    return scale, inner


@triton.jit
def load_sums(c, t, T, DECAY: tl.constexpr):
    """Return running sums at tokens t; 0 outside and without a decay. c: the address of this head's first sum."""
    if DECAY != 0:
        return tl.load(c + t, mask=t < T, other=0.0)
    return tl.where(t < T, 0.0, 0.0)


@triton.jit
def decay_factor(c_a, c_b, segments, a, b, T, DECAY: tl.constexpr, SEGMENTS: tl.constexpr):
    """Return M at [a, b]: 2^-|c_a - c_b|, 0 between segments. Undefined beyond T, where q, k and v are 0."""
    if DECAY != 0:
        factor = tl.exp2(-tl.abs(c_a[:, None] - c_b[None, :]))
    else:
        factor = tl.full([a.shape[0], b.shape[0]], 1.0, tl.float32)
    if SEGMENTS:
        factor = inside_segments(factor, segments, a, b, T)
    return factor


@triton.jit
def inside_segments(factor, segments, a, b, T):
    """Return factor if tokens a and b are in one segment, else 0."""
    s_a = tl.load(segments + a, mask=a < T, other=-1)
    s_b = tl.load(segments + b, mask=b < T, other=-2)
    return tl.where(s_a[:, None] == s_b[None, :], factor, 0.0)


@triton.jit
def signed(w, a, b):
    """Return sign(a - b) w for w at [a, b]."""
    return tl.where(a[:, None] > b[None, :], w, tl.where(a[:, None] < b[None, :], -w, 0.0))


@triton.jit
def _lion_row_inner(dy, y, delta, T, H, V: tl.constexpr, BV: tl.constexpr, BT: tl.constexpr):
    bh = tl.program_id(1)
    t = tl.program_id(0) * BT + tl.arange(0, BT)
    d = tl.arange(0, BV)
    a = load_rows(base(dy, bh, T, H, V), t, d, T, H, V, BV).to(tl.float32)
    b = load_rows(base(y, bh, T, H, V), t, d, T, H, V, BV).to(tl.float32)
    tl.store(delta + bh.to(tl.int64) * T + t, tl.sum(a * b, 1), mask=t < T)


@triton.jit(do_not_specialize=["T"])
def _lion_running_sum(c, decay, bias, T, H, DECAY: tl.constexpr, RESTART: tl.constexpr, BT: tl.constexpr):
    bh = tl.program_id(1)
    total = 0.0
    first = tl.program_id(0) * BT
    for start in range(first, first + BT if RESTART else T, BT):
        t = start + tl.arange(0, BT)
        g = load_log_decay(decay, bias, bh, t, T, H, DECAY)
        tl.store(c + bh.to(tl.int64) * T + t, total + tl.cumsum(g, 0), mask=t < T)
        total += tl.sum(g, 0)


@lru_cache(4096)
def row_inner(case: LionCase) -> Launch:
    """Return the launch (dy, y, delta): delta = dy . y per row.

    dy, y: [batch, length, heads, dim_v]; delta: float32 [batch, heads, length].
    """
    grid = -(-case.length // 64), case.batch * case.heads
    return Launch(_lion_row_inner, grid, case.length, case.heads, case.dim_v, block(case.dim_v), 64, num_warps=4)


@lru_cache(4096)
def running_sum(case: LionCase, chunk: int | None = None) -> Launch:
    """Return the launch (c, decay, bias): c receives running sums of the log decay to base 2, float32 [batch, heads, length].

    chunk: a power of two; the sums restart after every `chunk` tokens.
    """
    size = chunk or 256
    grid = -(-case.length // size) if chunk else 1, case.batch * case.heads
    return Launch(_lion_running_sum, grid, case.length, case.heads, case.mode, chunk is not None, size, num_warps=1)


def per_token(case: LionCase, like: Tensor) -> Tensor:
    """Return an uninitialised float32 [batch, heads, length] on the device of `like`."""
    return like.new_empty((case.batch, case.heads, case.length), dtype=torch.float32)


def empty_decay_gradient(case: LionCase, x: LionInputs, parts: int = 1) -> Tensor | None:
    """Return the uninitialised tensor that `store_decay_gradient` fills, with `parts` parts per sequence."""
    if case.mode == BIAS:
        return x.q.new_empty((case.batch * parts, case.heads), dtype=torch.float32)
    return None if x.decay is None else torch.empty_like(x.decay)


@lru_cache
def block(dim: int, largest: int = 256) -> int:
    """Return the channels per tile: a power of two that tensor cores support."""
    return min(max(16, 1 << (dim - 1).bit_length()), largest)
