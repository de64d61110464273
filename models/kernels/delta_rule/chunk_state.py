"""Kernels of the delta rule from chunk to chunk: states and updates, and their gradients in reverse.

With S the state before a chunk, dS' the gradient of the state after it, and the notation of `wy.py`:
    N = u - w S                        S' = e^B S + k_end^T N
    dN = P^T do + k_end dS'            dS = e^B dS' + q_start^T do - w^T dN
"""

from __future__ import annotations

from ..gla.tiles import chunk_of, load, place, state_at, store
from ..launch import tl, triton


@triton.jit
def states_forward_kernel(
    w, u, k_end, b, edge, table, states, updates, leave, T, H: tl.constexpr, N,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr, EDGE: tl.constexpr,
    LEAVE: tl.constexpr, PER_CHANNEL: tl.constexpr, PACKED: tl.constexpr, EVEN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Write the state before every chunk and the updates N. edge: initial states; leave: final ones."""
    rounded: tl.constexpr = states.dtype.element_ty
    ck, cv, row = tl.arange(0, BK), tl.program_id(0) * BV + tl.arange(0, BV), tl.arange(0, C)
    bh = tl.program_id(1)
    inside = (ck < K)[:, None] & (cv < V)[None, :]
    w, k_end, b = place(w, bh, T, H, K), place(k_end, bh, T, H, K), place(b, bh, T, H, K if PER_CHANNEL else 1)
    u, updates = place(u, bh, T, H, V), place(updates, bh, T, H, V)
    state = tl.zeros([BK, BV], tl.float32)
    if EDGE and not PACKED:
        state = tl.load(state_at(edge, bh, ck, cv, V, K), mask=inside, other=0.0)
    for n in range(0, _chunks(table, N, PACKED)):
        start, end = chunk_of(table, n, T, C, PACKED)
        if PACKED:
            at, flags = tl.load(table + n * 4 + 2) * H + bh % H, tl.load(table + n * 4 + 3)
            state = tl.where((flags & 1) != 0, 0.0, state)
            if EDGE:
                state += tl.load(state_at(edge, at, ck, cv, V, K), mask=inside & ((flags & 1) != 0), other=0.0)
        before = state.to(rounded)
        tl.store(state_at(states, bh * N + n, ck, cv, V, K), before, mask=inside)
        t = start + row
        reading = load(w, t, ck, end, H, K, BK, EVEN)
        update = load(u, t, cv, end, H, V, BV, EVEN) - tl.dot(reading, before, input_precision=PRECISION)
        update = update.to(rounded)
        store(updates, update, t, cv, end, H, V, BV, EVEN)
        key = load(k_end, t, ck, end, H, K, BK, EVEN, True)
        state = tl.dot(key, update, state * _total(b, end, ck, H, K, PER_CHANNEL), input_precision=PRECISION)
        if PACKED and LEAVE:
            tl.store(state_at(leave, at, ck, cv, V, K), state, mask=inside & ((flags & 2) != 0))
    if LEAVE and not PACKED:
        tl.store(state_at(leave, bh, ck, cv, V, K), state, mask=inside)


@triton.jit
def states_backward_kernel(
    do, scores, q_start, k_end, w, b, edge, table, d_states, d_updates, leave, T, H: tl.constexpr, N,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr, EDGE: tl.constexpr,
    LEAVE: tl.constexpr, PER_CHANNEL: tl.constexpr, PACKED: tl.constexpr, EVEN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Write dS' of every chunk and dN. edge: gradients of the final states; leave: of the initial ones."""
    rounded: tl.constexpr = d_states.dtype.element_ty
    ck, cv, row = tl.arange(0, BK), tl.program_id(0) * BV + tl.arange(0, BV), tl.arange(0, C)
    bh = tl.program_id(1)
    inside = (ck < K)[:, None] & (cv < V)[None, :]
    w, k_end, q_start = place(w, bh, T, H, K), place(k_end, bh, T, H, K), place(q_start, bh, T, H, K)
    b = place(b, bh, T, H, K if PER_CHANNEL else 1)
    do, d_updates = place(do, bh, T, H, V), place(d_updates, bh, T, H, V)
    state = tl.zeros([BK, BV], tl.float32)
    if EDGE and not PACKED:
        state = tl.load(state_at(edge, bh, ck, cv, V, K), mask=inside, other=0.0)
    chunks = _chunks(table, N, PACKED)
    for step in range(0, chunks):
        n = chunks - 1 - step
        start, end = chunk_of(table, n, T, C, PACKED)
        if PACKED:
            at, flags = tl.load(table + n * 4 + 2) * H + bh % H, tl.load(table + n * 4 + 3)
            state = tl.where((flags & 2) != 0, 0.0, state)
            if EDGE:
                state += tl.load(state_at(edge, at, ck, cv, V, K), mask=inside & ((flags & 2) != 0), other=0.0)
        after = state.to(rounded)
        tl.store(state_at(d_states, bh * N + n, ck, cv, V, K), after, mask=inside)
        t = start + row
        grad = load(do, t, cv, end, H, V, BV, EVEN)
        # P^T, read transposed: a transposed accumulator is compiled wrongly on Hopper by Triton 3.4 to 3.7.0.
        p = tl.load(scores + (bh.to(tl.int64) * N + n) * (C * C) + row[None, :] * C + row[:, None])
        update = tl.dot(p, grad.to(rounded), input_precision=PRECISION)
        update = tl.dot(load(k_end, t, ck, end, H, K, BK, EVEN), after, update, input_precision=PRECISION).to(rounded)
        store(d_updates, update, t, cv, end, H, V, BV, EVEN)
        state *= _total(b, end, ck, H, K, PER_CHANNEL)
        query = load(q_start, t, ck, end, H, K, BK, EVEN, True)
        state = tl.dot(query, grad.to(rounded), state, input_precision=PRECISION)
        reading = -load(w, t, ck, end, H, K, BK, EVEN, True)
        state = tl.dot(reading, update, state, input_precision=PRECISION)
        if PACKED and LEAVE:
            tl.store(state_at(leave, at, ck, cv, V, K), state, mask=inside & ((flags & 1) != 0))
    if LEAVE and not PACKED:
        tl.store(state_at(leave, bh, ck, cv, V, K), state, mask=inside)


@triton.jit
def _chunks(table, N, PACKED: tl.constexpr):
    if PACKED:
        return tl.load(table + N * 4)
    else:
        return N


@triton.jit
def _total(b, end, ck, H: tl.constexpr, K: tl.constexpr, PER_CHANNEL: tl.constexpr):
    """Return e^B of a chunk, [BK, 1]."""
    if PER_CHANNEL:
        return tl.exp2(tl.load(b + (end - 1) * (H * K) + ck, mask=ck < K, other=0.0))[:, None]
    else:
        return tl.exp2(tl.load(b + (end - 1) * H + ck * 0))[:, None]
