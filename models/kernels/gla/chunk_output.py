"""GLA outputs and gradients of one chunk, from the state before it and (backward) the gradient of the state after it.

With g to base 2, b its running sum in the chunk, B its total, m = B/2, Q = scale q e^(b - m), K = k e^(m - b):
    A = tril(Q K^T)    o = A v + Q (e^m S)           dA = tril(do v^T)    dv = A^T do + K (e^(B - m) dS')
    dQ = dA K + e^m do S^T      dK = dA^T Q + e^(B - m) v dS'^T      dq = scale e^(b - m) dQ      dk = e^(m - b) dK
    dg = reverse cumsum of (Q dQ - K dK) + e^B sum_v S dS' + sum_j K_j (e^(B - m) v_j dS'^T)
dg uses the rounded Q and K, as the tensor cores do, so that equal terms cancel exactly. Its last two terms are the gradient of
B, computed separately so that terms of later chunks cancel too.
In a chunk that needs the exact form (`tiles.py`), A and dA are 0 here, and Q and K are relative to 0 and B.
Triton 3.4 to 3.7.0 miscompiles a matmul with a transposed accumulator on Hopper: A^T and dA^T are separate matmuls.
"""

from __future__ import annotations

from ..launch import tl, triton
from .tiles import (
    chunk_of,
    clamp_to_base_2,
    load,
    load_strided,
    load_triangle,
    logit_gradient,
    place,
    place_strided,
    references,
    running_sum,
    state_at,
    store,
    store_strided,
)


@triton.jit
def _load_state(states, i, ck, cv, K: tl.constexpr, V: tl.constexpr, EVEN: tl.constexpr):
    address = state_at(states, i, ck, cv, V, K)
    if EVEN:
        return tl.load(address)
    return tl.load(address, mask=(ck < K)[:, None] & (cv < V)[None, :], other=0.0)


