"""LION for short sequences: tiles of (Q K^T * M) V, like flash attention without its running maximum.

Every factor of M is at most 1, so nothing needs rescaling, and tiles whose largest factor is under e^-20 are skipped.
A sequence that fits one tile (up to 128 tokens) takes one kernel forward and one backward, log decay and its running
sum included. Reference: `models.bidirectional` with form="parallel".

Backward, with A = Q K^T * M, P = A / den, dP = dY V^T and delta_i = dy_i . y_i:
    dA_ij = (dP_ij - delta_i) / den_i       dV = P^T dY       dQ = (dA * M) K       dK = (dA * M)^T Q
    dc_i = sum_j sign(i - j) (W_ij + W_ji)  with W = dA * A;  d log decay = reverse running sum of dc
Tiles are formed as [keys, queries] where the product of a transposed accumulator would be needed otherwise, which
Triton miscompiles on Hopper.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .lion_common import (
    NO_GATE,
    base,
    block,
    load_columns,
    load_log_decay,
    load_rows,
    load_scale,
    precision,
    row_inner,
    store_columns,
    store_gate_gradient,
    store_rows,
)

try:
    import triton
    import triton.language as tl
except ImportError as error:
    raise ImportError("LION's kernels need Triton (pip install triton); form='chunked' works without") from error


def forward(
    q: Tensor, k: Tensor, v: Tensor, gate: Tensor | None, segments: Tensor | None, mode: int, scaled: bool, eps: float
) -> tuple[Tensor, Tensor]:
    """Contiguous q, k: [batch, length, heads, head_dim_k], v likewise, gate: [batch, length, heads] -> y, row sums.

    segments: int32 [length], rising segment numbers (batch 1); mode: how gate is read (`lion_common`).
    Row sums: float32 [batch, heads, length], without eps.
    """
    batch, length, heads, dim_k = q.shape
    dim_v = v.shape[-1]
    y = torch.empty_like(v)
    den = torch.empty(batch, heads, length, dtype=torch.float32, device=q.device)
    rows, columns, warps, stages = _forward_config(length, dim_k, dim_v, q.dtype)
    single = length <= rows
    c = None if single or mode == NO_GATE else _running_sum(gate, mode)
    _forward[(triton.cdiv(length, rows), batch * heads)](
        q, k, v, gate, c, segments, y, den, length, heads, eps,
        dim_k, dim_v, block(dim_k), block(dim_v), rows, columns,
        mode, single, scaled, segments is not None, precision(q.dtype),
        num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return y, den


def backward(
    dy: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gate: Tensor | None,
    segments: Tensor | None,
    y: Tensor,
    den: Tensor,
    mode: int,
    scaled: bool,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Gradients of q, k, v and, float32, of gate."""
    batch, length, heads, dim_k = q.shape
    dim_v = v.shape[-1]
    dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    dgate = None if gate is None else torch.empty(gate.shape, dtype=torch.float32, device=q.device)
    rows, columns, warps, stages = _backward_config(length, dim_k, dim_v, q.dtype)
    shape = (length, heads, eps, dim_k, dim_v, block(dim_k), block(dim_v))
    flags = (mode, scaled, segments is not None, precision(q.dtype))
    if length <= rows:
        _backward_single[(batch * heads,)](
            dy, q, k, v, gate, segments, dq, dk, dv, dgate, *shape, rows, *flags, num_warps=warps, num_stages=1
        )
        return dq, dk, dv, dgate
    delta = row_inner(dy, y) if scaled else None
    c = dc = None
    if mode != NO_GATE:
        c, dc = _running_sum(gate, mode), torch.empty_like(den)
    _backward[(triton.cdiv(length, rows), batch * heads)](
        dy, q, k, v, c, segments, den, delta, dq, dk, dv, dc, *shape, rows, columns, *flags,
        num_warps=warps, num_stages=stages,
    )  # fmt: skip
    if dgate is not None:
        _gate_gradient[(batch * heads,)](dc, gate, dgate, length, heads, mode, 256, num_warps=1)
    return dq, dk, dv, dgate


def _forward_config(length: int, dim_k: int, dim_v: int, dtype: torch.dtype) -> tuple[int, int, int, int]:
    """Rows and columns of a tile, warps, pipeline stages."""
    dim = max(block(dim_k), block(dim_v))
    if dtype == torch.float32:
        return (64, 64, 4, 1) if dim <= 64 else (32, 32, 4, 1)
    if dim > 128:
        return 64, 64, 4, 1
    if length <= 64:
        return 64, 64, 4, 1
    return (128, 128, 8, 1) if length <= 128 else (128, 64, 8, 3)


