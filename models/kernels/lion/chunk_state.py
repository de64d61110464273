"""LION's states between chunks in both directions: the first pass of the chunk kernels, and loads for the second one.

    forward     F_(n+1) = e^B F_n + sum_j e^(B - b_j) k_j v~_j        G_(n-1) = e^B G_n + sum_j e^(b_j) k_j v~_j
    backward    the same with q and u_i = [dy_i, -(dy_i . y_i)] / den_i
They are stored in bfloat16 for bfloat16 inputs, as the tensor cores read them, and else in float32.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from ..launch import Launch, tl, triton
from .common import (
    NO_DECAY,
    LionCase,
    base,
    block,
    load_columns,
    load_rows,
    load_scale,
    row_inner,
    row_scale,
)


def chunk_size(dtype: torch.dtype) -> int:
    """Return the tokens per chunk."""
    return 32 if dtype == torch.float32 else 64


def states_between_chunks(
    case: LionCase,
    backward: bool,
    x: Tensor,
    y: Tensor,
    b: Tensor | None,
    segments: Tensor | None,
    out: Tensor | None = None,
    den: Tensor | None = None,
    delta: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Return the states before each chunk from the left [0] and from the right [1]: of k and [v, 1], or (backward) q and u.

    Backward also fills delta with dy . y per row.
    Returns [2, batch * heads, chunks, head_dim_k, head_dim_v], and if normalized the normalizer's column of the states, float32
    [2, batch * heads, chunks, head_dim_k].
    """
    scan = _scan(case, backward)
    states = x.new_empty((*scan.shape, case.dim_v), dtype=scan.dtype)
    sums = x.new_empty(scan.shape, dtype=torch.float32) if case.normalized else None
    if scan.inner is not None:
        scan.inner(y, out, delta)
    if scan.splits == 1:
        scan.launches[0](x, y, b, segments, out, den, delta, None, None, states, sums)
        return states, sums
    splits, words = (*scan.shape[:2], scan.splits), case.dim_k * (case.dim_v + 1)
    ends = x.new_empty((*splits, words), dtype=torch.float32)
    passing = x.new_empty(splits, dtype=torch.float32)
    first, carry, second = scan.launches
    first(x, y, b, segments, out, den, delta, ends, passing, None, None)
    carry(ends, passing)
    second(x, y, b, segments, None, den, delta, ends, None, states, sums)
    return states, sums


class _Scan(NamedTuple):
    """Hold one pass of one case: splits per sequence, shape of the states without head_dim_v, their dtype, and launches.

    inner: the launch that computes delta if the state kernel cannot. launches: those of the state kernels.
    """

    splits: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    inner: Launch | None
    launches: tuple[Launch, ...]


def _inner_inside(case: LionCase) -> bool:
    """Return whether a program of the state kernel reads all channels of dy, and so can compute delta."""
    return case.dim_v <= _state_config(case.dim_k, case.dim_v, case.dtype)[1]