@triton.jit
def chunk_output_forward_kernel(
    q, k, v, g, table, triangle, states, o, needs_exact, T, H: tl.constexpr, N, scale,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr, MATMUL_LIMIT: tl.constexpr,
    PACKED: tl.constexpr, EVEN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    exact: tl.constexpr = q.dtype.element_ty == tl.float32
    rounded: tl.constexpr = tl.float32 if exact else tl.bfloat16
    n, bh = tl.program_id(0), tl.program_id(1)
    row, ck, cv = tl.arange(0, C), tl.arange(0, BK), tl.arange(0, BV)
    start, end = chunk_of(table, n, T, C, PACKED)
    if start == end:
        return
    t = start + row
    # All loads come first, because a load between two matmuls does not overlap with them. Those with a change of layout are last.
    decay = load(place(g, bh, T, H, K), t, ck, end, H, K, EVEN)
    triangle_tile = load_triangle(triangle, C)
    value = load(place(v, bh, T, H, V), t, cv, end, H, V, EVEN).to(rounded)
    state = _load_state(states, bh * N + n, ck, cv, K, V, EVEN)
    query = load(place(q, bh, T, H, K), t, ck, end, H, K, EVEN).to(tl.float32)
    key = load(place(k, bh, T, H, K), t, ck, end, H, K, EVEN).to(tl.float32)
    until = running_sum(clamp_to_base_2(decay), triangle_tile, False, exact)
    total = tl.sum(tl.where((row == C - 1)[:, None], until, 0.0), 0)
    fits = (tl.min(total, 0) >= -MATMUL_LIMIT).to(tl.int32)
    near_q, near_k = references(total, fits)
    query *= tl.exp2(until - near_q[None, :])
    from_start = (query * tl.exp2(near_q)[None, :]).to(rounded)
    query = query.to(rounded)
    key = (key * tl.exp2(near_k[None, :] - until)).to(rounded)
    a = tl.dot(query, tl.trans(key), input_precision=PRECISION)
    a = tl.where((row[:, None] >= row[None, :]) & (fits == 1), a, 0.0).to(rounded)
    out = tl.dot(from_start, state, input_precision=PRECISION)
    out = tl.dot(a, value, out, input_precision=PRECISION) * scale
    store(place(o, bh, T, H, V), out, t, cv, end, H, V, EVEN)
    tl.store(needs_exact + bh * N + n, 1 - fits)


@triton.jit
def chunk_output_backward_kernel(
    do, q, k, v, g, table, triangle, needs_exact, states, d_states, dq, dk, dv, dg, d_strength, aug_weight,
    T, H: tl.constexpr, N, scale, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr,
    STRIDE_K: tl.constexpr, STRIDE_V: tl.constexpr, LAYER: tl.constexpr, PACKED: tl.constexpr, EVEN: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    exact: tl.constexpr = q.dtype.element_ty == tl.float32
    rounded: tl.constexpr = tl.float32 if exact else tl.bfloat16
    n, bh = tl.program_id(0), tl.program_id(1)
    row, ck, cv = tl.arange(0, C), tl.arange(0, BK), tl.arange(0, BV)
    v, do = place(v, bh, T, H, V), place(do, bh, T, H, V)
    dq, dk = place_strided(dq, bh, T, H, K, STRIDE_K), place_strided(dk, bh, T, H, K, STRIDE_K)
    dv, dg = place_strided(dv, bh, T, H, V, STRIDE_V), place(dg, bh, T, H, K)
    start, end = chunk_of(table, n, T, C, PACKED)
    if start == end:
        return
    t = start + row
    # Loads come first, as in the forward kernel.
    decay = load(place(g, bh, T, H, K), t, ck, end, H, K, EVEN)
    triangle_tile = load_triangle(triangle, C)
    value = load(v, t, cv, end, H, V, EVEN).to(rounded)
    grad = load(do, t, cv, end, H, V, EVEN).to(rounded)
    d_state = _load_state(d_states, bh * N + n, ck, cv, K, V, EVEN)
    state = _load_state(states, bh * N + n, ck, cv, K, V, EVEN)
    query = load(place(q, bh, T, H, K), t, ck, end, H, K, EVEN).to(tl.float32)
    key = load(place(k, bh, T, H, K), t, ck, end, H, K, EVEN).to(tl.float32)
    decay = clamp_to_base_2(decay)
    passing = tl.sum(state.to(tl.float32) * d_state.to(tl.float32), 1)

    until = running_sum(decay, triangle_tile, False, exact)
    # The last of the rounded sums, not the exact total, so that the last token has no decay to the chunk's end.
    total = tl.sum(tl.where((row == C - 1)[:, None], until, 0.0), 0)
    # The decision of the forward pass, which `exact_form.py` also reads.
    fits = 1 - tl.load(needs_exact + bh * N + n)
    near_q, near_k = references(total, fits)
    upper = (row[:, None] <= row[None, :]) & (fits == 1)
    lower = (row[:, None] >= row[None, :]) & (fits == 1)
    query = (query * tl.exp2(until - near_q[None, :]) * scale).to(rounded)
    key = (key * tl.exp2(near_k[None, :] - until)).to(rounded)
    to_end = tl.exp2(total - near_k)[None, :]

    a = tl.dot(key, tl.trans(query), input_precision=PRECISION)
    a = tl.where(upper, a, 0.0).to(rounded)
    reach = (key.to(tl.float32) * to_end).to(rounded)
    # In a layer, dv already contains the gradient from the augmentation. The zero, unknown to the compiler, keeps it from holding
    # the earlier addresses in registers.
    zero = tl.load(triangle + 1).to(tl.int32)
    d_value = _initial_tile(dv, t, cv, end, LAYER, C, BV, STRIDE_V, V, EVEN)
    d_value = tl.dot(reach, d_state, d_value, input_precision=PRECISION)
    d_value = tl.dot(a, grad, d_value, input_precision=PRECISION)
    store_strided(dv, d_value, t + zero, cv, end, STRIDE_V, V, EVEN)
    d_key = tl.dot(value, tl.trans(d_state), input_precision=PRECISION)
    da_chunk = tl.dot(value, tl.trans(grad), input_precision=PRECISION)
    d_key *= to_end
    d_total = tl.exp2(total) * passing + tl.sum(key.to(tl.float32) * d_key, 0)
    d_key = tl.dot(tl.where(upper, da_chunk, 0.0).to(rounded), query, d_key, input_precision=PRECISION)
    d_decay = -key.to(tl.float32) * d_key
    if LAYER:
        # Add dq = ds w k and dk = ds w q of the augmentation to dQ and dK, which have one reference. In a chunk of the exact
        # form they have two, and `exact_form.py` adds them.
        share, weight = _share(d_strength, aug_weight, bh, t + zero, end, fits, scale, ck, T, H, K)
        d_key += (query.to(tl.float32) * share[:, None]) * weight[None, :]
    d_key *= tl.exp2(-(until - near_k[None, :]))
    store_strided(dk, d_key, t, ck, end, STRIDE_K, K, EVEN)

    d_query = tl.dot(grad, tl.trans(state), input_precision=PRECISION)
    da_chunk = tl.dot(grad, tl.trans(value), input_precision=PRECISION)
    d_query *= tl.exp2(near_q)[None, :]
    d_query = tl.dot(tl.where(lower, da_chunk, 0.0).to(rounded), key, d_query, input_precision=PRECISION)
    d_decay += query.to(tl.float32) * d_query
    if LAYER:
        # Loaded a second time to save registers.
        share, weight = _share(d_strength, aug_weight, bh, t + zero, end, fits, scale, ck, T, H, K)
        d_query += (key.to(tl.float32) * weight[None, :]) * share[:, None]
    # Another expression than above, so that the compiler does not hold the earlier exponentials in registers.
    d_query *= tl.exp2(-(near_q[None, :] - until)) * scale
    store_strided(dq, d_query, t, ck, end, STRIDE_K, K, EVEN)
    d_decay = running_sum(d_decay, tl.trans(triangle_tile), True, exact) + d_total[None, :]
    if LAYER:
        if fits == 1:
            # Load dk from the cache, where this program stored it: it does not fit in registers until here.
            tl.debug_barrier()
            decay = clamp_to_base_2(load(place(g, bh, T, H, K), t + zero, ck, end, H, K, EVEN))
            d_key = load_strided(dk, t + zero, ck, end, STRIDE_K, K, EVEN).to(tl.float32)
            store_strided(dk, logit_gradient(d_decay, d_key, decay), t + zero, ck, end, STRIDE_K, K, EVEN)
        else:
            # `exact_form.py` completes them.
            store(dg, d_decay, t, ck, end, H, K, EVEN)
    else:
        store(dg, d_decay, t, ck, end, H, K, EVEN)


@triton.jit
def _initial_tile(
    dv, t, d, end, LAYER: tl.constexpr, C: tl.constexpr, BV: tl.constexpr, STRIDE: tl.constexpr, V: tl.constexpr,
    EVEN: tl.constexpr,
):  # fmt: skip
    """Return the float32 tile to accumulate on: the content of dv, or zeros."""
    if LAYER:
        return load_strided(dv, t, d, end, STRIDE, V, EVEN).to(tl.float32)
    else:
        return tl.zeros([C, BV], tl.float32)


@triton.jit
def _share(d_strength, aug_weight, bh, t, end, fits, scale, ck, T, H: tl.constexpr, K: tl.constexpr):
    """Return ds / scale of every token, 0 in a chunk of the exact form, and w of every channel."""
    of_token = tl.load(place(d_strength, bh, T, H, 1) + t * H, mask=(t < end) & (fits == 1), other=0.0)
    of_channel = tl.load(aug_weight + bh % H * K + ck, mask=ck < K, other=0.0)
    return of_token * (1.0 / scale), of_channel.to(tl.float32)
