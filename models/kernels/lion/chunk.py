"""LION for long sequences, linear in length: one pass computes the states between chunks, a second one the outputs.

With b, B a chunk's running sum and total of the log decay, v~ = [v, 1], F and G the states from the left and from the
right (reference: `models.operators.lion.bidirectional_attention` with form="chunked"):
    forward     o_i = e^(b_i) q_i F + e^(B - b_i) q_i G + sum_j e^(-|b_i - b_j|) (q_i . k_j) v~_j
    backward    the same operator with its arguments permuted. With u_i = [dy_i, -(dy_i . y_i)] / den_i and F', G' the
                states of q and u instead of k and v~:
                dq = LION(u, v~, k) from F, G     dk = LION(v~, u, q) from F', G'     dv = LION(k, q, u) from F', G'
                d log decay_t sums W_ij = dA_ij A_ij over the pairs on both sides of t. There are three kinds of pairs:
                both tokens in this chunk; one token in it, from the terms of dq and dk with F, G, F', G'; none in it,
                e^B (<F, G'> + <F', G>). So no sum is longer than a chunk.
The first pass is `chunk_state.py`.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from ..launch import Launch, tl, triton
from .chunk_state import (
    chunk_size,
    edge_factors,
    load_column,
    load_state,
    states_between_chunks,
    take_column,
    take_rows,
    take_state,
)
from .common import (
    NO_DECAY,
    Kernel,
    LionCase,
    LionInputs,
    base,
    block,
    decay_factor,
    empty_decay_gradient,
    load_rows,
    load_scale,
    load_sums,
    per_token,
    running_sum,
    signed,
    store_decay_gradient,
    store_rows,
)


def chunk(case: LionCase) -> int | None:
    """Return the tokens after which the running sums restart."""
    return chunk_size(case.dtype)


def forward(case: LionCase, x: LionInputs, sums: Tensor | None) -> tuple[Tensor, tuple[Tensor | None, ...]]:
    """Compute y as `tile.forward`.

    The backward pass saves the states if they are no larger than k and v, else recomputes them.
    """
    running, outputs = _forward_launches(case)
    b = sums
    if case.mode != NO_DECAY and b is None:
        b = per_token(case, x.q)
        running(b, x.decay, x.bias)
    states, columns = states_between_chunks(case, False, x.k, x.v, b, x.segments)
    # Allocated after the first launches: with short sequences the device waits for the host.
    y = torch.empty_like(x.v)
    den = per_token(case, x.q) if case.normalized else None
    outputs(x.q, x.k, x.v, b, x.segments, states, columns, y, den)
    small = states.nbytes <= x.k.nbytes + x.v.nbytes
    return y, (den, b, states if small else None, columns if small else None)


def backward(
    case: LionCase, dy: Tensor, x: LionInputs, y: Tensor, saved: tuple[Tensor | None, ...]
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Compute all gradients as `tile.backward`."""
    den, b, states, columns = saved
    delta = None if den is None else torch.empty_like(den)
    if states is None:
        states, columns = states_between_chunks(case, False, x.k, x.v, b, x.segments)
    d_states, d_columns = states_between_chunks(case, True, x.q, dy, b, x.segments, y, den, delta)
    dq, dk, dv = torch.empty_like(x.q), torch.empty_like(x.k), torch.empty_like(x.v)
    d_decay = empty_decay_gradient(case, x, -(-case.length // chunk_size(case.dtype)))
    _backward_launch(case)(
        dy, *x[:5], b, x.segments, states, columns, d_states, d_columns, den, delta, dq, dk, dv, d_decay
    )
    return dq, dk, dv, d_decay


@lru_cache(4096)
def _forward_launches(case: LionCase) -> tuple[Launch, Launch]:
    size, largest, registers = chunk_size(case.dtype), 64, None
    if case.dtype == torch.bfloat16:
        largest, registers = (64, 168) if max(case.dim_k, case.dim_v) <= 64 else (128, None)
    block_k, block_v = block(case.dim_k, largest), block(case.dim_v, largest)
    outputs = Launch(
        _lion_chunk_forward, (-(-case.length // size), -(-case.dim_v // block_v), case.batch * case.heads),
        *case.sizes(), case.dim_k, case.dim_v, block_k, block_v, size, *case.flags(),
        num_warps=4, num_stages=1, maxnreg=registers,
    )  # fmt: skip
    return running_sum(case, size), outputs


@lru_cache(4096)
def _backward_launch(case: LionCase) -> Launch:
    size, largest = chunk_size(case.dtype), 64
    return Launch(
        _lion_chunk_backward, (-(-case.length // size), case.batch * case.heads),
        *case.sizes(), case.dim_k, case.dim_v, block(case.dim_k, largest), block(case.dim_v, largest), size,
        *case.flags(), num_warps=4, num_stages=1,
    )  # fmt: skip


@triton.jit(do_not_specialize=["T"])
def _lion_chunk_forward(
    q, k, v, b, segments, states, sums, y, den, T, H, eps,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr,
    DECAY: tl.constexpr, NORMALIZED: tl.constexpr, SEGMENTS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    n, bh = tl.program_id(0), tl.program_id(2)
    t, ck, cv = n * C + tl.arange(0, C), tl.arange(0, BK), tl.program_id(1) * BV + tl.arange(0, BV)
    q, k = base(q, bh, T, H, K), base(k, bh, T, H, K)
    if DECAY != 0:
        b += bh.to(tl.int64) * T
    here = bh.to(tl.int64) * tl.num_programs(0) + n
    there = here + tl.num_programs(2).to(tl.int64) * tl.num_programs(0)
    query, key = load_rows(q, t, ck, T, H, K, BK), load_rows(k, t, ck, T, H, K, BK)
    value = load_rows(base(v, bh, T, H, V), t, cv, T, H, V, BV)
    held_left = load_state(states, here, ck, cv, K, V, BK, BV)
    held_right = load_state(states, there, ck, cv, K, V, BK, BV)
    column_left, column_right = load_column(sums, here, ck, K, NORMALIZED), load_column(sums, there, ck, K, NORMALIZED)
    left, right, _ = edge_factors(b, segments, n, t, T, C, DECAY, SEGMENTS)
    a = tl.zeros([C, C], tl.float32)
    for block_k in range(0, K, BK):
        d = block_k + ck
        a = tl.dot(
            take_rows(query, q, t, d, T, H, K, BK),
            tl.trans(take_rows(key, k, t, d, T, H, K, BK)),
            a,
            input_precision=PRECISION,
        )
    until = load_sums(b, t, T, DECAY)
    a *= decay_factor(until, until, segments, t, t, T, DECAY, SEGMENTS)
    total = tl.sum(a, 1)
    out = tl.dot(a.to(value.dtype), value, input_precision=PRECISION)
    for side in tl.static_range(2):
        near, held, column_held = (here, held_left, column_left) if side == 0 else (there, held_right, column_right)
        part, part_total = tl.zeros([C, BV], tl.float32), tl.zeros([C], tl.float32)
        for block_k in range(0, K, BK):
            d = block_k + ck
            tile = take_rows(query, q, t, d, T, H, K, BK)
            state = take_state(held, states, near, d, cv, K, V, BK, BV)
            part = tl.dot(tile.to(state.dtype), state, part, input_precision=PRECISION)
            if NORMALIZED:
                column = take_column(column_held, sums, near, d, K, BK)
                part_total += tl.sum(tile * column[None, :], 1)
        weight = left if side == 0 else right
        out += part * weight[:, None]
        total += part_total * weight
    if NORMALIZED:
        out = out / (total + eps)[:, None]
        if tl.program_id(1) == 0:
            tl.store(den + bh.to(tl.int64) * T + t, total, mask=t < T)
    store_rows(base(y, bh, T, H, V), out, t, cv, T, H, V, BV)


@triton.jit
def _lion_chunk_backward(
    dy, q, k, v, decay, bias, b, segments, states, sums, d_states, d_sums, den, delta, dq, dk, dv, d_decay, T, H, eps,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr,
    DECAY: tl.constexpr, NORMALIZED: tl.constexpr, SEGMENTS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute all gradients of a chunk. Tiles of pairs are [queries, keys]; terms of dk and dv inside are transposed."""
    n, bh = tl.program_id(0), tl.program_id(1)
    t, ck, cv = n * C + tl.arange(0, C), tl.arange(0, BK), tl.arange(0, BV)
    q, k, v, dy = base(q, bh, T, H, K), base(k, bh, T, H, K), base(v, bh, T, H, V), base(dy, bh, T, H, V)
    if DECAY != 0:
        b += bh.to(tl.int64) * T
    here = bh.to(tl.int64) * tl.num_programs(0) + n
    there = here + tl.num_programs(1).to(tl.int64) * tl.num_programs(0)
    grad, value = load_rows(dy, t, cv, T, H, V, BV), load_rows(v, t, cv, T, H, V, BV)
    query, key = load_rows(q, t, ck, T, H, K, BK), load_rows(k, t, ck, T, H, K, BK)
    held_left = load_state(states, here, ck, cv, K, V, BK, BV)
    held_right = load_state(states, there, ck, cv, K, V, BK, BV)
    d_held_left = load_state(d_states, here, ck, cv, K, V, BK, BV)
    d_held_right = load_state(d_states, there, ck, cv, K, V, BK, BV)
    column_left, column_right = load_column(sums, here, ck, K, NORMALIZED), load_column(sums, there, ck, K, NORMALIZED)
    d_column_left = load_column(d_sums, here, ck, K, NORMALIZED)
    d_column_right = load_column(d_sums, there, ck, K, NORMALIZED)
    left, right, through = edge_factors(b, segments, n, t, T, C, DECAY, SEGMENTS)
    scale, inner = load_scale(den, delta, bh, t, T, eps, NORMALIZED)
    until = load_sums(b, t, T, DECAY)
    if DECAY != 0:
        passed, passed_column = tl.zeros([BK, BV], tl.float32), tl.zeros([BK], tl.float32)
        for side in tl.static_range(2):
            near, far = (here, there) if side == 0 else (there, here)
            held, d_held = (held_left, d_held_right) if side == 0 else (held_right, d_held_left)
            column_held, d_column_held = (column_left, d_column_right) if side == 0 else (column_right, d_column_left)
            for block_k in range(0, K, BK):
                d_k = block_k + ck
                for block_v in range(0, V, BV):
                    d_v = block_v + cv
                    state = take_state(held, states, near, d_k, d_v, K, V, BK, BV).to(tl.float32)
                    d_state = take_state(d_held, d_states, far, d_k, d_v, K, V, BK, BV)
                    passed += state * d_state.to(tl.float32)
                if NORMALIZED:
                    d_column = take_column(d_column_held, d_sums, far, d_k, K, BK)
                    passed_column += take_column(column_held, sums, near, d_k, K, BK) * d_column
        passing = tl.sum(tl.sum(passed, 1) + passed_column, 0)

    a, ds = tl.zeros([C, C], tl.float32), tl.zeros([C, C], tl.float32)
    for block_k in range(0, K, BK):
        d_k = block_k + ck
        a = tl.dot(
            take_rows(query, q, t, d_k, T, H, K, BK),
            tl.trans(take_rows(key, k, t, d_k, T, H, K, BK)),
            a,
            input_precision=PRECISION,
        )
    for block_v in range(0, V, BV):
        d_v = block_v + cv
        ds = tl.dot(
            take_rows(grad, dy, t, d_v, T, H, V, BV),
            tl.trans(take_rows(value, v, t, d_v, T, H, V, BV)),
            ds,
            input_precision=PRECISION,
        )
    factor = decay_factor(until, until, segments, t, t, T, DECAY, SEGMENTS) * scale[:, None]
    p = (a * factor).to(dy.dtype.element_ty)
    ds = (ds - inner[:, None]) * factor
    if DECAY != 0:
        w = signed(a * ds, t, t)
        d_inside = tl.sum(w, 1) - tl.sum(w, 0)
        d_left, d_right = tl.zeros([C], tl.float32), tl.zeros([C], tl.float32)
    ds = ds.to(q.dtype.element_ty)

    for block_v in range(0, V, BV):
        d_v = block_v + cv
        inside = tl.dot(tl.trans(take_rows(grad, dy, t, d_v, T, H, V, BV)), p, input_precision=PRECISION)
        d_value = tl.trans(inside)
        for side in tl.static_range(2):
            near, held = (here, d_held_left) if side == 0 else (there, d_held_right)
            part = tl.zeros([C, BV], tl.float32)
            for block_k in range(0, K, BK):
                d_k = block_k + ck
                state = take_state(held, d_states, near, d_k, d_v, K, V, BK, BV)
                tile = take_rows(key, k, t, d_k, T, H, K, BK).to(state.dtype)
                part = tl.dot(tile, state, part, input_precision=PRECISION)
            d_value += part * (left if side == 0 else right)[:, None]
        store_rows(base(dv, bh, T, H, V), d_value, t, d_v, T, H, V, BV)

    for block_k in range(0, K, BK):
        d_k = block_k + ck
        again = load_rows(k, t, d_k, T, H, K, BK)
        inside = tl.dot(tl.trans(take_rows(query, q, t, d_k, T, H, K, BK)), ds, input_precision=PRECISION)
        d_key = tl.trans(inside)
        for side in tl.static_range(2):
            near, held = (here, d_held_left) if side == 0 else (there, d_held_right)
            part = tl.zeros([C, BK], tl.float32)
            for block_v in range(0, V, BV):
                d_v = block_v + cv
                state = take_state(held, d_states, near, d_k, d_v, K, V, BK, BV)
                tile = take_rows(value, v, t, d_v, T, H, V, BV).to(state.dtype)
                part = tl.dot(tile, tl.trans(state), part, input_precision=PRECISION)
            if NORMALIZED:
                column_held = d_column_left if side == 0 else d_column_right
                part += take_column(column_held, d_sums, near, d_k, K, BK)[None, :]
            part *= (left if side == 0 else right)[:, None]
            d_key += part
            if DECAY != 0:
                edge = tl.sum(again * part, 1)
                if side == 0:
                    d_left += edge
                else:
                    d_right += edge
        store_rows(base(dk, bh, T, H, K), d_key, t, d_k, T, H, K, BK)

    for block_k in range(0, K, BK):
        d_k = block_k + ck
        again = load_rows(q, t, d_k, T, H, K, BK)
        d_query = tl.dot(ds, take_rows(key, k, t, d_k, T, H, K, BK), input_precision=PRECISION)
        for side in tl.static_range(2):
            near, held = (here, held_left) if side == 0 else (there, held_right)
            part = tl.zeros([C, BK], tl.float32)
            for block_v in range(0, V, BV):
                d_v = block_v + cv
                state = take_state(held, states, near, d_k, d_v, K, V, BK, BV)
                tile = take_rows(grad, dy, t, d_v, T, H, V, BV).to(state.dtype)
                part = tl.dot(tile, tl.trans(state), part, input_precision=PRECISION)
            if NORMALIZED:
                column_held = column_left if side == 0 else column_right
                part -= inner[:, None] * take_column(column_held, sums, near, d_k, K, BK)[None, :]
            part *= ((left if side == 0 else right) * scale)[:, None]
            d_query += part
            if DECAY != 0:
                edge = tl.sum(again * part, 1)
                if side == 0:
                    d_left += edge
                else:
                    d_right += edge
        store_rows(base(dq, bh, T, H, K), d_query, t, d_k, T, H, K, BK)
    if DECAY != 0:
        d_log_decay = (
            passing * through + tl.cumsum(d_inside + d_left, 0, reverse=True) + tl.cumsum(d_right, 0) - d_right
        )
        store_decay_gradient(d_decay, decay, bias, bh, d_log_decay, t, T, H, DECAY, n, tl.num_programs(0))


CHUNK = Kernel(chunk, forward, backward)
