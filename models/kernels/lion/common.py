"""What LION's tile and chunk kernels share: tiles in memory, log decays, and the sums of the backward pass."""

# Kernels take pointers and scalars that have no Python type.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...precision import NORMALIZER_EPS
from ..launch import Launch

try:
    import triton
    import triton.language as tl
except ImportError as error:
    raise ImportError("LION's kernels need Triton (pip install triton); form='chunked' works without") from error

# Where the decay comes from: there is none, its logarithm is given, or log decay = logsigmoid(gate [+ bias of the head]),
# or that of the bias alone, every token's.
NO_GATE, LOG_DECAY, LOGITS, BIASED_LOGITS, BIAS = 0, 1, 2, 3, 4


@dataclass(frozen=True, eq=False, slots=True)
class Case:
    """All that decides how the kernels are compiled and launched. One object a case, so that it is found by identity."""

    device: int
    batch: int
    length: int
    heads: int
    dim_k: int
    dim_v: int
    dtype: torch.dtype
    gate_dtype: torch.dtype | None
    mode: int
    scaled: bool
    packed: bool

    def sizes(self) -> tuple[int, int, float]:
        return self.length, self.heads, NORMALIZER_EPS

    def flags(self) -> tuple[int, bool, bool, str]:
        """mode, scaled, packed, and how products of float32 are formed: in float32, since a gate's gradient is a running sum
        of differences that nearly cancel and three TF32 products show there."""
        return self.mode, self.scaled, self.packed, "ieee" if self.dtype == torch.float32 else "tf32"


class Kernel(NamedTuple):
    """What `lion` asks of one of its two kernels: tokens of its running sums, the forward and the backward pass."""

    chunk: Callable[[Case], int | None]
    forward: Callable[..., Any]
    backward: Callable[..., Any]


