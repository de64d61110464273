"""Quadratic linear attention for short sequences: flash attention's tiles, with other weights than an exponential.

    a_ij = p(scale q_i k_j) exp(c_i - c_j) for j <= i      p(s) = s, or with `taylor` 1 + s + s^2 / 2
    y_i = sum_j a_ij v_j, with `normalized` divided by (sum_j a_ij + eps)
c are running sums of log decays, so no factor exceeds 1 and nothing needs rescaling. It is the quadratic form of gated linear
attention with one decay per head, the faster one for a few hundred tokens. It computes Based's Taylor polynomial without
features. Reference: `models.operators.gla.gated_linear_attention` with form="parallel".

Backward, with P = a / den, dP = dY V^T and delta_i = dy_i . y_i:
    da_ij = (dP_ij - delta_i) / den_i    dV = P^T dY    ds = da p'(s) exp(c_i - c_j)    dQ = scale ds K    dK = scale ds^T Q
    dc_i = sum_j W_ij - W_ji with W = da * a
dK and dV are computed transposed, as in `lion/tile.py`.
"""

from __future__ import annotations

from functools import lru_cache
from math import log
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..precision import NORMALIZER_EPS
from .launch import Launch, aligned, packed, tl, triton

LARGEST_KEY, LARGEST_VALUE = 128, 128
# Queries and keys per tile.
_TILE = 64


def quadratic_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    *,
    scale: float = 1.0,
    taylor: bool = False,
    normalized: bool,
) -> Tensor:
    """Return y [batch, length, heads, head_dim_v] of causal attention with the decayed attention matrix, in v's dtype.

    q, k: [batch, length, heads, head_dim_k], v: [..., head_dim_v], of one dtype. log_decay: [batch, length, heads], at most
    0, bounded by -80; or None. Heads may share q and k (an expanded axis), which are then not copied.
    Raises ValueError for heads larger than the kernels support.
    """
    if q.shape[-1] > LARGEST_KEY or v.shape[-1] > LARGEST_VALUE:
        raise ValueError(
            f"head_dim_k {q.shape[-1]}, head_dim_v {v.shape[-1]}: the kernels support at most {LARGEST_KEY} and "
            f"{LARGEST_VALUE}; use gated_linear_attention"
        )
    sums = None
    if log_decay is not None:
        # The kernels use exp2.
        sums = log_decay.float().clamp_min(-80.0).transpose(1, 2).cumsum(-1) / log(2)
    return _QuadraticAttention.apply(q, k, v, sums, scale, taylor, normalized)


class _Case(NamedTuple):
    """Hold everything that decides how the kernels are compiled and launched; strides: of tokens and of heads in q and k."""

    device: torch.device
    dtype: torch.dtype
    batch: int
    length: int
    heads: int
    dim_k: int
    dim_v: int
    strides: tuple[int, int]
    scale: float
    decayed: bool
    taylor: bool
    normalized: bool


class _QuadraticAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, sums: Tensor | None, scale: float, taylor: bool, normalized: bool
    ) -> Tensor:
        v = aligned(v)
        q, k = _rows(q), _rows(k)
        if q.stride() != k.stride():
            q, k = packed(q), packed(k)
        sums = None if sums is None else aligned(sums)
        batch, length, heads, dim_k = q.shape
        strides = q.stride(1), q.stride(2)
        flags = sums is not None, taylor, normalized
        case = _Case(v.device, v.dtype, batch, length, heads, dim_k, v.shape[-1], strides, scale, *flags)
        y = torch.empty_like(v)
        den = v.new_empty((batch, heads, length), dtype=torch.float32) if normalized else None
        if v.numel():
            _launches(case)[0](q, k, v, sums, y, den)
        ctx.save_for_backward(q, k, v, sums, y if normalized else None, den)
        ctx.case = case
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, sums, y, den = ctx.saved_tensors
        dq, dk = (v.new_empty(q.shape) for _ in range(2))
        dv = torch.empty_like(v)
        d_sums = None if sums is None else torch.empty_like(sums)
        if v.numel():
            _launches(ctx.case)[1](aligned(dy), q, k, v, sums, y, den, dq, dk, dv, d_sums)
        return dq, dk, dv, d_sums, None, None, None


def _rows(x: Tensor) -> Tensor:
    """Return x itself if the kernels can read its rows (contiguous, or shared by all heads), else a contiguous copy."""
    length, dim = x.shape[1], x.shape[3]
    shared = x.stride() == (length * dim, dim, 0, 1)
    return packed(x) if not shared or x.data_ptr() % 16 else x


