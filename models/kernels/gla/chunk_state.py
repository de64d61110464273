"""GLA states before every chunk, from k and v, and gradients of the states after every chunk, from q and do.

    S_(n+1) = e^B S_n + sum_j e^(B - b_j) k_j v_j^T        dS_n = e^B dS_(n+1) + sum_i scale e^(b_i) q_i do_i^T
With few long sequences, each is divided into splits that are scanned in parallel from a zero state. A second kernel adds the
incoming state of each split to its states.
"""

from __future__ import annotations

from ..launch import tl, triton
from .tiles import chunk_of, clamp_to_base_2, load, load_triangle, place, split_float32, state_at


@triton.jit
def chunk_states_kernel(
    x, y, g, edge, table, triangle, states, leave, ends, decays, between, T, H: tl.constexpr, scale, N, S,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr, BACKWARD: tl.constexpr,
    CUT: tl.constexpr, EDGE: tl.constexpr, LEAVE: tl.constexpr, PACKED: tl.constexpr, EVEN: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Scan one split. If sequences are CUT, every split starts from a zero state."""
    exact: tl.constexpr = x.dtype.element_ty == tl.float32
    rounded: tl.constexpr = tl.float32 if exact else tl.bfloat16
    bk, split, bh = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    ck, cv, row = bk * BK + tl.arange(0, BK), tl.arange(0, BV), tl.arange(0, C)
    inside = (ck < K)[:, None] & (cv < V)[None, :]
    x, y, g = place(x, bh, T, H, K), place(y, bh, T, H, V), place(g, bh, T, H, K)
    begin, count = _split_bounds(table, split, N, S, PACKED)
    state = tl.zeros([BK, BV], tl.float32)
    if EDGE and not PACKED:
        first = split == (S - 1 if BACKWARD else 0)
        state = tl.load(state_at(edge, bh, ck, cv, V, K), mask=inside & first, other=0.0)
    through = tl.zeros([BK], tl.float32)
    # Backward: sums over the tokens up to each. Forward: over the tokens after each.
    triangle_tile = load_triangle(triangle, C, not BACKWARD)
    if BACKWARD:
        triangle_tile = tl.trans(triangle_tile)
    for step in range(0, count):
        n = begin + (count - 1 - step if BACKWARD else step)
        start, end = chunk_of(table, n, T, C, PACKED)
        if PACKED:
            # The initial state enters at a sequence's first chunk, and the final state leaves at its last; backward reversed.
            sequence, flags = tl.load(table + n * 4 + 2), tl.load(table + n * 4 + 3)
            enters, leaves = flags & 1, flags & 2
            if BACKWARD:
                enters, leaves = flags & 2, flags & 1
            at = sequence * H + bh % H
            state = tl.where(enters != 0, 0.0, state)
            through = tl.where(enters != 0, -float("inf"), through)
            if EDGE:
                state += tl.load(state_at(edge, at, ck, cv, V, K), mask=inside & (enters != 0), other=0.0)
        address = state_at(states, bh * N + n, ck, cv, V, K)
        if EVEN:
            tl.store(address, state.to(states.dtype.element_ty))
        else:
            tl.store(address, state.to(states.dtype.element_ty), mask=inside)
        t = start + row
        decay = clamp_to_base_2(load(g, t, ck, end, H, K, EVEN, True))
        total = tl.sum(decay, 1)
        if exact:
            exponent = tl.cumsum(decay, 1) if BACKWARD else tl.cumsum(decay, 1, reverse=True) - decay
        else:
            high, low = split_float32(decay)
            exponent = tl.dot(low, triangle_tile, tl.dot(high, triangle_tile))
        weight = tl.exp2(exponent) * scale
        weighted = (load(x, t, ck, end, H, K, EVEN, True).to(tl.float32) * weight).to(rounded)
        value = load(y, t, cv, end, H, V, EVEN).to(rounded)
        state = tl.dot(weighted, value, state * tl.exp2(total)[:, None], input_precision=PRECISION)
        if CUT:
            place_of = between + (bh * N + n) * ((1 + PACKED) * K) + ck
            tl.store(place_of, through, mask=ck < K)
            if PACKED:
                tl.store(place_of + K, through + total, mask=ck < K)
            through += total
        if PACKED and LEAVE:
            tl.store(state_at(leave, at, ck, cv, V, K), state, mask=inside & (leaves != 0))
    if LEAVE and not PACKED:
        at_end = (begin == 0 if BACKWARD else begin + count == N) & (count > 0)
        tl.store(state_at(leave, bh, ck, cv, V, K), state, mask=inside & at_end)
    if CUT:
        tl.store(state_at(ends, bh * S + split, ck, cv, V, K), state, mask=inside)
        tl.store(decays + (bh * S + split) * K + ck, through, mask=ck < K)


@triton.jit
def _split_bounds(table, split, N, S, PACKED: tl.constexpr):
    """Return the first chunk of a split and its number of chunks."""
    chunks = N
    if PACKED:
        chunks = tl.load(table + N * 4)
    size = (chunks + S - 1) // S
    begin = split * size
    return begin, tl.maximum(tl.minimum(size, chunks - begin), 0)


@triton.jit
def merge_splits_kernel(
    ends, decays, between, table, states, leave, H: tl.constexpr, N, S,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, GROUP: tl.constexpr, BACKWARD: tl.constexpr,
    LEAVE: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """Add the incoming state of a split to the states of some of its chunks."""
    bk, bh = tl.program_id(0), tl.program_id(2)
    split, group = tl.program_id(1) % S, tl.program_id(1) // S
    ck, cv = bk * BK + tl.arange(0, BK), tl.arange(0, BV)
    inside = (ck < K)[:, None] & (cv < V)[None, :]
    begin, count = _split_bounds(table, split, N, S, PACKED)
    preceding = S - 1 - split if BACKWARD else split
    last = tl.minimum(group * GROUP + GROUP, count)
    if (preceding > 0) & (group * GROUP < last):
        state = tl.zeros([BK, BV], tl.float32)
        for step in range(0, preceding):
            at = bh * S + (S - 1 - step if BACKWARD else step)
            decay = tl.load(decays + at * K + ck, mask=ck < K, other=0.0)
            state *= tl.exp2(decay)[:, None]
            state += tl.load(state_at(ends, at, ck, cv, V, K), mask=inside, other=0.0)
        next_state = tl.load(state_at(states, bh * N + begin + group * GROUP, ck, cv, V, K), mask=inside, other=0.0)
        for step in range(group * GROUP, last):
            n = begin + step
            local = next_state.to(tl.float32)
            # Prefetch for the next iteration.
            prefetched = inside & (step + 1 < last)
            next_state = tl.load(state_at(states, bh * N + n + 1, ck, cv, V, K), mask=prefetched, other=0.0)
            place_of = between + (bh * N + n) * ((1 + PACKED) * K) + ck
            decay = tl.load(place_of, mask=ck < K, other=-float("inf"))
            # A packed sequence that begins in this split has no incoming state.
            if tl.max(decay, 0) != -float("inf"):
                address = state_at(states, bh * N + n, ck, cv, V, K)
                tl.store(address, (local + state * tl.exp2(decay)[:, None]).to(states.dtype.element_ty), mask=inside)
                if LEAVE:
                    of, leaves = bh, n == (0 if BACKWARD else N - 1)
                    behind = decays + (bh * S + split) * K + ck
                    if PACKED:
                        behind = place_of + K
                        of = tl.load(table + n * 4 + 2) * H + bh % H
                        leaves = (tl.load(table + n * 4 + 3) & (1 if BACKWARD else 2)) != 0
                    decay = tl.load(behind, mask=ck < K, other=0.0)
                    final = state_at(leave, of, ck, cv, V, K)
                    reaching = inside & leaves
                    own_final = tl.load(final, mask=reaching, other=0.0)
                    tl.store(final, own_final + state * tl.exp2(decay)[:, None], mask=reaching)
