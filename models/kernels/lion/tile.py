"""LION for short sequences: tiles of (Q K^T * M) V, like flash attention without its running maximum.

Every factor of M is at most 1, so nothing needs rescaling, and tiles whose largest factor is below e^-20 are skipped.
Up to 128 tokens, and up to 256 of LION-s in 16 bits, one forward kernel also computes the log decay and its running sum.
`single_tile.py` has one backward kernel for them.
Reference: `models.operators.lion.bidirectional_attention` with form="parallel".

Backward, with A = Q K^T * M, P = A / den, dP = dY V^T and delta_i = dy_i . y_i:
    dA_ij = (dP_ij - delta_i) / den_i       dV = P^T dY       dQ = (dA * M) K       dK = (dA * M)^T Q
    dc_i = sum_j sign(i - j) (W_ij + W_ji)  with W = dA * A;  d log decay = reverse running sum of dc
Tiles of pairs are [queries, keys]: sums over keys then stay within a warp. dK and dV are computed transposed, because Triton
miscompiles a matmul with a transposed accumulator on Hopper, which dK = dS^T Q would need.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from ..launch import Launch, tl, triton
from .common import (
    NO_DECAY,
    Kernel,
    LionCase,
    LionInputs,
    base,
    block,
    decay_factor,
    empty_decay_gradient,
    load_log_decay,
    load_rows,
    load_scale,
    load_sums,
    per_token,
    row_inner,
    running_sum,
    signed,
    store_columns,
    store_decay_gradient,
    store_rows,
)
from .single_tile import (
    keys_scratch,
    middle_length,
    single_tile_backward,
    single_tile_forward,
    supports_single_tile,
)

# Up to this many tokens every program of the forward pass computes the running sums of its sequence.
_WHOLE = 128
# Queries and keys per tile of the forward pass, warps and stages for `middle_length`.
_MIDDLE = (64, 32, 4, 1)
# Tokens per iteration of the kernel of the decay's gradient.
_DECAY_BLOCK = 256


def chunk(case: LionCase) -> int | None:
    """Return the tokens after which the running sums for `forward` restart; None because it uses none."""
    return None


def forward(case: LionCase, x: LionInputs, sums: Tensor | None) -> tuple[Tensor, tuple[Tensor | None, ...]]:
    """Return y and the tensors that `backward` needs: normalizers without eps and running sums of the log decay.

    sums: running sums over `chunk` tokens, or None.
    """
    y = torch.empty_like(x.v)
    den = per_token(case, y) if case.normalized else None
    c = None if case.mode == NO_DECAY else per_token(case, y)
    pointers = *x[:5], c, x.segments, y, den
    if supports_single_tile(case):
        single_tile_forward(case)(*pointers)
        return y, (den, c)
    running, outputs = _forward_launches(case)
    if running is not None:
        running(c, x.decay, x.bias)
    outputs(*pointers)
    return y, (den, c)


def backward(
    case: LionCase, dy: Tensor, x: LionInputs, y: Tensor, saved: tuple[Tensor | None, ...]
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Return the gradients of q, k, v and decay; for a bias alone, those of its parts, [parts, heads]."""
    den, c = saved
    dq, dk, dv = torch.empty_like(x.q), torch.empty_like(x.k), torch.empty_like(x.v)
    single = supports_single_tile(case) or middle_length(case)
    d_decay = empty_decay_gradient(case, x, 1 if single else -(-case.length // _DECAY_BLOCK))
    if single:
        single_tile_backward(case)(dy, *x[:5], c, x.segments, y, den, dq, dk, dv, d_decay, keys_scratch(case, c))
        return dq, dk, dv, d_decay
    dc = None if c is None else torch.empty_like(c)
    gradients, decay_gradient = _backward_launches(case)
    delta = None if den is None else torch.empty_like(den)
    if case.normalized:
        row_inner(case)(dy, y, delta)
    gradients(dy, x.q, x.k, x.v, c, x.segments, den, delta, dq, dk, dv, dc)
    if d_decay is not None:
        decay_gradient(dc, x.decay, x.bias, d_decay)
    return dq, dk, dv, d_decay


@lru_cache(4096)
def _forward_launches(case: LionCase) -> tuple[Launch | None, Launch]:
    rows, columns, warps, stages = (
        _MIDDLE if middle_length(case) else _forward_config(case.dim_k, case.dim_v, case.dtype)
    )
    whole = block(case.length) if case.length <= _WHOLE or middle_length(case) else 0
    running = None if whole or case.mode == NO_DECAY else running_sum(case)
    outputs = Launch(
        _lion_tile_forward, (-(-case.length // rows), case.batch * case.heads),
        *case.sizes(), case.dim_k, case.dim_v, block(case.dim_k), block(case.dim_v), rows, columns, whole,
        *case.flags(), num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return running, outputs


@lru_cache(4096)
def _backward_launches(case: LionCase) -> tuple[Launch, Launch]:
    rows, columns, warps, stages, registers = _backward_config(case.dim_k, case.dim_v, case.dtype)
    programs = case.batch * case.heads
    gradients = Launch(
        _lion_tile_backward, (-(-case.length // rows), programs),
        *case.sizes(), case.dim_k, case.dim_v, block(case.dim_k), block(case.dim_v), rows, columns,
        *case.flags(), num_warps=warps, num_stages=stages, maxnreg=registers,
    )  # fmt: skip
    return gradients, Launch(
        _lion_decay_gradient, (programs,), case.length, case.heads, case.mode, _DECAY_BLOCK, num_warps=1
    )


def _forward_config(dim_k: int, dim_v: int, dtype: torch.dtype) -> tuple[int, int, int, int]:
    """Return queries and keys per tile, warps, and pipeline stages."""
    dim = max(block(dim_k), block(dim_v))
    if dtype == torch.float32:
        return (64, 64, 4, 1) if dim <= 64 else (32, 32, 4, 1)
    if dim > 64:
        return 64, 64, 4, 1
    return 64, 64, 4, 3


def _backward_config(dim_k: int, dim_v: int, dtype: torch.dtype) -> tuple[int, int, int, int, int | None]:
    """Return what `_forward_config` returns, and the register limit per thread: it sets the programs per multiprocessor."""
    dim = max(block(dim_k), block(dim_v))
    if dtype == torch.float32:
        return (64, 32, 4, 1, None) if dim <= 64 else (32, 32, 4, 1, None)
    return (64, 32, 8, 1, None) if dim > 64 else (64, 32, 4, 1, 168)


@triton.jit
def _reach(c, segments, start, T, BM: tl.constexpr, BN: tl.constexpr, DECAY: tl.constexpr, SEGMENTS: tl.constexpr):
    """Return the first and one past the last token that the tile of tokens start .. start + BM - 1 must visit.

    All other factors are below e^-20 = 2^-28.9 or of another segment. c: running sums of this head.
    """
    low = 0
    high = T
    if DECAY != 0 or SEGMENTS:
        end = tl.minimum(start + BM, T) - 1
        low, high = start, end + 1
        for begin in range(0, T, 512):
            t = begin + tl.arange(0, 512)
            left, right = t < start, (t > end) & (t < T)
            if DECAY != 0:
                x = tl.load(c + t, mask=t < T, other=0.0)
                # Written so that a sum that is NaN is within reach.
                left = left & ((tl.load(c + start) - x <= -28.9) == 0)
                right = right & ((x - tl.load(c + end) <= -28.9) == 0)
            if SEGMENTS:
                s = tl.load(segments + t, mask=t < T, other=-1)
                left = left & (s == tl.load(segments + start))
                right = right & (s == tl.load(segments + end))
            low -= tl.sum(left.to(tl.int32), 0)
            high += tl.sum(right.to(tl.int32), 0)
        low = low // BN * BN
    return low, high


@triton.jit
def _lion_tile_forward(
    q, k, v, decay, bias, c, segments, y, den, T, H, eps,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    WHOLE: tl.constexpr, DECAY: tl.constexpr, NORMALIZED: tl.constexpr, SEGMENTS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute a tile of queries. WHOLE: up to this many tokens the program computes the running sums of its sequence."""
    start, bh = tl.program_id(0) * BM, tl.program_id(1)
    t, ck, cv = start + tl.arange(0, BM), tl.arange(0, BK), tl.arange(0, BV)
    k, v = base(k, bh, T, H, K), base(v, bh, T, H, V)
    query = load_rows(base(q, bh, T, H, K), t, ck, T, H, K, BK)
    if WHOLE != 0:
        key, value = load_rows(k, tl.arange(0, BN), ck, T, H, K, BK), load_rows(v, tl.arange(0, BN), cv, T, H, V, BV)
    if DECAY != 0:
        c += bh.to(tl.int64) * T
        if WHOLE != 0:
            every = tl.arange(0, WHOLE)
            g = load_log_decay(decay, bias, bh, every, T, H, DECAY)
            tl.store(c + every, tl.cumsum(g, 0), mask=every < T)
            tl.debug_barrier()
    c_t = load_sums(c, t, T, DECAY)
    low, high = 0, T
    if WHOLE == 0:
        low, high = _reach(c, segments, start, T, BM, BN, DECAY, SEGMENTS)
    total = tl.zeros([BM], tl.float32)
    out = tl.zeros([BM, BV], tl.float32)
    for begin in range(low, high, BN):
        u = begin + tl.arange(0, BN)
        if WHOLE == 0:
            key, value = load_rows(k, u, ck, T, H, K, BK), load_rows(v, u, cv, T, H, V, BV)
        else:
            # Prefetch for the next iteration: the loop is too short for the compiler's pipeline.
            next_key, next_value = load_rows(k, u + BN, ck, T, H, K, BK), load_rows(v, u + BN, cv, T, H, V, BV)
        a = tl.dot(query, tl.trans(key), input_precision=PRECISION)
        a *= decay_factor(c_t, load_sums(c, u, T, DECAY), segments, t, u, T, DECAY, SEGMENTS)
        total += tl.sum(a, 1)
        out = tl.dot(a.to(value.dtype), value, out, input_precision=PRECISION)
        if WHOLE != 0:
            key, value = next_key, next_value
    if NORMALIZED:
        out = out / (total + eps)[:, None]
        tl.store(den + bh.to(tl.int64) * T + t, total, mask=t < T)
    store_rows(base(y, bh, T, H, V), out, t, cv, T, H, V, BV)


@triton.jit
def _lion_tile_backward(
    dy, q, k, v, c, segments, den, delta, dq, dk, dv, dc, T, H, eps,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    DECAY: tl.constexpr, NORMALIZED: tl.constexpr, SEGMENTS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of one tile of tokens, first as queries (dq), then as keys (dk, dv), and both terms of dc."""
    start, bh = tl.program_id(0) * BM, tl.program_id(1)
    t, ck, cv = start + tl.arange(0, BM), tl.arange(0, BK), tl.arange(0, BV)
    q, k, v, dy = base(q, bh, T, H, K), base(k, bh, T, H, K), base(v, bh, T, H, V), base(dy, bh, T, H, V)
    if DECAY != 0:
        c += bh.to(tl.int64) * T
    low, high = _reach(c, segments, start, T, BM, BN, DECAY, SEGMENTS)
    c_t = load_sums(c, t, T, DECAY)

    query, grad = load_rows(q, t, ck, T, H, K, BK), load_rows(dy, t, cv, T, H, V, BV)
    u = low + tl.arange(0, BN)
    key_u, value_u = load_rows(k, u, ck, T, H, K, BK), load_rows(v, u, cv, T, H, V, BV)
    scale, inner = load_scale(den, delta, bh, t, T, eps, NORMALIZED)
    dc_queries = tl.zeros([BM], tl.float32)
    d_query = tl.zeros([BM, BK], tl.float32)
    for begin in range(low, high, BN):
        u = begin + tl.arange(0, BN)
        # Prefetch for the next iteration.
        next_key, next_value = load_rows(k, u + BN, ck, T, H, K, BK), load_rows(v, u + BN, cv, T, H, V, BV)
        ds = tl.dot(grad, tl.trans(value_u), input_precision=PRECISION)
        ds = (ds - inner[:, None]) * scale[:, None]
        ds *= decay_factor(c_t, load_sums(c, u, T, DECAY), segments, t, u, T, DECAY, SEGMENTS)
        if DECAY != 0:
            w = tl.dot(query, tl.trans(key_u), input_precision=PRECISION) * ds
            dc_queries += tl.sum(signed(w, t, u), 1)
        d_query = tl.dot(ds.to(query.dtype), key_u, d_query, input_precision=PRECISION)
        key_u, value_u = next_key, next_value
    store_rows(base(dq, bh, T, H, K), d_query, t, ck, T, H, K, BK)

    key, value = load_rows(k, t, ck, T, H, K, BK), load_rows(v, t, cv, T, H, V, BV)
    u = low + tl.arange(0, BN)
    query_u, grad_u = load_rows(q, u, ck, T, H, K, BK), load_rows(dy, u, cv, T, H, V, BV)
    dc_keys = tl.zeros([BM], tl.float32)
    d_key, d_value = tl.zeros([BK, BM], tl.float32), tl.zeros([BV, BM], tl.float32)
    for begin in range(low, high, BN):
        u = begin + tl.arange(0, BN)
        next_query, next_grad = load_rows(q, u + BN, ck, T, H, K, BK), load_rows(dy, u + BN, cv, T, H, V, BV)
        scale_u, inner_u = load_scale(den, delta, bh, u, T, eps, NORMALIZED)
        factor = decay_factor(load_sums(c, u, T, DECAY), c_t, segments, u, t, T, DECAY, SEGMENTS)
        a = tl.dot(query_u, tl.trans(key), input_precision=PRECISION) * factor
        da = (tl.dot(grad_u, tl.trans(value), input_precision=PRECISION) - inner_u[:, None]) * scale_u[:, None]
        if DECAY != 0:
            dc_keys -= tl.sum(signed(a * da, u, t), 0)
        p = (a * scale_u[:, None]).to(grad_u.dtype)
        d_value = tl.dot(tl.trans(grad_u), p, d_value, input_precision=PRECISION)
        d_key = tl.dot(tl.trans(query_u), (da * factor).to(query_u.dtype), d_key, input_precision=PRECISION)
        query_u, grad_u = next_query, next_grad
    store_columns(base(dk, bh, T, H, K), d_key, t, ck, T, H, K, BK)
    store_columns(base(dv, bh, T, H, V), d_value, t, cv, T, H, V, BV)
    if DECAY != 0:
        tl.store(dc + bh.to(tl.int64) * T + t, dc_queries + dc_keys, mask=t < T)


@triton.jit
def _lion_decay_gradient(dc, decay, bias, d_decay, T, H, DECAY: tl.constexpr, BT: tl.constexpr):
    bh = tl.program_id(0)
    total = 0.0
    for step in range(0, tl.cdiv(T, BT)):
        part = tl.cdiv(T, BT) - 1 - step
        t = part * BT + tl.arange(0, BT)
        x = tl.load(dc + bh.to(tl.int64) * T + t, mask=t < T, other=0.0)
        store_decay_gradient(
            d_decay, decay, bias, bh, total + tl.cumsum(x, 0, reverse=True), t, T, H, DECAY, part, tl.cdiv(T, BT)
        )
        total += tl.sum(x, 0)


TILE = Kernel(chunk, forward, backward)
