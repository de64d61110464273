"""LION for short sequences in 16 bits: one program computes one head of a whole sequence.

Up to 128 tokens it also computes the log decay and its running sum. The backward pass by keys goes up to 256 tokens. Notation,
equations and reference: `tile.py`.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from ..launch import Launch, tl, triton
from .common import (
    BIASED_LOGITS,
    LionCase,
    base,
    block,
    inside_segments,
    load_log_decay,
    load_rows,
    load_sums,
    row_scale,
    store_columns,
    store_decay_gradient,
    store_rows,
)

LONGEST, LONGEST_MIDDLE = 128, 256
# Bytes of shared memory for the tiles of this sequence and the next, forward and backward.
_TWO_FORWARD, _TWO_BACKWARD = 120 * 1024, 184 * 1024
# Keys per tile of the backward pass by keys. Triton 3.6 compiles blocks of 32 correctly with 8 warps and heads up to 64, but
# wrongly with 4 warps or heads of 128 (H200).
_KEYS = 32
# Keys per tile, warps and registers per thread of the backward pass for `middle_length`. Fewer registers were slower.
_MIDDLE: tuple[int, int, int | None] = (32, 8, None)


def supports_single_tile(case: LionCase) -> bool:
    """Return whether these kernels were measured to be correct and faster for this case."""
    return case.length <= LONGEST and _sixteen_bits_and_small_heads(case)


def middle_length(case: LionCase) -> bool:
    """Return whether `tile.py` computes the forward pass, and a kernel of this file the whole backward pass.

    Only what was compared with float64 on an H200 is enabled: LION-s with normalized outputs, without packed segments.
    """
    measured = case.mode == BIASED_LOGITS and case.decay_dtype == case.dtype and case.normalized and not case.packed
    return measured and LONGEST < case.length <= LONGEST_MIDDLE and _sixteen_bits_and_small_heads(case)


def _sixteen_bits_and_small_heads(case: LionCase) -> bool:
    return max(case.dim_k, case.dim_v) <= 64 and case.dtype != torch.float32


@lru_cache(4096)
def single_tile_forward(case: LionCase) -> Launch:
    """Return the launch (q, k, v, decay, bias, c, segments, y, den). Its programs are persistent, over all sequences."""
    sequences, rows = case.batch * case.heads, block(case.length)
    multiprocessors, memory = _device(case.device)
    return Launch(
        _lion_whole_forward, (min(sequences, 2 * multiprocessors),),
        *case.sizes(), sequences, case.dim_k, case.dim_v, block(case.dim_k), block(case.dim_v), rows,
        *case.flags(), _even(case, rows), 2 if memory >= _TWO_FORWARD else 1, num_warps=8, num_stages=1, maxnreg=128,
    )  # fmt: skip


def keys_scratch(case: LionCase, c: Tensor | None) -> Tensor | None:
    """Return the last tensor of `single_tile_backward`, of the shape of the running sums c."""
    return None if c is None or all_pairs_at_once(case) else torch.empty_like(c)


def all_pairs_at_once(case: LionCase) -> bool:
    """Return whether the backward pass computes all pairs of a sequence at once: faster if tokens <= channels of a head."""
    return max(_KEYS, block(case.length)) <= max(block(case.dim_k), block(case.dim_v))


@lru_cache(4096)
def single_tile_backward(case: LionCase) -> Launch:
    """Return the launch (dy, q, k, v, decay, bias, c, segments, y, den, dq, dk, dv, d_decay, `keys_scratch`)."""
    sequences, rows = case.batch * case.heads, max(_KEYS, block(case.length))
    sizes = *case.sizes(), sequences, case.dim_k, case.dim_v, block(case.dim_k), block(case.dim_v), rows
    if all_pairs_at_once(case):
        multiprocessors, memory = _device(case.device)
        return Launch(
            _lion_whole_backward, (min(sequences, 2 * multiprocessors),), *sizes, *case.flags(), _even(case, rows),
            2 if memory >= _TWO_BACKWARD else 1, num_warps=8, num_stages=1, maxnreg=128,
        )  # fmt: skip
    keys, warps, registers = _MIDDLE if case.length > LONGEST else (_KEYS, 8, 128)
    return Launch(
        _lion_whole_backward_by_keys, (sequences,), *sizes, keys, *case.flags(), _even(case, rows),
        num_warps=warps, num_stages=1, maxnreg=registers,
    )  # fmt: skip


def _even(case: LionCase, rows: int) -> bool:
    """Return whether tokens and channels fill their tiles."""
    return case.length == rows and case.dim_k == block(case.dim_k) and case.dim_v == block(case.dim_v)


@lru_cache
def _device(device: int) -> tuple[int, int]:
    """Return the number of multiprocessors, and the bytes of shared memory per program."""
    if device < 0:
        # Triton's interpreter computes on the CPU.
        return 1, 0
    properties = torch.cuda.get_device_properties(device)
    return properties.multi_processor_count, getattr(properties, "shared_memory_per_block_optin", 0)


@triton.jit
def _factor(c_a, c_b, segments, a, b, T, DECAY: tl.constexpr, SEGMENTS: tl.constexpr):
    """Return `common.decay_factor`, with a multiplication by -1 that the compiler turns into an operand's sign."""
    if DECAY != 0:
        factor = tl.exp2(tl.abs(c_a[:, None] - c_b[None, :]) * -1.0)
    else:
        factor = tl.full([a.shape[0], b.shape[0]], 1.0, tl.float32)
    if SEGMENTS:
        factor = inside_segments(factor, segments, a, b, T)
    return factor


