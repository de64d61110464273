"""Kernels of the delta rule from chunk to chunk: states and updates, and their gradients in reverse.

With S the state before a chunk, dS' the gradient of the state after it, and the notation of `wy.py`:
    N = u - w S                        S' = e^B S + k_end^T N
    dN = P^T do + k_end dS'            dS = e^B dS' + q_start^T do - w^T dN
One program per head and block of values goes through the chunks in order. Where these are few, the chunks are divided into
groups: the state after a group is M S + R, and the gradient before it M^T dS' + R', with M, R and R' from all groups at once
(MAPS). `compose_kernel` finds the state at the edge of every group, and the groups then run at once. Under context parallelism
the maps of the groups also give the map of the local shard.
Packed sequences: no kernel resets the state before the first chunk or the gradient after the last one. These are zero, or belong
to a sequence that continues on another rank.
"""

from __future__ import annotations

from ..gla.tiles import chunk_of, load, place, state_at, store
from ..launch import tl, triton


@triton.jit
def states_forward_kernel(
    w, u, k_end, b, edge, group_edge, matrix, table, states, updates, leave, T, H: tl.constexpr, N,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr, EDGE: tl.constexpr,
    LEAVE: tl.constexpr, GROUPS: tl.constexpr, MAPS: tl.constexpr, PER_CHANNEL: tl.constexpr, PACKED: tl.constexpr,
    EVEN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Write the state before every chunk and the updates N. edge: initial states; leave: final ones.

    group_edge: float32 [rows, GROUPS, K, V], the states before the groups. MAPS: write R there instead and M to `matrix`,
    [rows, GROUPS, K, K]; the programs after those of the values compute columns of M, from the identity and without values.
    """
    rounded: tl.constexpr = w.dtype.element_ty
    ck, cv, row = tl.arange(0, BK), tl.program_id(0) * BV + tl.arange(0, BV), tl.arange(0, C)
    bh, group = tl.program_id(1), tl.program_id(2)
    of_matrix = 0
    if MAPS:
        of_matrix = (tl.program_id(0) >= (V + BV - 1) // BV).to(tl.int32)
        cv -= of_matrix * ((V + BV - 1) // BV * BV)
    inside = (ck < K)[:, None] & (cv < V)[None, :]
    w, k_end, b = place(w, bh, T, H, K), place(k_end, bh, T, H, K), place(b, bh, T, H, K if PER_CHANNEL else 1)
    u, updates = place(u, bh, T, H, V), place(updates, bh, T, H, V)
    state = tl.zeros([BK, BV], tl.float32)
    if MAPS:
        state += ((ck[:, None] == cv[None, :]) & (of_matrix == 1)).to(tl.float32)
    elif group_edge is not None:
        state = tl.load(state_at(group_edge, bh * GROUPS + group, ck, cv, V, K), mask=inside, other=0.0)
    elif EDGE and not PACKED:
        state = tl.load(state_at(edge, bh, ck, cv, V, K), mask=inside, other=0.0)
    chunks = _chunks(table, N, PACKED)
    size = (chunks + GROUPS - 1) // GROUPS
    for n in range(group * size, tl.minimum(group * size + size, chunks)):
        start, end = chunk_of(table, n, T, C, PACKED)
        if PACKED:
            at, flags = tl.load(table + n * 4 + 2) * H + bh % H, tl.load(table + n * 4 + 3)
            state = tl.where(((flags & 1) != 0) & (n > 0), 0.0, state)
            if EDGE:
                first = ((flags & 1) != 0) & (of_matrix == 0)
                state += tl.load(state_at(edge, at, ck, cv, V, K), mask=inside & first, other=0.0)
        before = state.to(rounded)
        if not MAPS:
            tl.store(state_at(states, bh * N + n, ck, cv, V, K), before, mask=inside)
        t = start + row
        reading = load(w, t, ck, end, H, K, EVEN)
        update = -tl.dot(reading, before, input_precision=PRECISION)
        if MAPS:
            update += tl.where(of_matrix == 1, 0.0, load(u, t, cv, end, H, V, False).to(tl.float32))
        else:
            update += load(u, t, cv, end, H, V, EVEN)
        update = update.to(rounded)
        if not MAPS:
            store(updates, update, t, cv, end, H, V, EVEN)
        key = load(k_end, t, ck, end, H, K, EVEN, True)
        state = tl.dot(key, update, state * _total(b, end, ck, H, K, PER_CHANNEL), input_precision=PRECISION)
        if PACKED and LEAVE:
            tl.store(state_at(leave, at, ck, cv, V, K), state, mask=inside & ((flags & 2) != 0))
    if MAPS:
        at = bh * GROUPS + group
        square = (ck < K)[:, None] & (cv < K)[None, :]
        tl.store(state_at(group_edge, at, ck, cv, V, K), state, mask=inside & (of_matrix == 0))
        tl.store(state_at(matrix, at, ck, cv, K, K), state, mask=square & (of_matrix == 1))
    elif LEAVE and not PACKED:
        tl.store(state_at(leave, bh, ck, cv, V, K), state, mask=inside & (group == GROUPS - 1))


@triton.jit
def states_backward_kernel(
    do, scores, q_start, k_end, w, b, edge, group_edge, table, d_states, d_updates, leave, T, H: tl.constexpr, N,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr, EDGE: tl.constexpr,
    LEAVE: tl.constexpr, GROUPS: tl.constexpr, MAPS: tl.constexpr, PER_CHANNEL: tl.constexpr, PACKED: tl.constexpr,
    EVEN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Write dS' of every chunk and dN. edge: gradients of the final states; leave: of the initial ones.

    group_edge: float32 [rows, GROUPS, K, V], the gradients after the groups. MAPS: write R' there instead.
    """
    rounded: tl.constexpr = w.dtype.element_ty
    ck, cv, row = tl.arange(0, BK), tl.program_id(0) * BV + tl.arange(0, BV), tl.arange(0, C)
    bh, group = tl.program_id(1), tl.program_id(2)
    inside = (ck < K)[:, None] & (cv < V)[None, :]
    w, k_end, q_start = place(w, bh, T, H, K), place(k_end, bh, T, H, K), place(q_start, bh, T, H, K)
    b = place(b, bh, T, H, K if PER_CHANNEL else 1)
    do, d_updates = place(do, bh, T, H, V), place(d_updates, bh, T, H, V)
    state = tl.zeros([BK, BV], tl.float32)
    if MAPS:
        pass
    elif group_edge is not None:
        state = tl.load(state_at(group_edge, bh * GROUPS + group, ck, cv, V, K), mask=inside, other=0.0)
    elif EDGE and not PACKED:
        state = tl.load(state_at(edge, bh, ck, cv, V, K), mask=inside, other=0.0)
    chunks = _chunks(table, N, PACKED)
    size = (chunks + GROUPS - 1) // GROUPS
    behind = tl.minimum(group * size + size, chunks)
    for step in range(0, behind - group * size):
        n = behind - 1 - step
        start, end = chunk_of(table, n, T, C, PACKED)
        if PACKED:
            at, flags = tl.load(table + n * 4 + 2) * H + bh % H, tl.load(table + n * 4 + 3)
            state = tl.where(((flags & 2) != 0) & (n < chunks - 1), 0.0, state)
            if EDGE:
                state += tl.load(state_at(edge, at, ck, cv, V, K), mask=inside & ((flags & 2) != 0), other=0.0)
        after = state.to(rounded)
        if not MAPS:
            tl.store(state_at(d_states, bh * N + n, ck, cv, V, K), after, mask=inside)
        t = start + row
        grad = load(do, t, cv, end, H, V, EVEN)
        # P^T, read transposed: a transposed accumulator is compiled wrongly on Hopper by Triton 3.4 to 3.7.0.
        p = tl.load(scores + (bh.to(tl.int64) * N + n) * (C * C) + row[None, :] * C + row[:, None])
        update = tl.dot(p, grad.to(rounded), input_precision=PRECISION)
        update = tl.dot(load(k_end, t, ck, end, H, K, EVEN), after, update, input_precision=PRECISION).to(rounded)
        if not MAPS:
            store(d_updates, update, t, cv, end, H, V, EVEN)
        state *= _total(b, end, ck, H, K, PER_CHANNEL)
        query = load(q_start, t, ck, end, H, K, EVEN, True)
        state = tl.dot(query, grad.to(rounded), state, input_precision=PRECISION)
        reading = -load(w, t, ck, end, H, K, EVEN, True)
        state = tl.dot(reading, update, state, input_precision=PRECISION)
        if PACKED and LEAVE:
            tl.store(state_at(leave, at, ck, cv, V, K), state, mask=inside & ((flags & 1) != 0))
        if PACKED and MAPS:
            # Nothing passes from a sequence to the one before it, which may end with the group before.
            state = tl.where(((flags & 1) != 0) & (n > 0), 0.0, state)
    if MAPS:
        tl.store(state_at(group_edge, bh * GROUPS + group, ck, cv, V, K), state, mask=inside)
    elif LEAVE and not PACKED:
        tl.store(state_at(leave, bh, ck, cv, V, K), state, mask=inside & (group == 0))


@triton.jit
def compose_kernel(
    matrix, rest, edge, group_edge, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    EDGE: tl.constexpr, GROUPS: tl.constexpr, REVERSE: tl.constexpr,
):  # fmt: skip
    """Write the state before every group, from `edge` and R in `rest`; REVERSE: the gradient after it, with M^T."""
    bh, cv = tl.program_id(1), tl.program_id(0) * BV + tl.arange(0, BV)
    for step in range(0, GROUPS):
        to = bh * GROUPS + (GROUPS - 1 - step if REVERSE else step)
        of = to + 1 if REVERSE else to - 1
        for first in range(0, K, BK):
            ck = first + tl.arange(0, BK)
            inside = (ck < K)[:, None] & (cv < V)[None, :]
            state = tl.zeros([BK, BV], tl.float32)
            if step > 0:
                state = tl.load(state_at(rest, of, ck, cv, V, K), mask=inside, other=0.0)
                for source in range(0, K, BK):
                    cs = source + tl.arange(0, BK)
                    # M, or its transpose.
                    at = cs[None, :] * K + ck[:, None] if REVERSE else ck[:, None] * K + cs[None, :]
                    columns = tl.load(
                        matrix + of.to(tl.int64) * (K * K) + at, mask=(ck < K)[:, None] & (cs < K)[None, :], other=0.0
                    )
                    known = (cs < K)[:, None] & (cv < V)[None, :]
                    earlier = tl.load(state_at(group_edge, of, cs, cv, V, K), mask=known, other=0.0)
                    state = tl.dot(columns, earlier, state, input_precision="tf32x3")
            elif EDGE:
                state = tl.load(state_at(edge, bh, ck, cv, V, K), mask=inside, other=0.0)
            tl.store(state_at(group_edge, to, ck, cv, V, K), state, mask=inside)
        # The next group reads what all threads have written.
        tl.debug_barrier()


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
