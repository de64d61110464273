"""LION for long sequences, linear in length: one pass forms the states between chunks, a second one the outputs.

With b, B a chunk's running sum and total of the log decay, v~ = [v, 1], F and G the states from the left and from the
right (`models.bidirectional`, which is also the reference, form="chunked"):
    forward     o_i = e^(b_i) q_i F + e^(B - b_i) q_i G + sum_j e^(-|b_i - b_j|) (q_i . k_j) v~_j
    backward    the same operator with its arguments permuted. With u_i = [dy_i, -(dy_i . y_i)] / den_i and F', G' the
                states of q and u instead of k and v~:
                dq = LION(u, v~, k) from F, G     dk = LION(v~, u, q) from F', G'     dv = LION(k, q, u) from F', G'
                d log decay_t sums W_ij = dA_ij A_ij over the pairs on both sides of t. They are taken apart by where
                their ends lie: both in this chunk; one here and one to the left or right, from the parts of dq and dk
                that F, G, F', G' gave; none here, e^B (<F, G'> + <F', G>). So no sum runs over more than a chunk.
States are stored as bfloat16 for bfloat16 inputs (what the tensor cores would round them to) and float32 otherwise.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .lion_common import (
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
    """As `lion_tile.forward`."""
    batch, length, heads, dim_k = q.shape
    dim_v = v.shape[-1]
    size, largest, warps = _config(dim_k, dim_v, q.dtype)
    y = torch.empty_like(v)
    den = torch.empty(batch, heads, length, dtype=torch.float32, device=q.device)
    states, sums = _states(k, v, gate, segments, None, None, mode, scaled, eps, size)
    block_k, block_v = block(dim_k, largest), block(dim_v, largest)
    _forward[(triton.cdiv(length, size), triton.cdiv(dim_v, block_v), batch * heads)](
        q, k, v, gate, segments, states, sums, y, den, length, heads, eps,
        dim_k, dim_v, block_k, block_v, size, mode, scaled, segments is not None, precision(q.dtype),
        num_warps=warps, num_stages=2,
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
    """As `lion_tile.backward`. The states of k and v are formed again: keeping them costs more memory than q."""
    batch, length, heads, dim_k = q.shape
    dim_v = v.shape[-1]
    size, largest, warps = _config(dim_k, dim_v, q.dtype)
    dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    dgate = None if gate is None else torch.empty(gate.shape, dtype=torch.float32, device=q.device)
    delta = row_inner(dy, y) if scaled else None
    states, sums = _states(k, v, gate, segments, None, None, mode, scaled, eps, size)
    d_states, d_sums = _states(q, dy, gate, segments, den, delta, mode, scaled, eps, size)
    _backward[(triton.cdiv(length, size), batch * heads)](
        dy, q, k, v, gate, segments, states, sums, d_states, d_sums, den, delta, dq, dk, dv, dgate,
        length, heads, eps, dim_k, dim_v, block(dim_k, largest), block(dim_v, largest), size,
        mode, scaled, segments is not None, precision(q.dtype), num_warps=warps, num_stages=1,
    )  # fmt: skip
    return dq, dk, dv, dgate


def _config(dim_k: int, dim_v: int, dtype: torch.dtype) -> tuple[int, int, int]:
    """Tokens of a chunk, most channels of a tile, warps."""
    dim = max(block(dim_k), block(dim_v))
    if dtype == torch.float32:
        return 32, 64, 4
    if dtype == torch.float16:
        return 64, 64, 4
    return (128, 64, 8) if dim <= 64 else (64, 128, 8)


def _states(
    x: Tensor,
    y: Tensor,
    gate: Tensor | None,
    segments: Tensor | None,
    den: Tensor | None,
    delta: Tensor | None,
    mode: int,
    scaled: bool,
    eps: float,
    size: int,
) -> tuple[Tensor, Tensor]:
    """States before each chunk from the left [0] and from the right [1]: of k and [v, 1], or (den given) of q and u.

    Returns [2, batch * heads, chunks, head_dim_k, head_dim_v] and, for the last column of v~ or u,
    float32 [2, batch * heads, chunks, head_dim_k].
    """
    batch, length, heads, dim_k = x.shape
    dim_v = y.shape[-1]
    chunks = triton.cdiv(length, size)
    dtype = torch.bfloat16 if x.dtype == torch.bfloat16 else torch.float32
    states = torch.empty(2, batch * heads, chunks, dim_k, dim_v, dtype=dtype, device=x.device)
    sums = torch.empty(2, batch * heads, chunks, dim_k, dtype=torch.float32, device=x.device)
    block_k, block_v = block(dim_k, 64), block(dim_v, 64)
    blocks = triton.cdiv(dim_k, block_k) * triton.cdiv(dim_v, block_v)
    _state_kernel[(blocks, 2, batch * heads)](
        x, y, gate, segments, den, delta, states, sums, length, heads, chunks, eps,
        dim_k, dim_v, block_k, block_v, size, mode, scaled, den is not None or delta is not None,
        segments is not None, precision(x.dtype), num_warps=4, num_stages=3,
    )  # fmt: skip
    return states, sums


@triton.jit
def _state_kernel(
    x, y, gate, segments, den, delta, states, sums, T, H, N, eps,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr,
    GATE: tl.constexpr, SCALED: tl.constexpr, BACKWARD: tl.constexpr, SEGMENTS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    blocks_v: tl.constexpr = (V + BV - 1) // BV
    bk, bv = tl.program_id(0) // blocks_v, tl.program_id(0) % blocks_v
    from_right, bh = tl.program_id(1), tl.program_id(2)
    ck, cv = bk * BK + tl.arange(0, BK), bv * BV + tl.arange(0, BV)
    x, y = base(x, bh, T, H, K), base(y, bh, T, H, V)
    if GATE != 0:
        gate = base(gate, bh, T, H, 1)
    here = (from_right * tl.num_programs(2) + bh).to(tl.int64) * N
    inside = (ck < K)[:, None] & (cv < V)[None, :]
    state = tl.zeros([BK, BV], tl.float32)
    column = tl.zeros([BK], tl.float32)
    for step in range(0, N):
        n = tl.where(from_right == 0, step, N - 1 - step)
        tl.store(
            states + (here + n) * (K * V) + ck[:, None] * V + cv[None, :],
            state.to(states.dtype.element_ty),
            mask=inside,
        )
        if SCALED:
            if bv == 0:
                tl.store(sums + (here + n) * K + ck, column, mask=ck < K)
        t = n * C + tl.arange(0, C)
        tile = load_columns(x, t, ck, T, H, K, BK)
        value = load_rows(y, t, cv, T, H, V, BV).to(states.dtype.element_ty)
        weight = tl.where(t < T, 1.0, 0.0)
        keep = 1.0
        if GATE != 0:
            g = load_log_decay(gate, t, T, H, GATE)
            b, total = tl.cumsum(g, 0), tl.sum(g, 0)
            weight = tl.exp(tl.where(from_right == 0, total - b, b))
            keep = tl.exp(total)
        if SEGMENTS:
            # A state belongs to the segment at its chunk's edge, and dies where that segment ends.
            first, last = n * C, tl.minimum(n * C + C, T) - 1
            edge = tl.load(segments + tl.where(from_right == 0, last, first))
            outer = tl.where(from_right == 0, first - 1, last + 1)
            neighbour = tl.load(segments + outer, mask=(outer >= 0) & (outer < T), other=-1)
            weight = tl.where(tl.load(segments + t, mask=t < T, other=-1) == edge, weight, 0.0)
            keep = tl.where(neighbour == edge, keep, 0.0)
        unit = tl.full([C], 1.0, tl.float32)
        if BACKWARD:
            scale, inner = load_scale(den, delta, bh, t, T, eps, SCALED)
            weight *= scale
            unit = -inner
        weighted = tile * weight[None, :]
        state = tl.dot(
            weighted.to(states.dtype.element_ty), value, state * keep, input_precision=PRECISION
        )
        if SCALED:
            column = column * keep + tl.sum(weighted * unit[None, :], 1)


@triton.jit
def _load_state(states, here, rows, columns, K: tl.constexpr, V: tl.constexpr):
    """A tile of the state at `here`, from the left for the first half of `states`."""
    mask = (rows < K)[:, None] & (columns < V)[None, :]
    return tl.load(states + here * (K * V) + rows[:, None] * V + columns[None, :], mask=mask, other=0.0)


@triton.jit
def _decays(gate, segments, n, t, T, H, GATE: tl.constexpr, SEGMENTS: tl.constexpr, C: tl.constexpr):
    """Factors of a chunk: M [C, C], of what comes from the left, from the right [C], and of what passes through."""
    mask = (t < T)[:, None] & (t < T)[None, :]
    left = tl.where(t < T, 1.0, 0.0)
    right = left
    through = 1.0
    if GATE != 0:
        g = load_log_decay(gate, t, T, H, GATE)
        b, total = tl.cumsum(g, 0), tl.sum(g, 0)
        left, right = left * tl.exp(b), right * tl.exp(total - b)
        through = tl.exp(total)
    if SEGMENTS:
        s = tl.load(segments + t, mask=t < T, other=-1)
        mask = mask & (s[:, None] == s[None, :])
        before = tl.load(segments + n * C - 1, mask=n > 0, other=-2)
        after = tl.load(segments + n * C + C, mask=n * C + C < T, other=-3)
        left, right = tl.where(s == before, left, 0.0), tl.where(s == after, right, 0.0)
        through = tl.where(before == after, through, 0.0)
    if GATE != 0:
        factor = tl.where(mask, tl.exp(-tl.abs(b[:, None] - b[None, :])), 0.0)
    else:
        factor = tl.where(mask, 1.0, 0.0)
    return factor, left, right, through


@triton.jit
def _forward(
    q, k, v, gate, segments, states, sums, y, den, T, H, eps,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr,
    GATE: tl.constexpr, SCALED: tl.constexpr, SEGMENTS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    n, bh = tl.program_id(0), tl.program_id(2)
    t, cv = n * C + tl.arange(0, C), tl.program_id(1) * BV + tl.arange(0, BV)
    q, k, v = base(q, bh, T, H, K), base(k, bh, T, H, K), base(v, bh, T, H, V)
    if GATE != 0:
        gate = base(gate, bh, T, H, 1)
    chunks = tl.num_programs(0)
    here = bh.to(tl.int64) * chunks + n
    there = here + tl.num_programs(2).to(tl.int64) * chunks
    factor, left, right, _ = _decays(gate, segments, n, t, T, H, GATE, SEGMENTS, C)
    a = tl.zeros([C, C], tl.float32)
    out = tl.zeros([C, BV], tl.float32)
    total = tl.zeros([C], tl.float32)
    for side in tl.static_range(2):
        near = here if side == 0 else there
        weight = left if side == 0 else right
        part, part_total = tl.zeros([C, BV], tl.float32), tl.zeros([C], tl.float32)
        for block_k in range(0, K, BK):
            ck = block_k + tl.arange(0, BK)
            query = load_rows(q, t, ck, T, H, K, BK)
            state = _load_state(states, near, ck, cv, K, V)
            part = tl.dot(query.to(state.dtype), state, part, input_precision=PRECISION)
            if SCALED:
                column = tl.load(sums + near * K + ck, mask=ck < K, other=0.0)
                part_total += tl.sum(query * column[None, :], 1)
        out += part * weight[:, None]
        total += part_total * weight
    for block_k in range(0, K, BK):
        ck = block_k + tl.arange(0, BK)
        query, key = load_rows(q, t, ck, T, H, K, BK), load_columns(k, t, ck, T, H, K, BK)
        a = tl.dot(query, key, a, input_precision=PRECISION)
    a *= factor
    value = load_rows(v, t, cv, T, H, V, BV)
    out = tl.dot(a.to(value.dtype), value, out, input_precision=PRECISION)
    if SCALED:
        total += tl.sum(a, 1)
        out = out / (total + eps)[:, None]
        if tl.program_id(1) == 0:
            tl.store(den + bh.to(tl.int64) * T + t, total, mask=t < T)
    store_rows(base(y, bh, T, H, V), out, t, cv, T, H, V, BV)


@triton.jit
def _backward(
    dy, q, k, v, gate, segments, states, sums, d_states, d_sums, den, delta, dq, dk, dv, dgate, T, H, eps,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr,
    GATE: tl.constexpr, SCALED: tl.constexpr, SEGMENTS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """All gradients of one chunk. Tiles of pairs are [keys, queries]."""
    n, bh = tl.program_id(0), tl.program_id(1)
    t = n * C + tl.arange(0, C)
    q, k, v, dy = base(q, bh, T, H, K), base(k, bh, T, H, K), base(v, bh, T, H, V), base(dy, bh, T, H, V)
    dq, dk, dv = base(dq, bh, T, H, K), base(dk, bh, T, H, K), base(dv, bh, T, H, V)
    if GATE != 0:
        gate, dgate = base(gate, bh, T, H, 1), base(dgate, bh, T, H, 1)
    chunks = tl.num_programs(0)
    here = bh.to(tl.int64) * chunks + n
    there = here + tl.num_programs(1).to(tl.int64) * chunks
    factor, left, right, through = _decays(gate, segments, n, t, T, H, GATE, SEGMENTS, C)
    scale, inner = load_scale(den, delta, bh, t, T, eps, SCALED)

    a, da = tl.zeros([C, C], tl.float32), tl.zeros([C, C], tl.float32)
    for block_k in range(0, K, BK):
        ck = block_k + tl.arange(0, BK)
        key = load_rows(k, t, ck, T, H, K, BK)
        a = tl.dot(key, load_columns(q, t, ck, T, H, K, BK), a, input_precision=PRECISION)
    for block_v in range(0, V, BV):
        cv = block_v + tl.arange(0, BV)
        value = load_rows(v, t, cv, T, H, V, BV)
        da = tl.dot(value, load_columns(dy, t, cv, T, H, V, BV), da, input_precision=PRECISION)
    a *= factor
    da = (da - inner[None, :]) * scale[None, :]
    p = (a * scale[None, :]).to(dy.dtype.element_ty)
    ds = (da * factor).to(q.dtype.element_ty)
    if GATE != 0:
        w = tl.where(t[:, None] > t[None, :], a * da, tl.where(t[:, None] < t[None, :], -a * da, 0.0))
        d_inside = tl.sum(w, 1) - tl.sum(w, 0)
        d_left, d_right = tl.zeros([C], tl.float32), tl.zeros([C], tl.float32)
        passing = 0.0

    for block_k in range(0, K, BK):
        ck = block_k + tl.arange(0, BK)
        key, query = load_rows(k, t, ck, T, H, K, BK), load_columns(q, t, ck, T, H, K, BK)
        d_query, d_key = tl.zeros([BK, C], tl.float32), tl.zeros([C, BK], tl.float32)
        for side in tl.static_range(2):
            near, far = (here, there) if side == 0 else (there, here)
            weight = left if side == 0 else right
            q_part, k_part = tl.zeros([BK, C], tl.float32), tl.zeros([C, BK], tl.float32)
            for block_v in range(0, V, BV):
                cv = block_v + tl.arange(0, BV)
                grad = load_columns(dy, t, cv, T, H, V, BV)
                state = _load_state(states, near, ck, cv, K, V)
                q_part = tl.dot(state, grad.to(state.dtype), q_part, input_precision=PRECISION)
                if GATE != 0:
                    opposite = _load_state(d_states, far, ck, cv, K, V)
                    passing += tl.sum(state.to(tl.float32) * opposite.to(tl.float32))
            if SCALED:
                column = tl.load(sums + near * K + ck, mask=ck < K, other=0.0)
                q_part -= column[:, None] * inner[None, :]
                if GATE != 0:
                    passing += tl.sum(column * tl.load(d_sums + far * K + ck, mask=ck < K, other=0.0))
            q_part *= (weight * scale)[None, :]
            if GATE != 0:
                edge = tl.sum(query * q_part, 0)
            d_query += q_part
            for block_v in range(0, V, BV):
                cv = block_v + tl.arange(0, BV)
                value = load_rows(v, t, cv, T, H, V, BV)
                state = _load_state(d_states, near, ck, cv, K, V)
                k_part = tl.dot(value.to(state.dtype), tl.trans(state), k_part, input_precision=PRECISION)
            if SCALED:
                k_part += tl.load(d_sums + near * K + ck, mask=ck < K, other=0.0)[None, :]
            k_part *= weight[:, None]
            d_key += k_part
            if GATE != 0:
                edge += tl.sum(key * k_part, 1)
                if side == 0:
                    d_left += edge
                else:
                    d_right += edge
        d_query = tl.dot(tl.trans(key), ds, d_query, input_precision=PRECISION)
        store_columns(dq, d_query, t, ck, T, H, K, BK)
        d_key = tl.dot(ds, tl.trans(query), d_key, input_precision=PRECISION)
        store_rows(dk, d_key, t, ck, T, H, K, BK)

    for block_v in range(0, V, BV):
        cv = block_v + tl.arange(0, BV)
        d_value = tl.zeros([C, BV], tl.float32)
        for side in tl.static_range(2):
            part = tl.zeros([C, BV], tl.float32)
            for block_k in range(0, K, BK):
                ck = block_k + tl.arange(0, BK)
                state = _load_state(d_states, here if side == 0 else there, ck, cv, K, V)
                key = load_rows(k, t, ck, T, H, K, BK).to(state.dtype)
                part = tl.dot(key, state, part, input_precision=PRECISION)
            d_value += part * (left if side == 0 else right)[:, None]
        grad = load_columns(dy, t, cv, T, H, V, BV)
        d_value = tl.dot(p, tl.trans(grad), d_value, input_precision=PRECISION)
        store_rows(dv, d_value, t, cv, T, H, V, BV)

    if GATE != 0:
        d_decay = passing * through + tl.cumsum(d_inside + d_left, 0, reverse=True) + tl.cumsum(d_right, 0) - d_right
        store_gate_gradient(dgate, gate, d_decay, t, T, H, GATE)