@triton.jit
def _lion_whole_forward(
    q, k, v, decay, bias, c, segments, y, den, T, H, eps, N,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, BM: tl.constexpr,
    DECAY: tl.constexpr, NORMALIZED: tl.constexpr, SEGMENTS: tl.constexpr, PRECISION: tl.constexpr, EVEN: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Compute every num_programs-th of N sequences, and prefetch the tiles of the next one."""
    t, ck, cv = tl.arange(0, BM), tl.arange(0, BK), tl.arange(0, BV)
    for step in tl.range(0, tl.cdiv(N - tl.program_id(0), tl.num_programs(0)), num_stages=STAGES):
        bh = tl.program_id(0) + step * tl.num_programs(0)
        query = load_rows(base(q, bh, T, H, K), t, ck, T, H, K, BK, EVEN)
        key = load_rows(base(k, bh, T, H, K), t, ck, T, H, K, BK, EVEN)
        value = load_rows(base(v, bh, T, H, V), t, cv, T, H, V, BV, EVEN)
        c_t = tl.zeros([BM], tl.float32)
        if DECAY != 0:
            c_t = tl.cumsum(load_log_decay(decay, bias, bh, t, T, H, DECAY), 0)
            tl.store(c + bh.to(tl.int64) * T + t, c_t, mask=t < T)
        a = tl.dot(query, tl.trans(key), input_precision=PRECISION)
        a *= _factor(c_t, c_t, segments, t, t, T, DECAY, SEGMENTS)
        total = tl.sum(a, 1)
        out = tl.dot(a.to(value.dtype), value, input_precision=PRECISION)
        if NORMALIZED:
            out = out / (total + eps)[:, None]
            tl.store(den + bh.to(tl.int64) * T + t, total, mask=t < T)
        store_rows(base(y, bh, T, H, V), out, t, cv, T, H, V, BV, EVEN)


@triton.jit
def _lion_whole_backward(
    dy, q, k, v, decay, bias, c, segments, y, den, dq, dk, dv, d_decay, of_keys, T, H, eps, N,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, BM: tl.constexpr,
    DECAY: tl.constexpr, NORMALIZED: tl.constexpr, SEGMENTS: tl.constexpr, PRECISION: tl.constexpr, EVEN: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of sequences as `_lion_whole_forward`; of_keys is not used."""
    t, ck, cv = tl.arange(0, BM), tl.arange(0, BK), tl.arange(0, BV)
    for step in tl.range(0, tl.cdiv(N - tl.program_id(0), tl.num_programs(0)), num_stages=STAGES):
        bh = tl.program_id(0) + step * tl.num_programs(0)
        query = load_rows(base(q, bh, T, H, K), t, ck, T, H, K, BK, EVEN)
        key = load_rows(base(k, bh, T, H, K), t, ck, T, H, K, BK, EVEN)
        value = load_rows(base(v, bh, T, H, V), t, cv, T, H, V, BV, EVEN)
        grad = load_rows(base(dy, bh, T, H, V), t, cv, T, H, V, BV, EVEN)
        if NORMALIZED:
            out = load_rows(base(y, bh, T, H, V), t, cv, T, H, V, BV, EVEN)
            inner = tl.sum(grad.to(tl.float32) * out.to(tl.float32), 1)
            scale = row_scale(den, bh, t, T, eps)
        a = tl.dot(query, tl.trans(key), input_precision=PRECISION)
        ds = tl.dot(grad, tl.trans(value), input_precision=PRECISION)
        c_t = load_sums(c + bh.to(tl.int64) * T if DECAY != 0 else c, t, T, DECAY)
        factor = _factor(c_t, c_t, segments, t, t, T, DECAY, SEGMENTS)
        if NORMALIZED:
            factor *= scale[:, None]
            ds -= inner[:, None]
        p = (a * factor).to(grad.dtype)
        ds *= factor
        d_value = tl.dot(tl.trans(grad), p, input_precision=PRECISION)
        store_columns(base(dv, bh, T, H, V), d_value, t, cv, T, H, V, BV, EVEN)
        if DECAY != 0:
            # The diagonal is in both sums and cancels.
            w = a * ds
            w = tl.where(t[:, None] >= t[None, :], w, w * -1.0)
            dc = tl.cumsum(tl.sum(w, 1) - tl.sum(w, 0), 0, reverse=True)
            store_decay_gradient(d_decay, decay, bias, bh, dc, t, T, H, DECAY)
        ds = ds.to(query.dtype)
        d_query = tl.dot(ds, key, input_precision=PRECISION)
        store_rows(base(dq, bh, T, H, K), d_query, t, ck, T, H, K, BK, EVEN)
        d_key = tl.dot(tl.trans(query), ds, input_precision=PRECISION)
        store_columns(base(dk, bh, T, H, K), d_key, t, ck, T, H, K, BK, EVEN)


@triton.jit
def _lion_whole_backward_by_keys(
    dy, q, k, v, decay, bias, c, segments, y, den, dq, dk, dv, d_decay, of_keys, T, H, eps, N,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    DECAY: tl.constexpr, NORMALIZED: tl.constexpr, SEGMENTS: tl.constexpr, PRECISION: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Compute all queries of a sequence at once, BN keys at a time. of_keys: scratch for the terms of dc from keys."""
    bh = tl.program_id(0)
    t, ck, cv = tl.arange(0, BM), tl.arange(0, BK), tl.arange(0, BV)
    k, dk, v, dv = base(k, bh, T, H, K), base(dk, bh, T, H, K), base(v, bh, T, H, V), base(dv, bh, T, H, V)
    query = load_rows(base(q, bh, T, H, K), t, ck, T, H, K, BK, EVEN)
    grad = load_rows(base(dy, bh, T, H, V), t, cv, T, H, V, BV, EVEN)
    first = tl.arange(0, BN)
    key, value = load_rows(k, first, ck, T, H, K, BK, EVEN), load_rows(v, first, cv, T, H, V, BV, EVEN)
    if DECAY != 0:
        c += bh.to(tl.int64) * T
        of_keys += bh.to(tl.int64) * T
    c_t = load_sums(c, t, T, DECAY)
    if NORMALIZED:
        out = load_rows(base(y, bh, T, H, V), t, cv, T, H, V, BV, EVEN)
        inner = tl.sum(grad.to(tl.float32) * out.to(tl.float32), 1)
        scale = row_scale(den, bh, t, T, eps)
    dc = tl.zeros([BM], tl.float32)
    d_query = tl.zeros([BM, BK], tl.float32)
    for begin in range(0, BM if EVEN else T, BN):
        u = begin + tl.arange(0, BN)
        # Prefetch for the next iteration; the last prefetch is not used.
        after = (begin + BN) % BM + tl.arange(0, BN) if EVEN else u + BN
        next_key, next_value = load_rows(k, after, ck, T, H, K, BK, EVEN), load_rows(v, after, cv, T, H, V, BV, EVEN)
        a = tl.dot(query, tl.trans(key), input_precision=PRECISION)
        ds = tl.dot(grad, tl.trans(value), input_precision=PRECISION)
        factor = _factor(c_t, load_sums(c, u, T, DECAY), segments, t, u, T, DECAY, SEGMENTS)
        if NORMALIZED:
            factor *= scale[:, None]
            ds -= inner[:, None]
        p = (a * factor).to(grad.dtype)
        ds *= factor
        d_value = tl.dot(tl.trans(grad), p, input_precision=PRECISION)
        if DECAY != 0:
            # The diagonal is in both sums and cancels.
            w = a * ds
            w = tl.where(t[:, None] >= u[None, :], w, w * -1.0)
            dc += tl.sum(w, 1)
            tl.store(of_keys + u, tl.sum(w, 0), mask=u < T)
        store_columns(dv, d_value, u, cv, T, H, V, BV, EVEN)
        ds = ds.to(query.dtype)
        d_query = tl.dot(ds, key, d_query, input_precision=PRECISION)
        d_key = tl.dot(tl.trans(query), ds, input_precision=PRECISION)
        store_columns(dk, d_key, u, ck, T, H, K, BK, EVEN)
        key, value = next_key, next_value
    store_rows(base(dq, bh, T, H, K), d_query, t, ck, T, H, K, BK, EVEN)
    if DECAY != 0:
        tl.debug_barrier()
        dc -= tl.load(of_keys + t, mask=t < T, other=0.0)
        store_decay_gradient(d_decay, decay, bias, bh, tl.cumsum(dc, 0, reverse=True), t, T, H, DECAY)