@lru_cache(4096)
def _launches(case: _Case) -> tuple[Launch, Launch]:
    """Return the forward and the backward launch."""
    block_k, block_v = (max(64, triton.next_power_of_2(dim)) for dim in (case.dim_k, case.dim_v))
    grid = triton.cdiv(case.length, _TILE), case.batch * case.heads
    values = (
        case.length, case.heads, *case.strides, case.scale, NORMALIZER_EPS, case.dim_k, case.dim_v, block_k, block_v, _TILE,
        case.decayed, case.taylor, case.normalized, "tf32x3" if case.dtype == torch.float32 else "tf32",
    )  # fmt: skip
    large = max(block_k, block_v) > 64
    forward = Launch(_quadratic_attention_forward, grid, *values, num_warps=4, num_stages=1 if large else 2)
    return forward, Launch(_quadratic_attention_backward, grid, *values, num_warps=8 if large else 4, num_stages=1)


@triton.jit
def _load(x, t, d, T, STRIDE, D: tl.constexpr, BD: tl.constexpr):
    mask = (t < T)[:, None]
    if D != BD:
        mask = mask & (d < D)[None, :]
    return tl.load(x + t[:, None] * STRIDE + d[None, :], mask=mask, other=0.0)


@triton.jit
def _store(x, value, t, d, T, STRIDE, D: tl.constexpr, BD: tl.constexpr):
    mask = (t < T)[:, None]
    if D != BD:
        mask = mask & (d < D)[None, :]
    tl.store(x + t[:, None] * STRIDE + d[None, :], value.to(x.dtype.element_ty), mask=mask)


@triton.jit
def _store_columns(x, value, t, d, T, STRIDE, D: tl.constexpr, BD: tl.constexpr):
    """Store value, [channels, tokens]."""
    mask = (t < T)[None, :]
    if D != BD:
        mask = mask & (d < D)[:, None]
    tl.store(x + t[None, :] * STRIDE + d[:, None], value.to(x.dtype.element_ty), mask=mask)


@triton.jit
def _factor(c_i, c_j, i, j, DECAYED: tl.constexpr):
    """Return exp(c_i - c_j) at [i, j] where j <= i, else 0."""
    seen = i[:, None] >= j[None, :]
    if DECAYED:
        distance = c_i[:, None] - c_j[None, :]
        return tl.where(seen, tl.exp2(tl.minimum(distance, 0.0, propagate_nan=tl.PropagateNan.ALL)), 0.0)
    return tl.where(seen, 1.0, 0.0)


@triton.jit
def _weight(s, TAYLOR: tl.constexpr):
    if TAYLOR:
        return 1.0 + s * (1.0 + 0.5 * s)
    return s