def _splits(chunks: int, programs: int) -> int:
    """Return the splits per sequence. A second pass is worth its time from four on; 512 programs fill an H200."""
    splits = min(512 // programs, chunks // 8)
    return splits if splits >= 4 else 1


@lru_cache(4096)
def _scan(case: LionCase, backward: bool) -> _Scan:
    """Return the launches that scan all chunks. Few long sequences are divided into splits, to fill the device.

    With several splits, a first kernel scans each from a zero state for its end state. A second kernel computes the incoming
    state of each split. A third one scans each split from its incoming state.
    """
    size = chunk_size(case.dtype)
    block_k, block_v, warps, stages, registers = _state_config(case.dim_k, case.dim_v, case.dtype)
    blocks = -(-case.dim_k // block_k) * -(-case.dim_v // block_v)
    chunks, programs = -(-case.length // size), 2 * case.batch * case.heads
    splits = _splits(chunks, programs * blocks)
    mode, *flags = case.flags()
    inside = backward and _inner_inside(case)

    def scan(ends: bool, inner: bool) -> Launch:
        return Launch(
            _lion_states, (blocks, 2 * splits, case.batch * case.heads),
            *case.sizes(), chunks, splits, case.dim_k, case.dim_v, block_k, block_v, size, splits > 1, ends,
            backward, inner, mode != NO_DECAY, *flags, num_warps=warps, num_stages=stages, maxnreg=registers,
        )  # fmt: skip

    launches: tuple[Launch, ...] = (scan(False, inside),)
    if splits > 1:
        words, heads = case.dim_k * (case.dim_v + 1), case.batch * case.heads
        carry = Launch(_lion_states_carry, (-(-words // 512), programs), splits, words, heads, 512, num_warps=4)
        launches = scan(True, inside), carry, scan(False, False)
    dtype = torch.bfloat16 if case.dtype == torch.bfloat16 else torch.float32
    inner = row_inner(case) if backward and case.normalized and not inside else None
    return _Scan(splits, (2, case.batch * case.heads, chunks, case.dim_k), dtype, inner, launches)


def _state_config(dim_k: int, dim_v: int, dtype: torch.dtype) -> tuple[int, int, int, int, int | None]:
    """Return block of keys, block of values, warps, pipeline stages, and the register limit per thread.

    A scan mostly waits for memory. With 128 registers four programs share a multiprocessor; with the compiler's choice of 175,
    two.
    """
    if dtype == torch.bfloat16:
        return block(dim_k, 64), block(dim_v, 128), 4, *((2, 128) if dim_v <= 64 else (3, None))
    return block(dim_k, 64), block(dim_v, 64), 4, 2, None


@triton.jit(do_not_specialize=["T"])
def _lion_states(
    x, y, b, segments, out, den, delta, ends, passing, states, sums, T, H, eps, N, S,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr, CUT: tl.constexpr,
    ENDS: tl.constexpr, BACKWARD: tl.constexpr, INNER: tl.constexpr, DECAY: tl.constexpr, NORMALIZED: tl.constexpr,
    SEGMENTS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Scan one of S splits of N chunks in one direction.

    ENDS: compute its end state only, from a zero state. Otherwise compute its states, from zero or, if a sequence is CUT, from
    the incoming state in `ends`.
    """
    blocks_v: tl.constexpr = (V + BV - 1) // BV
    rounded: tl.constexpr = tl.bfloat16 if x.dtype.element_ty == tl.bfloat16 else tl.float32
    bk, bv = tl.program_id(0) // blocks_v, tl.program_id(0) % blocks_v
    from_right, split, bh = tl.program_id(1) // S, tl.program_id(1) % S, tl.program_id(2)
    ck, cv = bk * BK + tl.arange(0, BK), bv * BV + tl.arange(0, BV)
    x, y = base(x, bh, T, H, K), base(y, bh, T, H, V)
    if INNER and NORMALIZED:
        out = base(out, bh, T, H, V)
    if DECAY:
        b += bh.to(tl.int64) * T
    direction = (from_right * tl.num_programs(2) + bh).to(tl.int64)
    here = direction * N
    inside = (ck < K)[:, None] & (cv < V)[None, :]
    state = tl.zeros([BK, BV], tl.float32)
    column = tl.zeros([BK], tl.float32)
    begin, count = 0, N
    if CUT:
        size = (N + S - 1) // S
        begin = split * size
        count = tl.minimum(size, N - begin)
        ends += (direction * S + split) * (K * V + K)
        if not ENDS:
            state = tl.load(ends + ck[:, None] * V + cv[None, :], mask=inside, other=0.0)
            column = tl.load(ends + K * V + ck, mask=ck < K, other=0.0)
    through = tl.full([], 1.0, tl.float32)
    for step in range(0, count):
        n = begin + tl.where(from_right == 0, step, count - 1 - step)
        if not ENDS:
            tl.store(
                states + (here + n) * (K * V) + ck[:, None] * V + cv[None, :],
                state.to(states.dtype.element_ty),
                mask=inside,
            )
            if NORMALIZED and bv == 0:
                tl.store(sums + (here + n) * K + ck, column, mask=ck < K)
        first, last = n * C, tl.minimum(n * C + C, T) - 1
        t = first + tl.arange(0, C)
        tile = load_columns(x, t, ck, T, H, K, BK)
        value = load_rows(y, t, cv, T, H, V, BV)
        if INNER and NORMALIZED:
            inner = tl.sum(value.to(tl.float32) * load_rows(out, t, cv, T, H, V, BV).to(tl.float32), 1)
            if from_right == 0 and bk == 0:
                tl.store(delta + bh.to(tl.int64) * T + t, inner, mask=t < T)
        value = value.to(rounded)
        weight = tl.where(t < T, 1.0, 0.0)
        keep = 1.0
        if DECAY:
            total, until = tl.load(b + last), tl.load(b + t, mask=t < T, other=0.0)
            weight = tl.exp2(tl.where(from_right == 0, total - until, until))
            keep = tl.exp2(total)
        if SEGMENTS:
            # A state contains only the segment at the edge of its chunk, and is cleared where that segment ends.
            edge = tl.load(segments + tl.where(from_right == 0, last, first))
            outer = tl.where(from_right == 0, first - 1, last + 1)
            neighbour = tl.load(segments + outer, mask=(outer >= 0) & (outer < T), other=-1)
            weight = tl.where(tl.load(segments + t, mask=t < T, other=-1) == edge, weight, 0.0)
            keep = tl.where(neighbour == edge, keep, 0.0)
        if BACKWARD:
            if INNER and NORMALIZED:
                scale = row_scale(den, bh, t, T, eps)
            else:
                scale, inner = load_scale(den, delta, bh, t, T, eps, NORMALIZED)
            weight *= scale
        weighted = tile * weight[None, :]
        state = tl.dot(weighted.to(rounded), value, state * keep, input_precision=PRECISION)
        if NORMALIZED:
            if BACKWARD:
                weighted *= -inner[None, :]
            column = column * keep + tl.sum(weighted, 1)
        through *= keep
    if ENDS:
        tl.store(ends + ck[:, None] * V + cv[None, :], state, mask=inside)
        if bv == 0:
            tl.store(ends + K * V + ck, column, mask=ck < K)
            tl.store(passing + direction * S + split, through)


@triton.jit
def _lion_states_carry(ends, passing, S, N, BH, B: tl.constexpr):
    """Replace end states of N numbers, [directions * BH, S, N], by the incoming state of each split."""
    direction = tl.program_id(1)
    i = tl.program_id(0) * B + tl.arange(0, B)
    state = tl.zeros([B], tl.float32)
    for step in range(0, S):
        place = direction.to(tl.int64) * S + tl.where(direction < BH, step, S - 1 - step)
        end = tl.load(ends + place * N + i, mask=i < N, other=0.0)
        tl.store(ends + place * N + i, state, mask=i < N)
        state = state * tl.load(passing + place) + end


@triton.jit
def load_state(states, here, rows, columns, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr):
    """Return a tile [keys, values] of the state at `here`."""
    address = states + here * (K * V) + rows[:, None] * V + columns[None, :]
    if K % BK == 0 and V % BV == 0:
        return tl.load(address)
    return tl.load(address, mask=(rows < K)[:, None] & (columns < V)[None, :], other=0.0)


@triton.jit
def take_rows(held, x, t, d, T, H, D: tl.constexpr, BD: tl.constexpr):
    """Return `held` if it is the only tile of its channels, else load the tile of channels d.

    Held tiles are loaded together at the start of a kernel: a load between two matmuls waits for memory.
    """
    if D <= BD:
        return held
    else:
        return load_rows(x, t, d, T, H, D, BD)


@triton.jit
def take_state(held, states, here, rows, columns, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr):
    """Return `held` if it is the only tile of the state, else load the tile of rows and columns."""
    if K <= BK and V <= BV:
        return held
    else:
        return load_state(states, here, rows, columns, K, V, BK, BV)


@triton.jit
def load_column(sums, here, rows, K: tl.constexpr, NORMALIZED: tl.constexpr):
    """Return the normalizer's column of the state at `here`."""
    if NORMALIZED:
        return tl.load(sums + here * K + rows, mask=rows < K, other=0.0)
    else:
        return tl.zeros([rows.shape[0]], tl.float32)


@triton.jit
def take_column(held, sums, here, rows, K: tl.constexpr, BK: tl.constexpr):
    """Return `held` if it is the only tile of the column, else load the rows."""
    if K <= BK:
        return held
    else:
        return load_column(sums, here, rows, K, True)


@triton.jit
def edge_factors(b, segments, n, t, T, C: tl.constexpr, DECAY: tl.constexpr, SEGMENTS: tl.constexpr):
    """Return the factors of tokens t on the states from the left and right of chunk n, and of the chunk on a state."""
    left = tl.where(t < T, 1.0, 0.0)
    right = left
    through = 1.0
    if DECAY != 0:
        until, total = tl.load(b + t, mask=t < T, other=0.0), tl.load(b + tl.minimum(n * C + C, T) - 1)
        left, right = left * tl.exp2(until), right * tl.exp2(total - until)
        through = tl.exp2(total)
    if SEGMENTS:
        s = tl.load(segments + t, mask=t < T, other=-1)
        before = tl.load(segments + n * C - 1, mask=n > 0, other=-2)
        after = tl.load(segments + n * C + C, mask=n * C + C < T, other=-3)
        left, right = tl.where(s == before, left, 0.0), tl.where(s == after, right, 0.0)
        through = tl.where(before == after, through, 0.0)
    return left, right, through
