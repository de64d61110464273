"""Kernels of the delta rule inside a chunk: sums of log decays, and the WY form.

b is the running sum of the log decays (base 2 here), B its total and s the scale.
    A_ij = beta_i sum_d k_id k_jd e^(b_id - b_jd) for j < i.
    P_ij = s sum_d q_id k_jd e^(b_id - b_jd) for j <= i.
    T = (I + A)^(-1),      w = T (beta k e^b),      u = T (beta v).      The updates of the state are N = u - w S.
No factor of an exponential overflows, whatever the decay. A level computes the pairs of a token i in the second half of a block
with a token j in its first half: with r = b at the end of the first half, e^(b_i - r) and e^(r - b_j) are at most 1. The last
level computes all pairs of its blocks, with one reference in their middle. Its blocks are the largest ones whose decay fits the
range, or 8 tokens. Log decays below `LIMIT` count as `LIMIT`.
"""

from __future__ import annotations

from ..gla.tiles import chunk_of, load, place, store
from ..launch import tl, triton
from .layer import softplus

# exp(-20) is below the rounding of float32, 2^-24. Over 4 tokens, half of the smallest block, exp(4 * 20) is inside its range.
LIMIT = tl.constexpr(-20.0)
# The largest decays to base 2: over a block with one reference in its middle; over a chunk with half of its decay as reference.
_RANGE = tl.constexpr(115.0)
_CHUNK_RANGE = tl.constexpr(160.0)
_LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def head_decay_kernel(g, b, table, T, H: tl.constexpr, C: tl.constexpr, PACKED: tl.constexpr):
    """Write b: [batch, length, heads] float32, sums over the tokens of a chunk up to each, to base 2."""
    n, bh = tl.program_id(0), tl.program_id(1)
    start, end = chunk_of(table, n, T, C, PACKED)
    t = start + tl.arange(0, C)
    decay = tl.load(place(g, bh, T, H, 1) + t * H, mask=t < end, other=0.0)
    tl.store(place(b, bh, T, H, 1) + t * H, tl.cumsum(_limited(decay), 0), mask=t < end)


