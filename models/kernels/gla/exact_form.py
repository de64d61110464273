"""The exact form: the terms between tokens of one chunk, correct for every decay, added to the results of the other kernels.

A chunk has blocks of 16 tokens. For j in an earlier block than i, exp(b_i - b_j) is exp(b_i - r) exp(r - b_j) with r the
sum up to the block of i. Both factors are at most 1, and if one of them underflows, exp(b_i - b_j) does too. Inside a block
whose decay fits the matmul form, r is half of the block's total. Else the sums over j < t <= i are added, one j of every
block at a time.
"""

from __future__ import annotations

from ..launch import tl, triton
from .tiles import (
    chunk_of,
    clamp_to_base_2,
    load,
    load_strided,
    logit_gradient,
    place,
    place_strided,
    store,
    store_strided,
)


@triton.jit
def _next(decay, g, t, row, offset, ck, end, H, K: tl.constexpr, SUB: tl.constexpr):
    """Return the sums over j < t <= i, j the token `offset` of i's block, from those of the token after j."""
    later = load(g, t - row % SUB + offset + 1, ck, end, H, K, False)
    return decay + tl.where((row % SUB > offset)[:, None], clamp_to_base_2(later), 0.0)


@triton.jit
def _blocks(decay, C: tl.constexpr, BK: tl.constexpr, SUB: tl.constexpr):
    """Return running sums inside every block minus half of its total, and the least total of a block."""
    blocks = tl.reshape(decay, [C // SUB, SUB, BK])
    total = tl.sum(blocks, 1, keep_dims=True)
    return tl.reshape(tl.cumsum(blocks, 1) - 0.5 * total, [C, BK]), tl.min(tl.min(tl.min(total, 2), 1), 0)


@triton.jit
def _across_blocks(query, key, until, decay, row, block, SUB: tl.constexpr):
    """Return queries of this block and keys of earlier ones, relative to the block's first token, and their factors."""
    reference = tl.sum(tl.where((row < block * SUB)[:, None], decay, 0.0), 0)[None, :]
    in_block = (row // SUB == block)[:, None]
    in_earlier = (row < block * SUB)[:, None]
    growth = tl.where(in_block, tl.exp2(tl.minimum(until - reference, 0.0)), 0.0)
    shrink = tl.where(in_earlier, tl.exp2(tl.minimum(reference - until, 0.0)), 0.0)
    return query * growth, key * shrink, growth, shrink


@triton.jit
def _any(needs_exact, bh, first, N, TOGETHER: tl.constexpr):
    """Return whether one of these chunks needs the exact form."""
    n = first + tl.arange(0, TOGETHER)
    return tl.max(tl.load(needs_exact + bh * N + n, mask=n < N, other=0), 0) != 0


@triton.jit
def exact_forward_kernel(
    needs_exact, q, k, v, g, table, o, T, H, N, scale,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr, SUB: tl.constexpr,
    MATMUL_LIMIT: tl.constexpr, TOGETHER: tl.constexpr, PACKED: tl.constexpr, EVEN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    first, bh = tl.program_id(0) * TOGETHER, tl.program_id(1)
    if _any(needs_exact, bh, first, N, TOGETHER):
        for n in range(first, tl.minimum(first + TOGETHER, N)):
            if tl.load(needs_exact + bh * N + n) != 0:
                _forward_of(
                    n, bh, q, k, v, g, table, o, T, H, scale, K, V, BK, BV, C, SUB, MATMUL_LIMIT, PACKED, PRECISION
                )


@triton.jit
def _forward_of(
    n, bh, q, k, v, g, table, o, T, H, scale,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr, SUB: tl.constexpr,
    MATMUL_LIMIT: tl.constexpr, PACKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    rounded: tl.constexpr = tl.float32 if q.dtype.element_ty == tl.float32 else tl.bfloat16
    ck, cv, row = tl.arange(0, BK), tl.arange(0, BV), tl.arange(0, C)
    q, k, g = place(q, bh, T, H, K), place(k, bh, T, H, K), place(g, bh, T, H, K)
    v, o = place(v, bh, T, H, V), place(o, bh, T, H, V)
    start, end = chunk_of(table, n, T, C, PACKED)
    t = start + row
    query = load(q, t, ck, end, H, K, False).to(tl.float32) * scale
    key = load(k, t, ck, end, H, K, False).to(tl.float32)
    decay = clamp_to_base_2(load(g, t, ck, end, H, K, False))
    near, least = _blocks(decay, C, BK, SUB)
    a = tl.zeros([C, C], tl.float32)
    if least >= -MATMUL_LIMIT:
        near_q, near_k = (query * tl.exp2(near)).to(rounded), (key * tl.exp2(-near)).to(rounded)
        a = tl.dot(near_q, tl.trans(near_k), input_precision=PRECISION)
        a = tl.where((row[:, None] // SUB == row[None, :] // SUB) & (row[:, None] >= row[None, :]), a, 0.0)
    else:
        between = tl.zeros([C, BK], tl.float32)
        for step in range(0, SUB):
            offset = SUB - 1 - step
            between = _next(between, g, t, row, offset, ck, end, H, K, SUB)
            other = load(k, t - row % SUB + offset, ck, end, H, K, False).to(tl.float32)
            score = tl.sum(query * other * tl.exp2(between), 1)
            column = row - row % SUB + offset
            a = tl.where((row[None, :] == column[:, None]) & (row >= column)[:, None], score[:, None], a)
    until = tl.cumsum(decay, 0)
    for block in range(1, C // SUB):
        near_q, near_k, _growth, _shrink = _across_blocks(query, key, until, decay, row, block, SUB)
        a += tl.dot(near_q.to(rounded), tl.trans(near_k.to(rounded)), input_precision=PRECISION)
    value = load(v, t, cv, end, H, V, False).to(rounded)
    out = load(o, t, cv, end, H, V, False).to(tl.float32)
    out = tl.dot(a.to(rounded), value, out, input_precision=PRECISION)
    store(o, out, t, cv, end, H, V, False)


@triton.jit
def exact_backward_kernel(
    needs_exact, do, q, k, v, g, table, dq, dk, dv, dg, d_strength, aug_weight, T, H, N, scale,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr, SUB: tl.constexpr,
    MATMUL_LIMIT: tl.constexpr, TOGETHER: tl.constexpr, STRIDE_K: tl.constexpr, STRIDE_V: tl.constexpr, LAYER: tl.constexpr,
    PACKED: tl.constexpr, EVEN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    first, bh = tl.program_id(0) * TOGETHER, tl.program_id(1)
    if _any(needs_exact, bh, first, N, TOGETHER):
        for n in range(first, tl.minimum(first + TOGETHER, N)):
            if tl.load(needs_exact + bh * N + n) != 0:
                _backward_of(
                    n, bh, do, q, k, v, g, table, dq, dk, dv, dg, d_strength, aug_weight, T, H, scale,
                    K, V, BK, BV, C, SUB, MATMUL_LIMIT, STRIDE_K, STRIDE_V, LAYER, PACKED, PRECISION,
                )  # fmt: skip


@triton.jit
def _backward_of(
    n, bh, do, q, k, v, g, table, dq, dk, dv, dg, d_strength, aug_weight, T, H, scale,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr, SUB: tl.constexpr,
    MATMUL_LIMIT: tl.constexpr, STRIDE_K: tl.constexpr, STRIDE_V: tl.constexpr, LAYER: tl.constexpr, PACKED: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    rounded: tl.constexpr = tl.float32 if q.dtype.element_ty == tl.float32 else tl.bfloat16
    ck, cv, row = tl.arange(0, BK), tl.arange(0, BV), tl.arange(0, C)
    q, k, g = place(q, bh, T, H, K), place(k, bh, T, H, K), place(g, bh, T, H, K)
    dq, dk = place_strided(dq, bh, T, H, K, STRIDE_K), place_strided(dk, bh, T, H, K, STRIDE_K)
    v, do = place(v, bh, T, H, V), place(do, bh, T, H, V)
    dv, dg = place_strided(dv, bh, T, H, V, STRIDE_V), place(dg, bh, T, H, K)
    start, end = chunk_of(table, n, T, C, PACKED)
    t = start + row
    grad = load(do, t, cv, end, H, V, False).to(rounded)
    value = load(v, t, cv, end, H, V, False).to(rounded)
    da = tl.dot(grad, tl.trans(value), input_precision=PRECISION)
    query = load(q, t, ck, end, H, K, False).to(tl.float32) * scale
    key = load(k, t, ck, end, H, K, False).to(tl.float32)
    raw = load(g, t, ck, end, H, K, False)
    decay = clamp_to_base_2(raw)
    near, least = _blocks(decay, C, BK, SUB)
    a = tl.zeros([C, C], tl.float32)
    d_query = tl.zeros([C, BK], tl.float32)
    d_key = tl.zeros([C, BK], tl.float32)
    # From the rounded factors, as in `chunk_output.py`: most terms cancel.
    d_decay = tl.zeros([C, BK], tl.float32)
    if least >= -MATMUL_LIMIT:
        growth, shrink = tl.exp2(near), tl.exp2(-near)
        near_q, near_k = (query * growth).to(rounded), (key * shrink).to(rounded)
        inside = (row[:, None] // SUB == row[None, :] // SUB) & (row[:, None] >= row[None, :])
        a = tl.where(inside, tl.dot(near_q, tl.trans(near_k), input_precision=PRECISION), 0.0)
        da_inside = tl.where(inside, da, 0.0).to(rounded)
        d_query = tl.dot(da_inside, near_k, input_precision=PRECISION)
        d_key = tl.trans(tl.dot(tl.trans(near_q), da_inside, input_precision=PRECISION))
        d_decay = near_q.to(tl.float32) * d_query - near_k.to(tl.float32) * d_key
        d_query *= growth
        d_key *= shrink
    else:
        between = tl.zeros([C, BK], tl.float32)
        for step in range(0, SUB):
            offset = SUB - 1 - step
            between = _next(between, g, t, row, offset, ck, end, H, K, SUB)
            other = load(k, t - row % SUB + offset, ck, end, H, K, False).to(tl.float32)
            column = row - row % SUB + offset
            seen = (row[None, :] == column[:, None]) & (row >= column)[:, None]
            factor = tl.exp2(between)
            a = tl.where(seen, tl.sum(query * other * factor, 1)[:, None], a)
            factor *= tl.sum(tl.where(seen, da, 0.0), 1)[:, None]
            d_query += other * factor
            sums = tl.sum(tl.reshape(query * factor, [C // SUB, SUB, BK]), 1, keep_dims=True)
            sums = tl.reshape(tl.broadcast_to(sums, [C // SUB, SUB, BK]), [C, BK])
            d_key += tl.where((row % SUB == offset)[:, None], sums, 0.0)
        d_decay = query * d_query - key * d_key
    until = tl.cumsum(decay, 0)
    for block in range(1, C // SUB):
        near_q, near_k, growth, shrink = _across_blocks(query, key, until, decay, row, block, SUB)
        near_q, near_k = near_q.to(rounded), near_k.to(rounded)
        a += tl.dot(near_q, tl.trans(near_k), input_precision=PRECISION)
        across = (row // SUB == block)[:, None] & (row < block * SUB)[None, :]
        da_across = tl.where(across, da, 0.0).to(rounded)
        d_across = tl.dot(da_across, near_k, input_precision=PRECISION)
        d_decay += near_q.to(tl.float32) * d_across
        d_query += d_across * growth
        d_across = tl.trans(tl.dot(tl.trans(near_q), da_across, input_precision=PRECISION))
        d_decay -= near_k.to(tl.float32) * d_across
        d_key += d_across * shrink
    grad = load(do, t, cv, end, H, V, False).to(rounded)
    d_value = tl.trans(tl.dot(tl.trans(grad), a.to(rounded), input_precision=PRECISION))
    d_value += load_strided(dv, t, cv, end, STRIDE_V, V, False).to(tl.float32)
    store_strided(dv, d_value, t, cv, end, STRIDE_V, V, False)
    d_decay = tl.cumsum(d_decay, 0, reverse=True)
    d_decay += load(dg, t, ck, end, H, K, False)
    d_decay = tl.where(raw < -80.0, 0.0, d_decay)
    d_query *= scale
    if LAYER:
        share = tl.load(place(d_strength, bh, T, H, 1) + t * H, mask=t < end, other=0.0)[:, None]
        share *= tl.load(aug_weight + bh % H * K + ck, mask=ck < K, other=0.0).to(tl.float32)[None, :]
        d_query += key * share
        d_key += query * share * (1.0 / scale)
    d_query += load_strided(dq, t, ck, end, STRIDE_K, K, False).to(tl.float32)
    store_strided(dq, d_query, t, ck, end, STRIDE_K, K, False)
    d_key += load_strided(dk, t, ck, end, STRIDE_K, K, False).to(tl.float32)
    if LAYER:
        store_strided(dk, logit_gradient(d_decay, d_key, decay), t, ck, end, STRIDE_K, K, False)
    else:
        store_strided(dk, d_key, t, ck, end, STRIDE_K, K, False)
        store(dg, d_decay, t, ck, end, H, K, False)