def _backward_config(length: int, dim_k: int, dim_v: int, dtype: torch.dtype) -> tuple[int, int, int, int]:
    dim = max(block(dim_k), block(dim_v))
    if dtype == torch.float32:
        return (64, 64, 8, 1) if dim <= 64 else (32, 32, 4, 1)
    if dim > 128:
        return 64, 32, 8, 1
    if length <= 64:
        return 64, 64, 4, 1
    if length <= 128:
        return 128, 128, 8, 1
    return (64, 64, 4, 2) if dim <= 64 else (64, 32, 4, 2)


def _running_sum(gate: Tensor, mode: int) -> Tensor:
    """gate [batch, length, heads] -> running sum of the log decay, float32 [batch, heads, length]."""
    batch, length, heads = gate.shape
    c = torch.empty(batch, heads, length, dtype=torch.float32, device=gate.device)
    _sum_kernel[(batch * heads,)](gate, c, length, heads, mode, 256, num_warps=1)
    return c


@triton.jit
def _sum_kernel(gate, c, T, H, GATE: tl.constexpr, BT: tl.constexpr):
    bh = tl.program_id(0)
    gate = base(gate, bh, T, H, 1)
    total = 0.0
    for start in range(0, T, BT):
        t = start + tl.arange(0, BT)
        g = load_log_decay(gate, t, T, H, GATE)
        tl.store(c + bh.to(tl.int64) * T + t, total + tl.cumsum(g, 0), mask=t < T)
        total += tl.sum(g, 0)


@triton.jit
def _gate_gradient(dc, gate, dgate, T, H, GATE: tl.constexpr, BT: tl.constexpr):
    bh = tl.program_id(0)
    gate, dgate = base(gate, bh, T, H, 1), base(dgate, bh, T, H, 1)
    total = 0.0
    for step in range(0, tl.cdiv(T, BT)):
        t = (tl.cdiv(T, BT) - 1 - step) * BT + tl.arange(0, BT)
        x = tl.load(dc + bh.to(tl.int64) * T + t, mask=t < T, other=0.0)
        store_gate_gradient(dgate, gate, total + tl.cumsum(x, 0, reverse=True), t, T, H, GATE)
        total += tl.sum(x, 0)


@triton.jit
def _reach(c, segments, start, T, BM: tl.constexpr, BN: tl.constexpr, GATE: tl.constexpr, SEGMENTS: tl.constexpr):
    """First and one past the last token that the tile of tokens start .. start + BM - 1 must visit.

    Beyond them every factor is under e^-20 or belongs to another segment. c: running sums of this head.
    """
    low = 0
    high = T
    if GATE != 0 or SEGMENTS:
        end = tl.minimum(start + BM, T) - 1
        low, high = start, end + 1
        for begin in range(0, T, 512):
            t = begin + tl.arange(0, 512)
            left, right = t < start, (t > end) & (t < T)
            if GATE != 0:
                x = tl.load(c + t, mask=t < T, other=0.0)
                left = left & (tl.load(c + start) - x > -20.0)
                right = right & (x - tl.load(c + end) > -20.0)
            if SEGMENTS:
                s = tl.load(segments + t, mask=t < T, other=-1)
                left = left & (s == tl.load(segments + start))
                right = right & (s == tl.load(segments + end))
            low -= tl.sum(left.to(tl.int32), 0)
            high += tl.sum(right.to(tl.int32), 0)
        low = low // BN * BN
    return low, high


@triton.jit
def _factor(c_a, c_b, segments, a, b, T, GATE: tl.constexpr, SEGMENTS: tl.constexpr):
    """M at [a, b]: e^-|c_a - c_b| inside a segment, 0 outside."""
    factor = (a < T)[:, None] & (b < T)[None, :]
    if SEGMENTS:
        s_a = tl.load(segments + a, mask=a < T, other=-1)
        s_b = tl.load(segments + b, mask=b < T, other=-2)
        factor = factor & (s_a[:, None] == s_b[None, :])
    if GATE != 0:
        return tl.where(factor, tl.exp(-tl.abs(c_a[:, None] - c_b[None, :])), 0.0)
    return tl.where(factor, 1.0, 0.0)