@triton.jit
def channel_decay_kernel(
    g, a_log, bias, b, levels, table, T, H: tl.constexpr, N, D: tl.constexpr, BD: tl.constexpr, C: tl.constexpr,
    GATE: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """Write b: [batch, length, heads, D] float32, as `head_decay_kernel`. GATE: g are x of -exp(a_log) softplus(x + bias).

    levels: int32 [rows, chunks, blocks of channels], the levels that the block's decays need besides the last one.
    """
    n, block, bh = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    start, end = chunk_of(table, n, T, C, PACKED)
    d = block * BD + tl.arange(0, BD)
    g, b = place(g, bh, T, H, D) + d, place(b, bh, T, H, D) + d
    if GATE:
        rate, offset = rate_and_bias(a_log, bias, bh % H, d, D)
    until = tl.zeros([BD], tl.float32)
    of_half, of_quarter, before_half = until, until, until
    for part in tl.static_range(4):
        before = until
        if part == 2:
            before_half = until
        for i in range(part * (C // 4), (part + 1) * (C // 4)):
            t = start + i
            inside = (d < D) & (t < end)
            decay = tl.load(g + t * (H * D), mask=inside, other=0.0).to(tl.float32)
            if GATE:
                decay = tl.where(inside, rate * softplus(decay + offset), 0.0)
            until += _limited(decay)
            tl.store(b + t * (H * D), until, mask=inside)
        of_quarter = tl.minimum(of_quarter, until - before)
        if part % 2 == 1:
            of_half = tl.minimum(of_half, until - before_half)
    more = (tl.min(of_half, 0) < -_RANGE).to(tl.int32) + (tl.min(of_quarter, 0) < -_RANGE).to(tl.int32)
    needed = tl.where(tl.min(until, 0) < -_CHUNK_RANGE, 1 + more, 0)
    tl.store(levels + (bh * N + n) * tl.num_programs(1) + block, needed)


@triton.jit
def _limited(decay):
    """Return log decays to base 2, at least `LIMIT` to base e."""
    return tl.maximum(decay, LIMIT, propagate_nan=tl.PropagateNan.ALL) * _LOG2E


@triton.jit
def rate_and_bias(a_log, bias, h, d, D: tl.constexpr):
    """Return -exp(a_log) and bias of channels d of head h."""
    rate = -tl.exp(tl.load(a_log + h).to(tl.float32))
    return rate, tl.load(bias + h * D + d, mask=d < D, other=0.0).to(tl.float32)


@triton.jit
def levels_of(levels, bh, n, N, BLOCKS: tl.constexpr, B2: tl.constexpr):
    """Return the levels of a chunk besides the last one, 0 to 3."""
    block = tl.arange(0, B2)
    return tl.max(tl.load(levels + (bh * N + n) * BLOCKS + block, mask=block < BLOCKS, other=0), 0)


@triton.jit
def level_factors(b, until, total, level, last, start, end, d, row, H: tl.constexpr, K: tl.constexpr, C: tl.constexpr):
    """Return the factors of rows and of columns at a level, [C, BK].

    A level pairs the second half of a block of C >> level tokens with its first half; the last level pairs all its tokens.
    If the last one has one block, the reference is half of its decay.
    """
    size = C >> level
    t = tl.minimum(start + (row & -size) + size // 2 - 1, end - 1)
    reference = tl.load(b + t[:, None] * (H * K) + d[None, :], mask=(d < K)[None, :], other=0.0)
    distance = until - tl.where(last == 0, total * 0.5, reference)
    # Rows of the second half and columns of the first one have a factor of at most 1.
    near = tl.where(level == last, distance, -tl.abs(distance))
    return tl.exp2(near), tl.exp2(tl.where(level == last, -distance, near))


@triton.jit
def of_level(row, level, last, C: tl.constexpr):
    """Return where a pair i >= j of a chunk belongs to a level, [C, C]: its highest bit that differs decides."""
    apart, size = row[:, None] ^ row[None, :], C >> level
    return (apart < size) & ((apart >= size // 2) | (level == last))


@triton.jit
def scores_kernel(
    q, k, b, levels, beta, table, systems, scores, T, H: tl.constexpr, N, scale, K: tl.constexpr, BK: tl.constexpr,
    C: tl.constexpr, BLOCKS: tl.constexpr, PER_CHANNEL: tl.constexpr, PACKED: tl.constexpr, EVEN: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Write A to `systems`, float32, and P to `scores`."""
    rounded: tl.constexpr = scores.dtype.element_ty
    n, bh = tl.program_id(0), tl.program_id(1)
    start, end = chunk_of(table, n, T, C, PACKED)
    if start == end:
        return
    row = tl.arange(0, C)
    t = start + row
    q, k = place(q, bh, T, H, K), place(k, bh, T, H, K)
    b = place(b, bh, T, H, K if PER_CHANNEL else 1)
    strength = tl.load(place(beta, bh, T, H, 1) + t * H, mask=t < end, other=0.0).to(tl.float32)[:, None]
    lower, strict = row[:, None] >= row[None, :], row[:, None] > row[None, :]
    square = (bh.to(tl.int64) * N + n) * (C * C) + row[:, None] * C + row[None, :]
    last = 0
    if PER_CHANNEL:
        last = levels_of(levels, bh, n, N, (K + BK - 1) // BK, BLOCKS)
    for level in range(0, last + 1):
        a = tl.zeros([C, C], tl.float32)
        p = tl.zeros([C, C], tl.float32)
        for first in range(0, K, BK):
            d = first + tl.arange(0, BK)
            key = load(k, t, d, end, H, K, EVEN)
            query = load(q, t, d, end, H, K, EVEN)
            if PER_CHANNEL:
                until, total = decay_and_total(b, end, t, d, H, K, PER_CHANNEL, EVEN)
                rows, columns = level_factors(b, until, total, level, last, start, end, d, row, H, K, C)
                keys = tl.trans((key * columns).to(rounded))
                a = tl.dot((key.to(tl.float32) * strength * rows).to(rounded), keys, a, input_precision=PRECISION)
                p = tl.dot((query * rows).to(rounded), keys, p, input_precision=PRECISION)
            else:
                keys = tl.trans(key.to(rounded))
                a = tl.dot((key.to(tl.float32) * strength).to(rounded), keys, a, input_precision=PRECISION)
                p = tl.dot(query.to(rounded), keys, p, input_precision=PRECISION)
        mask = lower
        if PER_CHANNEL:
            mask = of_level(row, level, last, C)
        else:
            pair = pair_decay(b, t, end, H, lower)
            a *= pair
            p *= pair
        # The levels write disjoint parts; the first one also writes zeros above the diagonal.
        mask = mask | ((level == 0) & (row[:, None] < row[None, :]))
        real = (t < end)[:, None]
        tl.store(systems + square, tl.where(real & strict, a, 0.0), mask=mask)
        tl.store(scores + square, tl.where(real & lower, p * scale, 0.0).to(rounded), mask=mask)


@triton.jit
def diagonal_kernel(systems, diagonals, COUNT, C: tl.constexpr, SUB: tl.constexpr, LANES: tl.constexpr):
    """Write the inverses of the diagonal blocks of I + A, [rows, chunks, C / SUB, SUB, SUB], by forward substitution.

    Every lane computes one column of a block.
    """
    lane = tl.program_id(0).to(tl.int64) * LANES + tl.arange(0, LANES)
    block, column = lane // SUB, lane % SUB
    inside = block < COUNT
    a = systems + block // (C // SUB) * (C * C) + block % (C // SUB) * (SUB * C + SUB)
    d = diagonals + lane // SUB * (SUB * SUB) + column
    first = (column == 0).to(tl.float32)
    tl.store(d, first, mask=inside)
    solved = (first,)
    for i in tl.static_range(1, SUB):
        line = (column == i).to(tl.float32)
        for j in tl.static_range(0, i):
            line -= tl.load(a + (i * C + j), mask=inside, other=0.0) * solved[j]
        tl.store(d + i * SUB, line, mask=inside)
        solved = solved + (line,)  # type: ignore[assignment]  # noqa: RUF005


@triton.jit
def inverse_kernel(systems, diagonals, inverse, C: tl.constexpr, SUB: tl.constexpr):
    """Write (I + A)^(-1) to `inverse`: with D of `diagonal_kernel`, (I + D a)^(-1) D for the blocks a below the diagonal.

    X = D a has X^4 = 0: (I - X)(I + X^2) D. Powers of A itself would cancel.
    """
    row = tl.arange(0, C)
    base = tl.program_id(0).to(tl.int64) * (C * C)
    square = base + row[:, None] * C + row[None, :]
    same = (row[:, None] // SUB) == (row[None, :] // SUB)
    outside = tl.where(same, 0.0, tl.load(systems + square))
    d = tl.program_id(0).to(tl.int64) * (C * SUB) + row[:, None] * SUB + row[None, :] % SUB
    d_full = tl.where(same, tl.load(diagonals + d), 0.0)
    x = tl.dot(d_full, outside, input_precision="tf32x3")
    powers = tl.where(row[:, None] == row[None, :], 1.0, 0.0) - x
    powers += tl.dot(tl.dot(x, x, input_precision="tf32x3"), powers, input_precision="tf32x3")
    solved = tl.dot(powers, d_full, input_precision="tf32x3")
    tl.store(inverse + square, solved.to(inverse.dtype.element_ty))


@triton.jit
def wy_kernel(
    q, k, v, b, beta, table, inverse, w, u, q_start, k_end, T, H: tl.constexpr, N, scale, K: tl.constexpr, V: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr, PER_CHANNEL: tl.constexpr, PACKED: tl.constexpr,
    EVEN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Write w, u, q_start = s q e^b and k_end = k e^(B - b)."""
    rounded: tl.constexpr = inverse.dtype.element_ty
    n, bh = tl.program_id(0), tl.program_id(1)
    start, end = chunk_of(table, n, T, C, PACKED)
    if start == end:
        return
    row = tl.arange(0, C)
    t = start + row
    q, k, v, beta = place(q, bh, T, H, K), place(k, bh, T, H, K), place(v, bh, T, H, V), place(beta, bh, T, H, 1)
    w, q_start, k_end, u = (
        place(w, bh, T, H, K),
        place(q_start, bh, T, H, K),
        place(k_end, bh, T, H, K),
        place(u, bh, T, H, V),
    )
    b = place(b, bh, T, H, K if PER_CHANNEL else 1)
    strength = tl.load(beta + t * H, mask=t < end, other=0.0).to(tl.float32)[:, None]
    solved = tl.load(inverse + (bh.to(tl.int64) * N + n) * (C * C) + row[:, None] * C + row[None, :])
    for first in range(0, K, BK):
        d = first + tl.arange(0, BK)
        key = load(k, t, d, end, H, K, EVEN).to(tl.float32)
        until, total = decay_and_total(b, end, t, d, H, K, PER_CHANNEL, EVEN)
        grown = tl.exp2(until)
        tile = tl.dot(solved, (key * strength * grown).to(rounded), input_precision=PRECISION)
        store(w, tile, t, d, end, H, K, EVEN)
        store(k_end, key * tl.exp2(total - until), t, d, end, H, K, EVEN)
        query = load(q, t, d, end, H, K, EVEN).to(tl.float32)
        store(q_start, query * grown * scale, t, d, end, H, K, EVEN)
    for first in range(0, V, BV):
        d = first + tl.arange(0, BV)
        value = load(v, t, d, end, H, V, EVEN).to(tl.float32)
        tile = tl.dot(solved, (value * strength).to(rounded), input_precision=PRECISION)
        store(u, tile, t, d, end, H, V, EVEN)


@triton.jit
def decay_and_total(b, end, t, d, H: tl.constexpr, K: tl.constexpr, PER_CHANNEL: tl.constexpr, EVEN: tl.constexpr):
    """Return b [C, BK or 1] and B [1, BK or 1] of a chunk. For tokens behind its end b is B."""
    if PER_CHANNEL:
        total = tl.load(b + (end - 1) * (H * K) + d, mask=d < K, other=0.0)[None, :]
        until = load(b, t, d, end, H, K, EVEN)
    else:
        total = tl.load(b + (end - 1) * H + d * 0)[None, :]
        until = tl.load(b + t * H, mask=t < end, other=0.0)[:, None] + d[None, :] * 0.0
    return tl.where((t < end)[:, None], until, total), total


@triton.jit
def pair_decay(b, t, end, H: tl.constexpr, lower):
    """Return e^(b_i - b_j) of one decay per head for j <= i, 1 elsewhere."""
    until = tl.load(b + t * H, mask=t < end, other=0.0)
    return tl.exp2(tl.where(lower, until[:, None] - until[None, :], 0.0))