@triton.jit(do_not_specialize=["T"])
def _quadratic_attention_forward(
    q, k, v, c, y, den, T, H, stride, head_stride, scale, eps,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, B: tl.constexpr,
    DECAYED: tl.constexpr, TAYLOR: tl.constexpr, NORMALIZED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute one tile of queries."""
    start, bh = tl.program_id(0) * B, tl.program_id(1)
    row, head = (bh // H).to(tl.int64), bh % H
    t, ck, cv = start + tl.arange(0, B), tl.arange(0, BK), tl.arange(0, BV)
    shared = row * T * stride + head * head_stride
    q, k, v, y = q + shared, k + shared, v + (row * T * H + head) * V, y + (row * T * H + head) * V
    of_tokens = bh.to(tl.int64) * T
    query = _load(q, t, ck, T, stride, K, BK)
    c_t = t * 0.0
    if DECAYED:
        c_t = tl.load(c + of_tokens + t, mask=t < T, other=0.0)
    total = tl.zeros([B], tl.float32)
    out = tl.zeros([B, BV], tl.float32)
    for begin in range(0, start + B, B):
        u = begin + tl.arange(0, B)
        key, value = _load(k, u, ck, T, stride, K, BK), _load(v, u, cv, T, H * V, V, BV)
        c_u = u * 0.0
        if DECAYED:
            c_u = tl.load(c + of_tokens + u, mask=u < T, other=0.0)
        s = tl.dot(query, tl.trans(key), input_precision=PRECISION) * scale
        a = _weight(s, TAYLOR) * _factor(c_t, c_u, t, u, DECAYED)
        total += tl.sum(a, 1)
        out = tl.dot(a.to(value.dtype), value, out, input_precision=PRECISION)
    if NORMALIZED:
        out = out / (total + eps)[:, None]
        tl.store(den + of_tokens + t, total, mask=t < T)
    _store(y, out, t, cv, T, H * V, V, BV)


@triton.jit(do_not_specialize=["T"])
def _quadratic_attention_backward(
    dy, q, k, v, c, y, den, dq, dk, dv, dc, T, H, stride, head_stride, scale, eps,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, B: tl.constexpr,
    DECAYED: tl.constexpr, TAYLOR: tl.constexpr, NORMALIZED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of one tile of tokens, first as queries (dq), then as keys (dk, dv), and both terms of dc."""
    start, bh = tl.program_id(0) * B, tl.program_id(1)
    row, head = (bh // H).to(tl.int64), bh % H
    t, ck, cv = start + tl.arange(0, B), tl.arange(0, BK), tl.arange(0, BV)
    shared, values, keys = row * T * stride + head * head_stride, (row * T * H + head) * V, (row * T * H + head) * K
    q, k, v, dy, dv = q + shared, k + shared, v + values, dy + values, dv + values
    dq, dk = dq + keys, dk + keys
    of_tokens = bh.to(tl.int64) * T
    c_t = t * 0.0
    if DECAYED:
        c_t = tl.load(c + of_tokens + t, mask=t < T, other=0.0)

    query, grad = _load(q, t, ck, T, stride, K, BK), _load(dy, t, cv, T, H * V, V, BV)
    share, inner = t * 0.0 + 1.0, t * 0.0
    if NORMALIZED:
        y += values
        share = 1.0 / (tl.load(den + of_tokens + t, mask=t < T, other=1.0) + eps)
        inner = tl.sum(grad.to(tl.float32) * _load(y, t, cv, T, H * V, V, BV).to(tl.float32), 1)
    dc_queries = tl.zeros([B], tl.float32)
    d_query = tl.zeros([B, BK], tl.float32)
    for begin in range(0, start + B, B):
        u = begin + tl.arange(0, B)
        key, value = _load(k, u, ck, T, stride, K, BK), _load(v, u, cv, T, H * V, V, BV)
        c_u = u * 0.0
        if DECAYED:
            c_u = tl.load(c + of_tokens + u, mask=u < T, other=0.0)
        da = tl.dot(grad, tl.trans(value), input_precision=PRECISION)
        da = (da - inner[:, None]) * share[:, None] * _factor(c_t, c_u, t, u, DECAYED)
        if DECAYED or TAYLOR:
            s = tl.dot(query, tl.trans(key), input_precision=PRECISION) * scale
        if DECAYED:
            dc_queries += tl.sum(da * _weight(s, TAYLOR), 1)
        if TAYLOR:
            da *= 1.0 + s
        d_query = tl.dot((da * scale).to(key.dtype), key, d_query, input_precision=PRECISION)
    _store(dq, d_query, t, ck, T, H * K, K, BK)

    key, value = _load(k, t, ck, T, stride, K, BK), _load(v, t, cv, T, H * V, V, BV)
    dc_keys = tl.zeros([B], tl.float32)
    d_key, d_value = tl.zeros([BK, B], tl.float32), tl.zeros([BV, B], tl.float32)
    for begin in range(start, T, B):
        u = begin + tl.arange(0, B)
        query_u, grad_u = _load(q, u, ck, T, stride, K, BK), _load(dy, u, cv, T, H * V, V, BV)
        c_u = u * 0.0
        if DECAYED:
            c_u = tl.load(c + of_tokens + u, mask=u < T, other=0.0)
        share_u, inner_u = u * 0.0 + 1.0, u * 0.0
        if NORMALIZED:
            share_u = 1.0 / (tl.load(den + of_tokens + u, mask=u < T, other=1.0) + eps)
            inner_u = tl.sum(grad_u.to(tl.float32) * _load(y, u, cv, T, H * V, V, BV).to(tl.float32), 1)
        # Beyond the last token grad and query are 0.
        factor = _factor(c_u, c_t, u, t, DECAYED) * share_u[:, None]
        s = tl.dot(query_u, tl.trans(key), input_precision=PRECISION) * scale
        p = _weight(s, TAYLOR) * factor
        da = tl.dot(grad_u, tl.trans(value), input_precision=PRECISION) - inner_u[:, None]
        if DECAYED:
            dc_keys -= tl.sum(p * da, 0)
        d_value = tl.dot(tl.trans(grad_u), p.to(grad_u.dtype), d_value, input_precision=PRECISION)
        da *= factor * scale
        if TAYLOR:
            da *= 1.0 + s
        d_key = tl.dot(tl.trans(query_u), da.to(query_u.dtype), d_key, input_precision=PRECISION)
    _store_columns(dk, d_key, t, ck, T, H * K, K, BK)
    _store_columns(dv, d_value, t, cv, T, H * V, V, BV)
    if DECAYED:
        # The sums are to base 2.
        tl.store(dc + of_tokens + t, (dc_queries + dc_keys) * 0.6931471805599453, mask=t < T)