@triton.jit
def base(x, bh, T, H, D):
    """Address of token 0 of batch element and head `bh` in x: [batch, T, H, D]."""
    b = (bh // H).to(tl.int64)
    return x + (b * T * H + bh % H) * D


@triton.jit
def load_rows(x, t, d, T, H, D: tl.constexpr, BD: tl.constexpr, EVEN: tl.constexpr = False):
    """A tile [tokens, dims] at tokens t and channels d; x is a `base`; 0 outside. EVEN: all of it lies inside."""
    if EVEN:
        return tl.load(x + t[:, None] * (H * D) + d[None, :])
    mask = (t < T)[:, None]
    if D % BD != 0:
        mask = mask & (d < D)[None, :]
    return tl.load(x + t[:, None] * (H * D) + d[None, :], mask=mask, other=0.0)


@triton.jit
def load_columns(x, t, d, T, H, D: tl.constexpr, BD: tl.constexpr):
    """The same tile transposed, [dims, tokens]."""
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
def _load_gate(gate, bias, bh, t, T, H, GATE: tl.constexpr):
    if GATE == 4:
        x = tl.where(t < T, tl.load(bias + bh % H).to(tl.float32), 0.0)
    else:
        x = tl.load(base(gate, bh, T, H, 1) + t * H, mask=t < T, other=0.0).to(tl.float32)
    if GATE == 3:
        x += tl.load(bias + bh % H).to(tl.float32)
    return x


@triton.jit
def log_decay(x, GATE: tl.constexpr):
    """Log decay to base 2 of what the gate says, float32."""
    if GATE >= 2:
        x = tl.minimum(x, 0.0) - tl.log(1.0 + tl.exp(-tl.abs(x)))
    return tl.maximum(x, -100.0) * 1.4426950408889634


@triton.jit
def load_log_decay(gate, bias, bh, t, T, H, GATE: tl.constexpr):
    """`log_decay` of tokens t; 0 outside."""
    return tl.where(t < T, log_decay(_load_gate(gate, bias, bh, t, T, H, GATE), GATE), 0.0)


@triton.jit
def store_gate_gradient(dgate, gate, bias, bh, d_log_decay, t, T, H, GATE: tl.constexpr, part=0, parts=1):
    """Of tokens t; of a bias alone their sum, which is that of one part of the sequence."""
    if GATE >= 2:
        d_log_decay = d_log_decay * tl.sigmoid(-_load_gate(gate, bias, bh, t, T, H, GATE))
    if GATE == 4:
        total = tl.sum(tl.where(t < T, d_log_decay, 0.0), 0)
        tl.store(dgate + ((bh // H) * parts + part) * H + bh % H, total)
    else:
        tl.store(base(dgate, bh, T, H, 1) + t * H, d_log_decay.to(dgate.dtype.element_ty), mask=t < T)


@triton.jit
def row_scale(den, bh, t, T, eps):
    """1 / (row sum + eps) of each row, 0 for a row of padding."""
    total = tl.load(den + bh.to(tl.int64) * T + t, mask=t < T, other=0.0)
    return tl.where(total != 0.0, 1.0 / (total + eps), 0.0)


@triton.jit
def load_scale(den, delta, bh, t, T, eps, SCALED: tl.constexpr):
    """Of each row: `row_scale` and dy . y."""
    if SCALED:
        scale = row_scale(den, bh, t, T, eps)
        inner = tl.load(delta + bh.to(tl.int64) * T + t, mask=t < T, other=0.0)
    else:
        scale = tl.where(t < T, 1.0, 0.0)
        inner = scale * 0.0
    return scale, inner


@triton.jit
def load_sums(c, t, T, GATE: tl.constexpr):
    """Running sums at tokens t, c: address of this head's first; 0 outside and without a gate."""
    if GATE != 0:
        return tl.load(c + t, mask=t < T, other=0.0)
    return tl.where(t < T, 0.0, 0.0)


@triton.jit
def decay_factor(c_a, c_b, segments, a, b, T, GATE: tl.constexpr, SEGMENTS: tl.constexpr):
    """M at [a, b]: 2^-|c_a - c_b| inside a segment, 0 between segments; any number beyond T, where q, k, v are 0."""
    if GATE != 0:
        factor = tl.exp2(-tl.abs(c_a[:, None] - c_b[None, :]))
    else:
        factor = tl.full([a.shape[0], b.shape[0]], 1.0, tl.float32)
    if SEGMENTS:
        factor = inside_segments(factor, segments, a, b, T)
    return factor


@triton.jit
def inside_segments(factor, segments, a, b, T):
    """factor where tokens a and b are of one segment, 0 elsewhere."""
    s_a = tl.load(segments + a, mask=a < T, other=-1)
    s_b = tl.load(segments + b, mask=b < T, other=-2)
    return tl.where(s_a[:, None] == s_b[None, :], factor, 0.0)


@triton.jit
def signed(w, a, b):
    """sign(a - b) w for w at [a, b]."""
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
def _lion_running_sum(c, gate, bias, T, H, GATE: tl.constexpr, RESTART: tl.constexpr, BT: tl.constexpr):
    bh = tl.program_id(1)
    total = 0.0
    first = tl.program_id(0) * BT
    for start in range(first, first + BT if RESTART else T, BT):
        t = start + tl.arange(0, BT)
        g = load_log_decay(gate, bias, bh, t, T, H, GATE)
        tl.store(c + bh.to(tl.int64) * T + t, total + tl.cumsum(g, 0), mask=t < T)
        total += tl.sum(g, 0)


@lru_cache(4096)
def row_inner(case: Case) -> Launch:
    """(dy, y, delta): dy . y a row; two [batch, length, heads, dim_v] -> float32 [batch, heads, length]."""
    grid = -(-case.length // 64), case.batch * case.heads
    return Launch(_lion_row_inner, grid, case.length, case.heads, case.dim_v, block(case.dim_v), 64, num_warps=4)


@lru_cache(4096)
def running_sum(case: Case, chunk: int | None = None) -> Launch:
    """(c, gate, bias): sums of the base 2 log decay up to each token, float32 [batch, heads, length].

    With `chunk`, a power of two, they start again after every that many tokens.
    """
    size = chunk or 256
    grid = -(-case.length // size) if chunk else 1, case.batch * case.heads
    return Launch(_lion_running_sum, grid, case.length, case.heads, case.mode, chunk is not None, size, num_warps=1)


def per_token(case: Case, like: Tensor) -> Tensor:
    """An empty float32 [batch, heads, length] on the device of `like`."""
    return like.new_empty((case.batch, case.heads, case.length), dtype=torch.float32)


def empty_gate_gradient(case: Case, q: Tensor, gate: Tensor | None, parts: int = 1) -> Tensor | None:
    """What `store_gate_gradient` fills, with so many parts of every sequence."""
    if case.mode == BIAS:
        return q.new_empty((case.batch * parts, case.heads), dtype=torch.float32)
    return None if gate is None else torch.empty_like(gate)


@lru_cache
def block(dim: int, largest: int = 256) -> int:
    """Channels a tile holds: a power of two that tensor cores take."""
    return min(max(16, 1 << (dim - 1).bit_length()), largest)
