"""Kernels of the delta rule for the outputs of a chunk and for its gradients, given the states on both sides.

In the notation of `wy.py` and `chunk_state.py`:
    o = q_start S + P N.
    Y = T^T dN,      dv = beta Y,      dP = tril(do N^T),      dA = -tril(Y N^T, -1).
    d(q_start) = do S^T,     d(beta k e^b) = -Y S^T,     d(k_end) = N dS'^T.
dA is short because dw = -dN S^T and du = dN: the gradient of A = T^(-1) - I is -(T^T dw) w^T - (T^T du) u^T = -Y N^T.
The products with S and dS' (`state_gradient_kernel`) and the gradients through P and A (`key_gradient_kernel`) are two kernels,
because one would need too many registers. In the second, a program of moderate decays has one reference for all exponentials,
half of the chunk's decay; strong ones go level by level, as in `wy.py`. Equal terms of b's gradient cancel exactly, because its
two sides use the same rounded factors.
"""

from __future__ import annotations

from ..gla.tiles import chunk_of, load, load_triangle, place, running_sum, state_at, store
from ..launch import tl, triton
from .wy import LIMIT, decay_and_total, level_factors, of_level, pair_decay, rate_and_bias


@triton.jit
def output_kernel(
    q_start, scores, updates, states, table, o, T, H: tl.constexpr, N, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr,
    BV: tl.constexpr, C: tl.constexpr, PACKED: tl.constexpr, EVEN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    n, bh = tl.program_id(0), tl.program_id(2)
    start, end = chunk_of(table, n, T, C, PACKED)
    if start == end:
        return
    row, cv = tl.arange(0, C), tl.program_id(1) * BV + tl.arange(0, BV)
    t = start + row
    p = tl.load(scores + (bh.to(tl.int64) * N + n) * (C * C) + row[:, None] * C + row[None, :])
    update = load(place(updates, bh, T, H, V), t, cv, end, H, V, EVEN)
    out = tl.dot(p, update, input_precision=PRECISION)
    for first in tl.static_range(0, K, BK):
        ck = first + tl.arange(0, BK)
        query = load(place(q_start, bh, T, H, K), t, ck, end, H, K, EVEN)
        state = _load_state(states, bh * N + n, ck, cv, K, V)
        out = tl.dot(query, state, out, input_precision=PRECISION)
    store(place(o, bh, T, H, V), out, t, cv, end, H, V, EVEN)


@triton.jit
def value_gradient_kernel(
    do, v, b, beta, inverse, updates, d_updates, table, dv, d_scores, d_systems, d_beta, T, H: tl.constexpr, N, scale,
    V: tl.constexpr, BV: tl.constexpr, C: tl.constexpr, PER_CHANNEL: tl.constexpr, PACKED: tl.constexpr,
    EVEN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Write dv, s dP, dA and the part of d_beta from v, and replace dN in `d_updates` by Y.

    For one decay per head dP and dA are multiplied by the decay between their two tokens.
    """
    rounded: tl.constexpr = inverse.dtype.element_ty
    n, bh = tl.program_id(0), tl.program_id(1)
    start, end = chunk_of(table, n, T, C, PACKED)
    if start == end:
        return
    row = tl.arange(0, C)
    t = start + row
    do, v, dv = place(do, bh, T, H, V), place(v, bh, T, H, V), place(dv, bh, T, H, V)
    updates, d_updates = place(updates, bh, T, H, V), place(d_updates, bh, T, H, V)
    strength = tl.load(place(beta, bh, T, H, 1) + t * H, mask=t < end, other=0.0).to(tl.float32)
    base = (bh.to(tl.int64) * N + n) * (C * C)
    transposed = tl.load(inverse + base + row[None, :] * C + row[:, None])
    d_strength = tl.zeros([C], tl.float32)
    d_p = tl.zeros([C, C], tl.float32)
    d_a = tl.zeros([C, C], tl.float32)
    for first in tl.static_range(0, V, BV):
        d = first + tl.arange(0, BV)
        update = load(updates, t, d, end, H, V, EVEN)
        grad = load(do, t, d, end, H, V, EVEN).to(rounded)
        y = tl.dot(transposed, load(d_updates, t, d, end, H, V, EVEN), input_precision=PRECISION)
        d_strength += tl.sum(y * load(v, t, d, end, H, V, EVEN).to(tl.float32), 1)
        store(dv, y * strength[:, None], t, d, end, H, V, EVEN)
        y = y.to(rounded)
        # Every thread has read its part of dN, which Y replaces.
        tl.debug_barrier()
        store(d_updates, y, t, d, end, H, V, EVEN)
        d_p = tl.dot(grad, tl.trans(update), d_p, input_precision=PRECISION)
        d_a = tl.dot(y, tl.trans(update), d_a, input_precision=PRECISION)
    real = (t < end)[:, None]
    square = base + row[:, None] * C + row[None, :]
    if not PER_CHANNEL:
        pair = pair_decay(place(b, bh, T, H, 1), t, end, H, real & (row[:, None] >= row[None, :]))
        d_p *= pair
        d_a *= pair
    d_p = tl.where(real & (row[:, None] >= row[None, :]), d_p * scale, 0.0)
    d_a = tl.where(real & (row[:, None] > row[None, :]), -d_a, 0.0)
    tl.store(d_scores + square, d_p.to(rounded))
    tl.store(d_systems + square, d_a.to(rounded))
    tl.store(place(d_beta, bh, T, H, 1) + t * H, d_strength, mask=t < end)


@triton.jit
def state_gradient_kernel(
    do, updates, y, states, d_states, table, from_q, from_reading, from_end, passing, T, H: tl.constexpr, N,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr, PACKED: tl.constexpr,
    EVEN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Write do S^T, Y S^T and N dS'^T for a block of channels, and the sums of S dS' over values.

    passing: [rows, chunks, K] float32.
    """
    rounded: tl.constexpr = states.dtype.element_ty
    n, bh = tl.program_id(0), tl.program_id(2)
    start, end = chunk_of(table, n, T, C, PACKED)
    if start == end:
        return
    t, ck = start + tl.arange(0, C), tl.program_id(1) * BK + tl.arange(0, BK)
    do, updates, y = place(do, bh, T, H, V), place(updates, bh, T, H, V), place(y, bh, T, H, V)
    of_q = tl.zeros([C, BK], tl.float32)
    of_reading = tl.zeros([C, BK], tl.float32)
    of_end = tl.zeros([C, BK], tl.float32)
    total = tl.zeros([BK], tl.float32)
    for first in range(0, V, BV):
        d = first + tl.arange(0, BV)
        state = _load_state(states, bh * N + n, ck, d, K, V)
        d_state = _load_state(d_states, bh * N + n, ck, d, K, V)
        total += tl.sum(state.to(tl.float32) * d_state.to(tl.float32), 1)
        state, d_state = tl.trans(state), tl.trans(d_state)
        grad = load(do, t, d, end, H, V, EVEN).to(rounded)
        of_q = tl.dot(grad, state, of_q, input_precision=PRECISION)
        of_reading = tl.dot(load(y, t, d, end, H, V, EVEN), state, of_reading, input_precision=PRECISION)
        of_end = tl.dot(load(updates, t, d, end, H, V, EVEN), d_state, of_end, input_precision=PRECISION)
    store(place(from_q, bh, T, H, K), of_q, t, ck, end, H, K, EVEN)
    store(place(from_reading, bh, T, H, K), of_reading, t, ck, end, H, K, EVEN)
    store(place(from_end, bh, T, H, K), of_end, t, ck, end, H, K, EVEN)
    tl.store(passing + (bh.to(tl.int64) * N + n) * K + ck, total, mask=ck < K)


@triton.jit
def key_gradient_kernel(
    q, k, b, levels, beta, g, a_log, bias, from_q, from_reading, from_end, passing, d_scores, d_systems, table, triangle,
    dq, dk, dg, d_beta, d_rate, d_bias, T, H: tl.constexpr, N, scale, TOKENS, K: tl.constexpr, BK: tl.constexpr,
    C: tl.constexpr, STRONG: tl.constexpr, GATE: tl.constexpr, PER_CHANNEL: tl.constexpr, PACKED: tl.constexpr,
    EVEN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Write dq, dk and dg for a block of channels, and its part of d_beta (and of dg for one decay per head).

    STRONG: only of the blocks whose decays need several levels, with one program for all of a chunk; else of the others.
    d_beta, and dg for one decay per head: [blocks, batch, length, heads], TOKENS = batch * length * heads apart.
    GATE: g are the logits x of `channel_decay_kernel`, and dg is their gradient. d_rate and d_bias are float32
    [batch, chunks, heads, K], a chunk's gradients of a_log, per channel, and of bias.
    """
    n, bh = tl.program_id(0), tl.program_id(2)
    start, end = chunk_of(table, n, T, C, PACKED)
    if start == end:
        return
    levels += (bh.to(tl.int64) * N + n) * ((K + BK - 1) // BK)
    if STRONG:
        for block in range(0, (K + BK - 1) // BK):
            last = tl.load(levels + block)
            if last != 0:
                _gradient_of_block(
                    block, last, n, bh, start, end, q, k, b, beta, g, a_log, bias, from_q, from_reading, from_end, passing,
                    d_scores, d_systems, triangle, dq, dk, dg, d_beta, d_rate, d_bias, T, H, N, scale, TOKENS, K, BK, C,
                    STRONG, GATE, PER_CHANNEL, EVEN, PRECISION,
                )  # fmt: skip
    else:
        block, last = tl.program_id(1), 0
        if PER_CHANNEL:
            last = tl.load(levels + block)
        if last == 0:
            _gradient_of_block(
                block, last, n, bh, start, end, q, k, b, beta, g, a_log, bias, from_q, from_reading, from_end, passing, d_scores,
                d_systems, triangle, dq, dk, dg, d_beta, d_rate, d_bias, T, H, N, scale, TOKENS, K, BK, C, STRONG, GATE,
                PER_CHANNEL, EVEN, PRECISION,
            )  # fmt: skip


@triton.jit
def _gradient_of_block(
    block, last, n, bh, start, end, q, k, b, beta, g, a_log, bias, from_q, from_reading, from_end, passing, d_scores,
    d_systems, triangle, dq, dk, dg, d_beta, d_rate, d_bias, T, H: tl.constexpr, N, scale, TOKENS, K: tl.constexpr,
    BK: tl.constexpr, C: tl.constexpr, STRONG: tl.constexpr, GATE: tl.constexpr, PER_CHANNEL: tl.constexpr,
    EVEN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    rounded: tl.constexpr = d_scores.dtype.element_ty
    exact: tl.constexpr = rounded == tl.float32
    chunk = bh.to(tl.int64) * N + n
    row, ck = tl.arange(0, C), block * BK + tl.arange(0, BK)
    t = start + row
    real = t < end
    query = load(place(q, bh, T, H, K), t, ck, end, H, K, EVEN)
    key = load(place(k, bh, T, H, K), t, ck, end, H, K, EVEN)
    strength = tl.load(place(beta, bh, T, H, 1) + t * H, mask=real, other=0.0).to(tl.float32)[:, None]
    b = place(b, bh, T, H, K if PER_CHANNEL else 1)
    until, total = decay_and_total(b, end, t, ck, H, K, PER_CHANNEL, EVEN)
    d_q = load(place(from_q, bh, T, H, K), t, ck, end, H, K, EVEN).to(tl.float32)
    d_row = load(place(from_reading, bh, T, H, K), t, ck, end, H, K, EVEN).to(tl.float32)
    d_column = load(place(from_end, bh, T, H, K), t, ck, end, H, K, EVEN).to(tl.float32)
    square = chunk * (C * C) + row[:, None] * C + row[None, :]
    grown = tl.exp2(until)
    d_q *= grown * scale
    d_row *= -grown
    d_column *= tl.exp2(total - until)
    d_end = tl.sum(d_column * key.to(tl.float32), 0)
    d_decay = query.to(tl.float32) * d_q + key.to(tl.float32) * (d_row * strength - d_column)
    if STRONG:
        for level in range(0, last + 1):
            d_p, d_a = tl.load(d_scores + square), tl.load(d_systems + square)
            rows, columns = level_factors(b, until, total, level, last, start, end, ck, row, H, K, C)
            mask = of_level(row, level, last, C)
            d_p, d_a = tl.where(mask, d_p, 0.0).to(rounded), tl.where(mask, d_a, 0.0).to(rounded)
            d_q, d_row, d_column, d_decay = _pairs(
                d_q, d_row, d_column, d_decay, query, key, strength, rows, columns, d_p, d_a, PRECISION
            )
    else:
        rows, columns = 1.0, 1.0
        if PER_CHANNEL:
            # One reference: half of the chunk's decay.
            rows, columns = tl.exp2(until - total * 0.5), tl.exp2(total * 0.5 - until)
        d_p, d_a = tl.load(d_scores + square), tl.load(d_systems + square)
        d_q, d_row, d_column, d_decay = _pairs(
            d_q, d_row, d_column, d_decay, query, key, strength, rows, columns, d_p, d_a, PRECISION
        )
    passed = tl.load(passing + chunk * K + ck, mask=ck < K, other=0.0)
    d_total = tl.exp2(tl.sum(total, 0)) * passed + d_end
    d_strength = tl.sum(d_row * key.to(tl.float32), 1)
    d_row *= strength
    d_k = d_row + d_column
    store(place(dq, bh, T, H, K), d_q, t, ck, end, H, K, EVEN)
    store(place(dk, bh, T, H, K), d_k, t, ck, end, H, K, EVEN)
    d_beta += block * TOKENS
    tl.store(place(d_beta, bh, T, H, 1) + t * H, d_strength, mask=real)
    if GATE:
        # The sum of g_t dg_t over tokens, where dg_t is the sum of d_decay from token t on, and d_total.
        d_rate_here = (tl.sum(d_decay * until, 0) + d_total * tl.sum(total, 0)) * 0.6931471805599453
    reached = tl.trans(load_triangle(triangle, C))
    d_decay = running_sum(d_decay, reached, True, exact) + d_total[None, :]
    if PER_CHANNEL:
        given = load(place(g, bh, T, H, K), t, ck, end, H, K, EVEN).to(tl.float32)
        if GATE:
            # Below `LIMIT` the gradient is below its rounding.
            rate, offset = rate_and_bias(a_log, bias, bh % H, ck, K)
            d_decay = tl.where(real[:, None], d_decay * rate / (1.0 + tl.exp(-given - offset)), 0.0)
            part = ((bh // H).to(tl.int64) * N + n) * (H * K) + bh % H * K + ck
            tl.store(d_rate + part, d_rate_here, mask=ck < K)
            tl.store(d_bias + part, tl.sum(d_decay, 0), mask=ck < K)
        else:
            d_decay = tl.where(given >= LIMIT, d_decay, 0.0)
        store(place(dg, bh, T, H, K), d_decay, t, ck, end, H, K, EVEN)
    else:
        limited = tl.load(place(g, bh, T, H, 1) + t * H, mask=real, other=0.0) >= LIMIT
        d_decay = tl.where(limited, tl.sum(d_decay, 1), 0.0)
        tl.store(place(dg + block * TOKENS, bh, T, H, 1) + t * H, d_decay, mask=real)


@triton.jit
def _pairs(
    d_q, d_row, d_column, d_decay, query, key, strength, row_factor, column_factor, d_p, d_a, PRECISION: tl.constexpr
):  # fmt: skip
    """Add the gradients of pairs (i, j) whose scores are sums of row_factor_i column_factor_j.

    d_p and d_a are zero above the diagonal.
    """
    rounded: tl.constexpr = d_p.dtype
    columns = (key.to(tl.float32) * column_factor).to(rounded)
    rows = (query.to(tl.float32) * row_factor).to(rounded)
    d_rows = tl.dot(d_p, columns, input_precision=PRECISION)
    d_q += d_rows * row_factor
    d_decay += rows.to(tl.float32) * d_rows
    d_columns = tl.dot(tl.trans(d_p), rows, input_precision=PRECISION)
    rows = (key.to(tl.float32) * strength * row_factor).to(rounded)
    d_columns = tl.dot(tl.trans(d_a), rows, d_columns, input_precision=PRECISION)
    d_decay -= columns.to(tl.float32) * d_columns
    d_rows = tl.dot(d_a, columns, input_precision=PRECISION)
    d_decay += rows.to(tl.float32) * d_rows
    return d_q, d_row + d_rows * row_factor, d_column + d_columns * column_factor, d_decay


@triton.jit
def _load_state(states, i, ck, cv, K: tl.constexpr, V: tl.constexpr):
    return tl.load(state_at(states, i, ck, cv, V, K), mask=(ck < K)[:, None] & (cv < V)[None, :], other=0.0)
