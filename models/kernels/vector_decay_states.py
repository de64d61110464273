"""States of the recurrence before chunks, from the left (k, v), and gradients of those after them, from the right (q, do).

    S_(n+1) = e^B S_n + sum_j e^(B - b_j) k_j v_j^T        dS_n = e^B dS_(n+1) + sum_i scale e^(b_i) q_i do_i^T
Few long sequences are cut into stretches: each is scanned from nothing for its end, and again from what the ends of those
before it bring to it.
"""

# Kernels take pointers and scalars that have no Python type.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from .launch import Launch
from .vector_decay_common import CHUNK, Case, chunk_of, clamped, in_two, load, load_triangle, place, state_at, triangle

try:
    import triton
    import triton.language as tl
except ImportError as error:
    raise ImportError("the recurrence's kernels need Triton: pip install triton") from error


# End states and log decays of every stretch, float32 [batch * heads, stretches, dk, dv] and [..., dk]; None for one.
Ends = tuple[Tensor, Tensor] | None


def scan(
    case: Case, backward: bool, x: Tensor, y: Tensor, g: Tensor, edge: Tensor | None, table: Tensor | None,
    leave: Tensor | None, ends: Ends = None,
) -> tuple[Tensor, Ends]:  # fmt: skip
    """The state before (backward: its gradient after) every chunk, `case.kept` [batch * heads, chunks, dk, dv]; and the
    ends of the stretches, which are not formed again where they are given.

    x, y: k and v, or q and do for `backward`; edge: float32 [sequences, heads, head_dim_k, head_dim_v], the initial
    states or the gradients of the final ones, zero if None; leave: of the same shape, where the states at the other end
    are written for all sequences that have a token, or None.
    """
    stretches, ones = stretches_of(case), triangle(x.device)
    states = x.new_empty(case.rows, case.chunks, case.dim_k, case.dim_v, dtype=case.kept)
    if stretches > 1 and ends is None:
        ends = (
            x.new_empty(case.rows, stretches, case.dim_k, case.dim_v, dtype=torch.float32),
            x.new_empty(case.rows, stretches, case.dim_k, dtype=torch.float32),
        )
        _scan(case, backward, True, edge is not None, False)(x, y, g, edge, table, ones, *ends, None, None)
    _scan(case, backward, False, edge is not None, leave is not None)(
        x, y, g, edge, table, ones, *(ends or (None, None)), states, leave
    )
    return states, ends


