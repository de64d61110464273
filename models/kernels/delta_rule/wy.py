"""Kernels of the delta rule inside a chunk: sums of log decays, and the WY form.

With b the running sum of the log decays (base 2 here), B its total and s the scale:
    A_ij = beta_i sum_d k_id k_jd e^(b_id - b_jd), j < i      P_ij = s sum_d q_id k_jd e^(b_id - b_jd), j <= i
    T = (I + A)^(-1)      w = T (beta k e^b)      u = T (beta v)      the updates of the state are N = u - w S
Every exponent is formed so that no factor overflows, whatever the decay. Level by level, the second half of a block of 2 L
tokens meets its first half: with r = b at the end of the first half, e^(b_i - r) and e^(r - b_j) are at most 1. Blocks of
`SMALLEST` tokens use one reference in their middle; log decays below `LIMIT` count as `LIMIT`, so that 4 tokens stay in range.
"""

# Kernels take pointers and scalars that have no Python type.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

from __future__ import annotations

from ..gla.tiles import chunk_of, load, load_triangle, place, running_sum, store

try:
    import triton
    import triton.language as tl
except ImportError as error:
    raise ImportError("the delta rule kernels need Triton: pip install triton") from error

# The tokens of a block with one reference in its middle.
SMALLEST = tl.constexpr(8)
# exp(-20) is below the rounding of float32, 2^-24, and exp(4 * 20) is inside the range of float32 and bfloat16.
LIMIT = tl.constexpr(-20.0)
_LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def cumulative_decay_kernel(
    g, b, table, triangle, T, H: tl.constexpr, N, D: tl.constexpr, BD: tl.constexpr, C: tl.constexpr, PACKED: tl.constexpr,
    EVEN: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """Write b: [batch, length, heads, D] float32, sums over the tokens of a chunk up to each, to base 2."""
    n, block, bh = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    start, end = chunk_of(table, n, T, C, PACKED)
    if start == end:
        return
    t, d = start + tl.arange(0, C), block * BD + tl.arange(0, BD)
    decay = load(place(g, bh, T, H, D), t, d, end, H, D, BD, EVEN).to(tl.float32)
    decay = tl.maximum(decay, LIMIT, propagate_nan=tl.PropagateNan.ALL) * _LOG2E
    until = running_sum(decay, load_triangle(triangle, C), False, EXACT)
    store(place(b, bh, T, H, D), until, t, d, end, H, D, BD, EVEN)


@triton.jit
def reference_of(b, start, end, d, row, offset, SIZE: tl.constexpr, H: tl.constexpr, K: tl.constexpr, BK: tl.constexpr):
    """Load b at token `offset` of each row's block of SIZE tokens, or at the last token of the chunk: [C, BK]."""
    t = tl.minimum(start + row // SIZE * SIZE + offset, end - 1)
    return tl.load(b + t[:, None] * (H * K) + d[None, :], mask=(d < K)[None, :], other=0.0)


@triton.jit
def level_mask(row, HALF: tl.constexpr, TRANSPOSED: tl.constexpr):
    """Return where row i is in the second and column j in the first half of one block of 2 HALF tokens; or j and i."""
    same = (row[:, None] // (2 * HALF)) == (row[None, :] // (2 * HALF))
    if TRANSPOSED:
        return same & ((row[:, None] & HALF) == 0) & ((row[None, :] & HALF) != 0)
    else:
        return same & ((row[:, None] & HALF) != 0) & ((row[None, :] & HALF) == 0)


@triton.jit
def wy_kernel(
    q, k, v, b, beta, table, systems, scores, inverse, w, u, q_start, k_end, T, H: tl.constexpr, N, scale,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr, SUB: tl.constexpr,
    PER_CHANNEL: tl.constexpr, PACKED: tl.constexpr, EVEN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Write P to `scores`, T to `inverse`, w, u, q_start = s q e^b and k_end = k e^(B - b). `systems` is scratch, float32."""
    rounded: tl.constexpr = scores.dtype.element_ty
    n, bh = tl.program_id(0), tl.program_id(1)
    start, end = chunk_of(table, n, T, C, PACKED)
    if start == end:
        return
    row = tl.arange(0, C)
    t, column = start + row, tl.arange(0, BK)
    q, k, v, beta = place(q, bh, T, H, K), place(k, bh, T, H, K), place(v, bh, T, H, V), place(beta, bh, T, H, 1)
    D: tl.constexpr = K if PER_CHANNEL else 1
    b = place(b, bh, T, H, D)
    strength = tl.load(beta + t * H, mask=t < end, other=0.0).to(tl.float32)
    a = tl.zeros([C, C], tl.float32)
    p = tl.zeros([C, C], tl.float32)
    for first in tl.static_range(0, K, BK):
        d = first + column
        key = load(k, t, d, end, H, K, BK, EVEN).to(tl.float32)
        query = load(q, t, d, end, H, K, BK, EVEN).to(tl.float32)
        if PER_CHANNEL:
            until = load(b, t, d, end, H, K, BK, EVEN)
            for level in tl.static_range(3):
                reference = reference_of(b, start, end, d, row, (C >> (level + 1)) - 1, C >> level, H, K, BK)
                factor = tl.exp2(-tl.abs(until - reference))
                columns = tl.trans((key * factor).to(rounded))
                mask = level_mask(row, C >> (level + 1), False)
                a_level = tl.dot((key * strength[:, None] * factor).to(rounded), columns, input_precision=PRECISION)
                p_level = tl.dot((query * factor).to(rounded), columns, input_precision=PRECISION)
                a += tl.where(mask, a_level, 0.0)
                p += tl.where(mask, p_level, 0.0)
            reference = reference_of(b, start, end, d, row, SMALLEST // 2 - 1, SMALLEST, H, K, BK)
            grown = tl.exp2(until - reference)
            columns = tl.trans((key * tl.exp2(reference - until)).to(rounded))
            mask = (row[:, None] // SMALLEST) == (row[None, :] // SMALLEST)
            a_level = tl.dot((key * strength[:, None] * grown).to(rounded), columns, input_precision=PRECISION)
            p_level = tl.dot((query * grown).to(rounded), columns, input_precision=PRECISION)
            a += tl.where(mask, a_level, 0.0)
            p += tl.where(mask, p_level, 0.0)
        else:
            columns = tl.trans(key.to(rounded))
            a = tl.dot((key * strength[:, None]).to(rounded), columns, a, input_precision=PRECISION)
            p = tl.dot(query.to(rounded), columns, p, input_precision=PRECISION)
    real = (t < end)[:, None]
    lower, strict = real & (row[:, None] >= row[None, :]), real & (row[:, None] > row[None, :])
    if not PER_CHANNEL:
        pair = _pair_decay(b, t, end, H, lower)
        a *= pair
        p *= pair
    a = tl.where(strict, a, 0.0)
    square = (bh.to(tl.int64) * N + n) * (C * C) + row[:, None] * C + row[None, :]
    tl.store(scores + square, tl.where(lower, p * scale, 0.0).to(rounded))
    solved = _inverse(a, systems, (bh.to(tl.int64) * N + n) * (C * C), row, C, SUB).to(rounded)
    tl.store(inverse + square, solved)
    for first in tl.static_range(0, K, BK):
        d = first + column
        key = load(k, t, d, end, H, K, BK, EVEN).to(tl.float32)
        query = load(q, t, d, end, H, K, BK, EVEN).to(tl.float32)
        until, total = decay_and_total(b, start, end, t, d, H, K, BK, PER_CHANNEL, EVEN)
        grown = tl.exp2(until)
        tile = tl.dot(solved, (key * strength[:, None] * grown).to(rounded), input_precision=PRECISION)
        store(place(w, bh, T, H, K), tile, t, d, end, H, K, BK, EVEN)
        store(place(q_start, bh, T, H, K), query * grown * scale, t, d, end, H, K, BK, EVEN)
        store(place(k_end, bh, T, H, K), key * tl.exp2(total - until), t, d, end, H, K, BK, EVEN)
    column = tl.arange(0, BV)
    for first in tl.static_range(0, V, BV):
        d = first + column
        value = load(v, t, d, end, H, V, BV, EVEN).to(tl.float32)
        tile = tl.dot(solved, (value * strength[:, None]).to(rounded), input_precision=PRECISION)
        store(place(u, bh, T, H, V), tile, t, d, end, H, V, BV, EVEN)


@triton.jit
def decay_and_total(
    b, start, end, t, d, H: tl.constexpr, K: tl.constexpr, BK: tl.constexpr, PER_CHANNEL: tl.constexpr, EVEN: tl.constexpr
):
    """Return b [C, BK or 1] and B [1, BK or 1] of a chunk. For tokens behind its end b is B."""
    if PER_CHANNEL:
        total = tl.load(b + (end - 1) * (H * K) + d, mask=d < K, other=0.0)[None, :]
        until = load(b, t, d, end, H, K, BK, EVEN)
    else:
        total = tl.load(b + (end - 1) * H + d * 0)[None, :]
        until = tl.load(b + t * H, mask=t < end, other=0.0)[:, None] + d[None, :] * 0.0
    return tl.where((t < end)[:, None], until, total), total


@triton.jit
def _pair_decay(b, t, end, H: tl.constexpr, lower):
    """Return e^(b_i - b_j) of one decay per head for j <= i, 1 elsewhere."""
    until = tl.load(b + t * H, mask=t < end, other=0.0)
    return tl.exp2(tl.where(lower, until[:, None] - until[None, :], 0.0))


@triton.jit
def _inverse(a, systems, base, row, C: tl.constexpr, SUB: tl.constexpr):
    """Return (I + a)^(-1) of the strictly lower triangular a [C, C] in float32.

    Diagonal blocks of SUB rows by forward substitution, D; then (I + D a')^(-1) D with the blocks a' below them, where
    X = D a' has X^4 = 0: (I - X)(I + X^2) D. Powers of `a` itself would cancel.
    """
    square = base + row[:, None] * C + row[None, :]
    tl.store(systems + square, a)
    tl.debug_barrier()
    block, i = tl.arange(0, C // SUB), tl.arange(0, SUB)
    diagonal = systems + base + block[:, None, None] * (SUB * C + SUB) + i[None, :, None] * C + i[None, None, :]
    below = tl.load(diagonal)
    d = (i[None, :, None] == i[None, None, :]).to(tl.float32) + below * 0.0
    for step in range(1, SUB):
        here = i[None, :, None] == step
        line = tl.sum(tl.where(here, below, 0.0), 1)
        d -= tl.where(here, tl.sum(line[:, :, None] * d, 1)[:, None, :], 0.0)
    tl.debug_barrier()
    tl.store(diagonal, d)
    tl.debug_barrier()
    both = tl.load(systems + square)
    same = (row[:, None] // SUB) == (row[None, :] // SUB)
    d_full, outside = tl.where(same, both, 0.0), tl.where(same, 0.0, both)
    x = tl.dot(d_full, outside, input_precision="tf32x3")
    powers = tl.where(row[:, None] == row[None, :], 1.0, 0.0) - x
    powers += tl.dot(tl.dot(x, x, input_precision="tf32x3"), powers, input_precision="tf32x3")
    return tl.dot(powers, d_full, input_precision="tf32x3")
