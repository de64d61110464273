"""Device functions that the GLA kernels share: chunks of packed sequences, loads and stores of tiles, running sums.

A chunk is up to CHUNK tokens of one sequence. b is the running sum of its log decays, to base 2, and B their total. The matmul
form computes exp(b_i - b_j) as exp(b_i - B/2) exp(B/2 - b_j). It fits where no channel decays by more than MATMUL_LIMIT over the
chunk: the factors then stay far inside bfloat16's range. Any other chunk needs the exact form: `exact_form.py` computes the terms
between its tokens. The other terms have exp(b_i) and exp(B - b_j), at most 1.
"""

from __future__ import annotations

from ..launch import tl, triton


@triton.jit
def find_chunks(cu_seqlens, table, N, SEQUENCES, C: tl.constexpr, BS: tl.constexpr, B: tl.constexpr):
    """Write table [N + 1, 4] int32: start, end, sequence, 1 for its first chunk + 2 for its last. Last row: their number."""
    i = tl.program_id(0) * B + tl.arange(0, B)
    s = tl.arange(0, BS)
    start = tl.load(cu_seqlens + s, mask=s < SEQUENCES, other=0).to(tl.int32)
    end = tl.load(cu_seqlens + s + 1, mask=s < SEQUENCES, other=0).to(tl.int32)
    until = tl.cumsum((end - start + C - 1) // C, 0)
    total = tl.max(until, 0)
    earlier = until[None, :] <= i[:, None]
    sequence = tl.minimum(tl.sum(earlier.to(tl.int32), 1), SEQUENCES - 1)
    first = tl.max(tl.where(earlier, until[None, :], 0), 1)
    begin, limit = tl.load(cu_seqlens + sequence).to(tl.int32), tl.load(cu_seqlens + sequence + 1).to(tl.int32)
    token = begin + (i - first) * C
    stop = tl.minimum(token + C, limit)
    flags = (i == first).to(tl.int32) + 2 * (stop == limit).to(tl.int32)
    real = i < total
    place = table + i * 4
    tl.store(place, tl.where(real, token, 0), mask=i < N)
    tl.store(place + 1, tl.where(real, stop, 0), mask=i < N)
    tl.store(place + 2, tl.where(real, sequence, 0), mask=i < N)
    tl.store(place + 3, tl.where(real, flags, 0), mask=i < N)
    tl.store(table + N * 4, total)


@triton.jit
def chunk_of(table, n, T, C: tl.constexpr, PACKED: tl.constexpr):
    """Return the first token of chunk n and the one after its last; both equal where a packed row has fewer chunks."""
    if PACKED:
        return tl.load(table + n * 4), tl.load(table + n * 4 + 1)
    else:
        return n * C, tl.minimum(n * C + C, T)


@triton.jit
def place(x, bh, T, H, D):
    """Return the address of token 0 of batch element and head `bh` in x: [batch, T, H, D]."""
    return place_strided(x, bh, T, H, D, H * D)


@triton.jit
def place_strided(x, bh, T, H, D, STRIDE):
    """Return the address of `place` in a tensor whose tokens are STRIDE elements apart."""
    return x + (bh // H).to(tl.int64) * T * STRIDE + bh % H * D


@triton.jit
def load(x, t, d, end, H, D: tl.constexpr, EVEN: tl.constexpr, COLUMNS: tl.constexpr = False):
    """Load a tile [tokens, channels], or with COLUMNS [channels, tokens], at tokens t and channels d; 0 outside."""
    if COLUMNS:
        address, mask = x + t[None, :] * (H * D) + d[:, None], (t < end)[None, :] & (d < D)[:, None]
    else:
        address, mask = x + t[:, None] * (H * D) + d[None, :], (t < end)[:, None] & (d < D)[None, :]
    if EVEN:
        return tl.load(address)
    return tl.load(address, mask=mask, other=0.0)


@triton.jit
def store(x, value, t, d, end, H, D: tl.constexpr, EVEN: tl.constexpr):
    store_strided(x, value, t, d, end, H * D, D, EVEN)


@triton.jit
def load_strided(x, t, d, end, STRIDE, D: tl.constexpr, EVEN: tl.constexpr):
    """Load a tile at an address of `place_strided`."""
    address = x + t[:, None] * STRIDE + d[None, :]
    if EVEN:
        return tl.load(address)
    return tl.load(address, mask=(t < end)[:, None] & (d < D)[None, :], other=0.0)


@triton.jit
def store_strided(x, value, t, d, end, STRIDE, D: tl.constexpr, EVEN: tl.constexpr):
    """Store a tile at an address of `place_strided`."""
    address = x + t[:, None] * STRIDE + d[None, :]
    if EVEN:
        tl.store(address, value.to(x.dtype.element_ty))
    else:
        tl.store(address, value.to(x.dtype.element_ty), mask=(t < end)[:, None] & (d < D)[None, :])


@triton.jit
def state_at(x, i, ck, cv, V: tl.constexpr, K: tl.constexpr):
    """Return the addresses of a tile of state i in x: [..., K, V]."""
    return x + i.to(tl.int64) * (K * V) + ck[:, None] * V + cv[None, :]


@triton.jit
def clamp_to_base_2(x):
    """Return a log decay to base 2, at least -80 to base e: exp(-80) is zero beside 1. nan stays."""
    return tl.maximum(x.to(tl.float32), -80.0, propagate_nan=tl.PropagateNan.ALL) * 1.4426950408889634


@triton.jit
def logit_gradient(d_decay, d_key, decay):
    """Return da of a = logit(exp(16 g)), k = 1 - exp(g): (dg - dk exp(g)) (1 - exp(16 g)) / 16, with g to base 2."""
    x = decay * (16.0 * 0.6931471805599453)
    # 1 - exp(x) cancels for small x.
    small = -x * (1.0 + x * (0.5 + x * (1.0 / 6.0)))
    closed = tl.where(x > -0.03, small, 1.0 - tl.exp2(16.0 * decay))
    return (d_decay - d_key * tl.exp2(decay)) * closed * 0.0625


@triton.jit
def references(total, fits):
    """Return the exponents to which queries and keys are relative; fits: 1 if the matmul form fits the chunk, else 0."""
    half = total * 0.5
    return tl.where(fits == 1, half, 0.0), tl.where(fits == 1, half, total)


@triton.jit
def split_float32(x):
    """Return float32 x as the sum of two bfloat16, to 16 bits."""
    high = (x.to(tl.int32, bitcast=True) & -65536).to(tl.float32, bitcast=True)
    return high.to(tl.bfloat16), (x - high).to(tl.bfloat16)


@triton.jit
def load_triangle(triangle, C: tl.constexpr, BELOW: tl.constexpr = False):
    """Load ones below the diagonal and (unless BELOW) on it. Computing them takes longer than a matmul with them."""
    row = tl.arange(0, C)
    return tl.load(triangle + BELOW * C * C + row[:, None] * C + row[None, :])


@triton.jit
def running_sum(x, triangle_tile, REVERSE: tl.constexpr, EXACT: tl.constexpr):
    """Return sums of x [C, :] over the rows up to (REVERSE: from) each; unless EXACT by tensor cores instead of a scan.

    triangle_tile: of `load_triangle`, transposed for REVERSE.
    """
    if EXACT:
        return tl.cumsum(x, 0, reverse=REVERSE)
    else:
        high, low = split_float32(x)
        return tl.dot(triangle_tile, low, tl.dot(triangle_tile, high))