@lru_cache(4096)
def stretches_of(case: Case) -> int:
    """Reading everything twice pays from four stretches on; 256 programs were the fastest on an H200."""
    block_k, block_v, _, _ = scan_config(case)
    blocks = -(-case.dim_k // block_k) * -(-case.dim_v // block_v)
    stretches = min(256 // (case.rows * blocks), case.chunks // 8)
    return stretches if stretches >= 4 else 1


def scan_config(case: Case) -> tuple[int, int, int, int]:
    """Block of keys, block of values, warps, pipeline stages."""
    return min(case.block_k, 64), min(case.block_v, 64), 4, 3 if case.dtype != torch.float32 else 1


@lru_cache(4096)
def _scan(case: Case, backward: bool, to_end: bool, edge: bool, leave: bool) -> Launch:
    """to_end: the scan of every stretch for its end alone."""
    stretches = stretches_of(case)
    block_k, block_v, warps, stages = scan_config(case)
    blocks = -(-case.dim_k // block_k) * -(-case.dim_v // block_v)
    return Launch(
        _states, (blocks, stretches, case.rows),
        case.length, case.heads, case.chunks, stretches, case.scale if backward else 1.0, case.dim_k, case.dim_v,
        block_k, block_v, CHUNK, backward, to_end, stretches > 1 and not to_end, edge, leave, *case.flags,
        num_warps=warps, num_stages=stages,
    )  # fmt: skip


@triton.jit
def _states(
    x, y, g, edge, table, triangle, ends, decays, states, leave, T, H: tl.constexpr, N, S, scale,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr, BACKWARD: tl.constexpr,
    TO_END: tl.constexpr, CUT: tl.constexpr, EDGE: tl.constexpr, LEAVE: tl.constexpr, PACKED: tl.constexpr,
    EVEN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One stretch: its end alone, from nothing (TO_END), or its states, where a sequence is CUT from what `ends` give."""
    blocks_v: tl.constexpr = (V + BV - 1) // BV
    exact: tl.constexpr = x.dtype.element_ty == tl.float32
    rounded: tl.constexpr = tl.float32 if exact else tl.bfloat16
    bk, bv = tl.program_id(0) // blocks_v, tl.program_id(0) % blocks_v
    stretch, bh = tl.program_id(1), tl.program_id(2)
    ck, cv, row = bk * BK + tl.arange(0, BK), bv * BV + tl.arange(0, BV), tl.arange(0, C)
    inside = (ck < K)[:, None] & (cv < V)[None, :]
    x, y, g = place(x, bh, T, H, K), place(y, bh, T, H, V), place(g, bh, T, H, K)
    chunks = N
    if PACKED:
        chunks = tl.load(table + N * 4)
    size = (chunks + S - 1) // S
    begin = stretch * size
    count = tl.maximum(tl.minimum(size, chunks - begin), 0)
    state = tl.zeros([BK, BV], tl.float32)
    if EDGE and not PACKED and not TO_END:
        state = tl.load(state_at(edge, bh, ck, cv, V, K), mask=inside, other=0.0)
    if CUT:
        # What comes to this stretch, from those before it.
        for step in range(0, S - 1 - stretch if BACKWARD else stretch):
            at = bh * S + (S - 1 - step if BACKWARD else step)
            decay = tl.load(decays + at * K + ck, mask=ck < K, other=0.0)
            state *= tl.exp2(decay)[:, None]
            state += tl.load(state_at(ends, at, ck, cv, V, K), mask=inside, other=0.0)
    through = tl.zeros([BK], tl.float32)
    # Sums over the tokens up to one, or forward over those after it.
    reached = load_triangle(triangle, C, not BACKWARD)
    if BACKWARD:
        reached = tl.trans(reached)
    for step in range(0, count):
        n = begin + (count - 1 - step if BACKWARD else step)
        start, end = chunk_of(table, n, T, C, PACKED)
        if PACKED:
            # A sequence's states come in at its first chunk and go out at its last; backward it is the other way.
            sequence, flags = tl.load(table + n * 4 + 2), tl.load(table + n * 4 + 3)
            comes, goes = flags & 1, flags & 2
            if BACKWARD:
                comes, goes = flags & 2, flags & 1
            at = sequence * H + bh % H
            state = tl.where(comes != 0, 0.0, state)
            through = tl.where(comes != 0, -float("inf"), through)
            if EDGE:
                state += tl.load(state_at(edge, at, ck, cv, V, K), mask=inside & (comes != 0), other=0.0)
        if not TO_END:
            here = state_at(states, bh * N + n, ck, cv, V, K)
            if EVEN:
                tl.store(here, state.to(states.dtype.element_ty))
            else:
                tl.store(here, state.to(states.dtype.element_ty), mask=inside)
        t = start + row
        decay = clamped(load(g, t, ck, end, H, K, BK, EVEN, True))
        total = tl.sum(decay, 1)
        if exact:
            exponent = tl.cumsum(decay, 1) if BACKWARD else tl.cumsum(decay, 1, reverse=True) - decay
        else:
            high, low = in_two(decay)
            exponent = tl.dot(low, reached, tl.dot(high, reached))
        weight = tl.exp2(exponent) * scale
        weighted = (load(x, t, ck, end, H, K, BK, EVEN, True).to(tl.float32) * weight).to(rounded)
        value = load(y, t, cv, end, H, V, BV, EVEN).to(rounded)
        state = tl.dot(weighted, value, state * tl.exp2(total)[:, None], input_precision=PRECISION)
        through += total
        if PACKED and LEAVE:
            tl.store(state_at(leave, at, ck, cv, V, K), state, mask=inside & (goes != 0))
    if LEAVE and not PACKED:
        at_end = (begin == 0 if BACKWARD else begin + count == N) & (count > 0)
        tl.store(state_at(leave, bh, ck, cv, V, K), state, mask=inside & at_end)
    if TO_END:
        tl.store(state_at(ends, bh * S + stretch, ck, cv, V, K), state, mask=inside)
        if bv == 0:
            tl.store(decays + (bh * S + stretch) * K + ck, through, mask=ck < K)