@triton.jit
def _forward(
    q, k, v, gate, c, segments, y, den, T, H, eps,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    GATE: tl.constexpr, SINGLE: tl.constexpr, SCALED: tl.constexpr, SEGMENTS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    start, bh = tl.program_id(0) * BM, tl.program_id(1)
    row, dk, dv = start + tl.arange(0, BM), tl.arange(0, BK), tl.arange(0, BV)
    k, v = base(k, bh, T, H, K), base(v, bh, T, H, V)
    low, high = 0, BM
    c_row = tl.zeros([BM], tl.float32)
    if SINGLE:
        if GATE != 0:
            gate = base(gate, bh, T, H, 1)
            c_row = tl.cumsum(load_log_decay(gate, row, T, H, GATE), 0)
    else:
        if GATE != 0:
            c += bh.to(tl.int64) * T
            c_row = tl.load(c + row, mask=row < T, other=0.0)
        low, high = _reach(c, segments, start, T, BM, BN, GATE, SEGMENTS)
    query = load_rows(base(q, bh, T, H, K), row, dk, T, H, K, BK)
    total = tl.zeros([BM], tl.float32)
    out = tl.zeros([BM, BV], tl.float32)
    for begin in range(low, high, BN):
        column = begin + tl.arange(0, BN)
        key = load_columns(k, column, dk, T, H, K, BK)
        value = load_rows(v, column, dv, T, H, V, BV)
        c_column = tl.zeros([BN], tl.float32)
        if GATE != 0:
            if SINGLE:
                c_column = tl.cumsum(load_log_decay(gate, column, T, H, GATE), 0)
            else:
                c_column = tl.load(c + column, mask=column < T, other=0.0)
        a = tl.dot(query, key, input_precision=PRECISION)
        a *= _factor(c_row, c_column, segments, row, column, T, GATE, SEGMENTS)
        total += tl.sum(a, 1)
        out = tl.dot(a.to(value.dtype), value, out, input_precision=PRECISION)
    if SCALED:
        out = out / (total + eps)[:, None]
        tl.store(den + bh.to(tl.int64) * T + row, total, mask=row < T)
    store_rows(base(y, bh, T, H, V), out, row, dv, T, H, V, BV)


@triton.jit
def _backward_single(
    dy, q, k, v, gate, segments, dq, dk, dv, dgate, T, H, eps,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, BM: tl.constexpr,
    GATE: tl.constexpr, SCALED: tl.constexpr, SEGMENTS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The whole sequence in one tile; accumulators are [keys, queries]."""
    bh = tl.program_id(0)
    t, ck, cv = tl.arange(0, BM), tl.arange(0, BK), tl.arange(0, BV)
    query = load_columns(base(q, bh, T, H, K), t, ck, T, H, K, BK)
    key = load_rows(base(k, bh, T, H, K), t, ck, T, H, K, BK)
    grad = load_columns(base(dy, bh, T, H, V), t, cv, T, H, V, BV)
    value = load_rows(base(v, bh, T, H, V), t, cv, T, H, V, BV)
    c = tl.zeros([BM], tl.float32)
    if GATE != 0:
        gate, dgate = base(gate, bh, T, H, 1), base(dgate, bh, T, H, 1)
        c = tl.cumsum(load_log_decay(gate, t, T, H, GATE), 0)
    factor = _factor(c, c, segments, t, t, T, GATE, SEGMENTS)
    a = tl.dot(key, query, input_precision=PRECISION) * factor
    da = tl.dot(value, grad, input_precision=PRECISION)
    if SCALED:
        total = tl.sum(a, 0)
        scale = tl.where(total != 0.0, 1.0 / (total + eps), 0.0)
        delta = tl.sum(a * da, 0) * scale
        da = (da - delta[None, :]) * scale[None, :]
        p = (a * scale[None, :]).to(grad.dtype)
    else:
        p = a.to(grad.dtype)
    store_rows(
        base(dv, bh, T, H, V), tl.dot(p, tl.trans(grad), input_precision=PRECISION), t, cv, T, H, V, BV
    )
    if GATE != 0:
        w = tl.where(t[:, None] > t[None, :], a * da, tl.where(t[:, None] < t[None, :], -a * da, 0.0))
        dc = tl.sum(w, 1) - tl.sum(w, 0)
        store_gate_gradient(dgate, gate, tl.cumsum(dc, 0, reverse=True), t, T, H, GATE)
    ds = (da * factor).to(query.dtype)
    store_rows(
        base(dk, bh, T, H, K), tl.dot(ds, tl.trans(query), input_precision=PRECISION), t, ck, T, H, K, BK
    )
    store_columns(
        base(dq, bh, T, H, K), tl.dot(tl.trans(key), ds, input_precision=PRECISION), t, ck, T, H, K, BK
    )


@triton.jit
def _backward(
    dy, q, k, v, c, segments, den, delta, dq, dk, dv, dc, T, H, eps,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    GATE: tl.constexpr, SCALED: tl.constexpr, SEGMENTS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One tile of tokens, first as queries (dq), then as keys (dk, dv); both halves of dc."""
    start, bh = tl.program_id(0) * BM, tl.program_id(1)
    t, ck, cv = start + tl.arange(0, BM), tl.arange(0, BK), tl.arange(0, BV)
    q_, k_, v_, dy_ = base(q, bh, T, H, K), base(k, bh, T, H, K), base(v, bh, T, H, V), base(dy, bh, T, H, V)
    c_t, dc_t, c_u = tl.zeros([BM], tl.float32), tl.zeros([BM], tl.float32), tl.zeros([BN], tl.float32)
    if GATE != 0:
        c += bh.to(tl.int64) * T
        c_t = tl.load(c + t, mask=t < T, other=0.0)
    low, high = _reach(c, segments, start, T, BM, BN, GATE, SEGMENTS)

    query = load_rows(q_, t, ck, T, H, K, BK)
    grad = load_rows(dy_, t, cv, T, H, V, BV)
    scale, inner = load_scale(den, delta, bh, t, T, eps, SCALED)
    d_query = tl.zeros([BM, BK], tl.float32)
    for begin in range(low, high, BN):
        u = begin + tl.arange(0, BN)
        key = load_columns(k_, u, ck, T, H, K, BK)
        value = load_columns(v_, u, cv, T, H, V, BV)
        if GATE != 0:
            c_u = tl.load(c + u, mask=u < T, other=0.0)
        ds = tl.dot(grad, value, input_precision=PRECISION)
        ds = (ds - inner[:, None]) * scale[:, None] * _factor(c_t, c_u, segments, t, u, T, GATE, SEGMENTS)
        if GATE != 0:
            w = tl.dot(query, key, input_precision=PRECISION) * ds
            dc_t += tl.sum(tl.where(t[:, None] > u[None, :], w, tl.where(t[:, None] < u[None, :], -w, 0.0)), 1)
        d_query = tl.dot(ds.to(query.dtype), tl.trans(key), d_query, input_precision=PRECISION)
    store_rows(base(dq, bh, T, H, K), d_query, t, ck, T, H, K, BK)

    key = load_rows(k_, t, ck, T, H, K, BK)
    value = load_rows(v_, t, cv, T, H, V, BV)
    d_key, d_value = tl.zeros([BM, BK], tl.float32), tl.zeros([BM, BV], tl.float32)
    for begin in range(low, high, BN):
        u = begin + tl.arange(0, BN)
        query_u = load_columns(q_, u, ck, T, H, K, BK)
        grad_u = load_columns(dy_, u, cv, T, H, V, BV)
        scale_u, inner_u = load_scale(den, delta, bh, u, T, eps, SCALED)
        if GATE != 0:
            c_u = tl.load(c + u, mask=u < T, other=0.0)
        factor = _factor(c_t, c_u, segments, t, u, T, GATE, SEGMENTS)
        a = tl.dot(key, query_u, input_precision=PRECISION) * factor
        da = (tl.dot(value, grad_u, input_precision=PRECISION) - inner_u[None, :]) * scale_u[None, :]
        if GATE != 0:
            w = a * da
            dc_t += tl.sum(tl.where(t[:, None] > u[None, :], w, tl.where(t[:, None] < u[None, :], -w, 0.0)), 1)
        p = (a * scale_u[None, :]).to(grad_u.dtype)
        d_value = tl.dot(p, tl.trans(grad_u), d_value, input_precision=PRECISION)
        d_key = tl.dot((da * factor).to(query_u.dtype), tl.trans(query_u), d_key, input_precision=PRECISION)
    store_rows(base(dk, bh, T, H, K), d_key, t, ck, T, H, K, BK)
    store_rows(base(dv, bh, T, H, V), d_value, t, cv, T, H, V, BV)
    if GATE != 0:
        tl.store(dc + bh.to(tl.int64) * T + t, dc_t, mask=t < T)
