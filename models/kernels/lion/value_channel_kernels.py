"""Kernels of LION's operator with one mask per channel of values; `value_channel.py` has the equations and the launches.

All of them compute `_both_sides`, or its gradient of the scores A = X Y^T, for one chunk of C tokens and BV channels of values:

    o_ic = sum_j A_ij W_ijc u_jc,    W_ijc = 2^-|b_ic - b_jc|,    b: running sum of the log decay in the chunk, to base 2

The pairs (i, j) of a chunk are split by level: the highest bit l in which i and j differ. One is in the left and one in the
right half of one block of 2^(l+1) tokens. With m the last token of the left half and f_l = 2^-|b - b_m|, W_ijc is f_l,ic f_l,jc.
Both factors are at most 1:

    o = diag(A) u + sum_l f_l * ((A . pairs of level l) (f_l * u)) + 2^b (X F) + 2^(B - b) (X G)

F and G are the states at the chunk's edges and B is its total. A token in the right half of its block sees only tokens on its
left, and a token in the left half only tokens on its right. So each level gives one direction per token.

If no channel's B is below -MATMUL_LIMIT, two matmuls replace those of the levels. With p = 2^(b - B / 2), W_ijc is p_ic / p_jc
for tokens j on the left. For those on the right it is p_jc / p_ic.

    o = diag(A) u + p * ((A . below the diagonal) (u / p)) + ((A . above) (p * u)) / p + 2^b (X F) + 2^(B - b) (X G)

float32 operands are multiplied in TF32. With 16-bit ones, gradients that nearly cancel would leave their rounding errors.
"""

from __future__ import annotations

from ..gla.tiles import clamp_to_base_2
from ..launch import tl, triton
from .common import base, load_rows, store_rows


@triton.jit(do_not_specialize=["T"])
def running_sum_kernel(g, b, T, W: tl.constexpr, C: tl.constexpr, BW: tl.constexpr):
    """Write the running sums of log decays g [batch, T, W] to base 2, restarting at every chunk."""
    t, c = tl.program_id(0) * C + tl.arange(0, C), tl.program_id(1) * BW + tl.arange(0, BW)
    start = tl.program_id(2).to(tl.int64) * T * W
    at, inside = t[:, None] * W + c[None, :], (t < T)[:, None] & (c < W)[None, :]
    decay = clamp_to_base_2(tl.load(g + start + at, mask=inside, other=0.0))
    tl.store(b + start + at, tl.cumsum(decay, 0), mask=inside)


@triton.jit(do_not_specialize=["T", "N"])
def states_kernel(
    x, u, y, r, b, states, T, N, H: tl.constexpr,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr, PARTS: tl.constexpr,
    BACKWARD: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Scan the chunks in one direction and write the state at the edge of each: X^T U, and with two parts also X^T W.

    Forward, X and U are keys and values, and W is 1. Backward, they are queries and the results of `_gradients`.
    """
    side, bh = tl.program_id(1), tl.program_id(2)
    row, ck, cv = tl.arange(0, C), tl.arange(0, BK), tl.program_id(0) * BV + tl.arange(0, BV)
    x, b = base(x, bh, T, H, K), base(b, bh, T, H, V)
    state, weight_state = tl.zeros([BK, BV], tl.float32), tl.zeros([BK, BV], tl.float32)
    inside = (ck < K)[:, None] & (cv < V)[None, :]
    for step in range(0, N):
        n = step + side * (N - 1 - 2 * step)
        t = n * C + row
        place = _state_at(states, side, 0, bh, n, N, ck, cv, K, V, PARTS)
        tl.store(place, state.to(states.dtype.element_ty), mask=inside)
        if PARTS == 2:
            place = _state_at(states, side, 1, bh, n, N, ck, cv, K, V, PARTS)
            tl.store(place, weight_state.to(states.dtype.element_ty), mask=inside)
        until, total = load_rows(b, t, cv, T, H, V, BV), _total(b, n, cv, T, H, V, C)
        rows = tl.trans(load_rows(x, t, ck, T, H, K, BK)).to(tl.float32)
        if BACKWARD:
            value, weight = _gradients(u, y, r, bh, t, cv, T, H, V, BV, PARTS)
        else:
            value = load_rows(base(u, bh, T, H, V), t, cv, T, H, V, BV).to(tl.float32)
            weight = tl.full([C, BV], 1.0, tl.float32)
        far = tl.exp2(tl.where(side == 0, total[None, :] - until, until))
        through = tl.exp2(total)[None, :]
        state = tl.dot(rows, value * far, state * through, input_precision=PRECISION)
        if PARTS == 2:
            weight_state = tl.dot(rows, weight * far, weight_state * through, input_precision=PRECISION)


@triton.jit(do_not_specialize=["T", "N"])
def output_kernel(
    q, k, v, b, states, o, y, r, e, T, N, H: tl.constexpr, eps,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr, LEVELS: tl.constexpr,
    MATMUL_LIMIT: tl.constexpr, PARTS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Write the outputs o; for the backward pass the outputs in float32 y, r = 1 / (normalizer + eps), and e (db = dy e)."""
    n, bh = tl.program_id(0), tl.program_id(2)
    t, ck, cv = n * C + tl.arange(0, C), tl.arange(0, BK), tl.program_id(1) * BV + tl.arange(0, BV)
    query = load_rows(base(q, bh, T, H, K), t, ck, T, H, K, BK)
    key = load_rows(base(k, bh, T, H, K), t, ck, T, H, K, BK)
    value = load_rows(base(v, bh, T, H, V), t, cv, T, H, V, BV).to(tl.float32)
    weight = tl.full([C, BV], 1.0, tl.float32)
    out, change, total, total_change = _both_sides(
        query, key, value, weight, base(b, bh, T, H, V), states, bh, n, t, ck, cv, T, N, H, K, V, BV, C,
        LEVELS, MATMUL_LIMIT, PARTS, PRECISION,
    )  # fmt: skip
    if PARTS == 2:
        scale = 1.0 / (total + eps)
        out *= scale
        change = (change - out * total_change) * scale
        if r is not None:
            store_rows(base(r, bh, T, H, V), scale, t, cv, T, H, V, BV)
            store_rows(base(y, bh, T, H, V), out, t, cv, T, H, V, BV)
    store_rows(base(o, bh, T, H, V), out, t, cv, T, H, V, BV)
    if e is not None:
        store_rows(base(e, bh, T, H, V), change, t, cv, T, H, V, BV)


@triton.jit(do_not_specialize=["T", "N"])
def value_gradient_kernel(
    dy, q, k, v, g, b, y, r, e, states, d_states, dv, dg, T, N, H: tl.constexpr,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr, LEVELS: tl.constexpr,
    MATMUL_LIMIT: tl.constexpr, PARTS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Write the gradients of the values and of the log decays."""
    n, bh = tl.program_id(0), tl.program_id(2)
    t, ck, cv = n * C + tl.arange(0, C), tl.arange(0, BK), tl.program_id(1) * BV + tl.arange(0, BV)
    query = load_rows(base(q, bh, T, H, K), t, ck, T, H, K, BK)
    key = load_rows(base(k, bh, T, H, K), t, ck, T, H, K, BK)
    grad, weight = _gradients(dy, y, r, bh, t, cv, T, H, V, BV, PARTS)
    d_value, change, _, weight_change = _both_sides(
        key, query, grad, weight, base(b, bh, T, H, V), d_states, bh, n, t, ck, cv, T, N, H, K, V, BV, C,
        LEVELS, MATMUL_LIMIT, PARTS, PRECISION,
    )  # fmt: skip
    store_rows(base(dv, bh, T, H, V), d_value, t, cv, T, H, V, BV)
    # Loaded here to save registers.
    d_sum = load_rows(base(v, bh, T, H, V), t, cv, T, H, V, BV).to(tl.float32) * change
    if PARTS == 2:
        d_sum += weight_change
    d_sum += load_rows(base(dy, bh, T, H, V), t, cv, T, H, V, BV).to(tl.float32) * load_rows(
        base(e, bh, T, H, V), t, cv, T, H, V, BV
    )
    # Sums over the tokens from each to the chunk's end. Pairs on both sides of that end are in the states there.
    d_decay = tl.sum(d_sum, 0)[None, :] - tl.cumsum(d_sum, 0) + d_sum
    if states is not None:
        inside = (ck < K)[:, None] & (cv < V)[None, :] & (n + 1 < N)
        across = tl.zeros([BV], tl.float32)
        for part in tl.static_range(PARTS):
            left = tl.load(_state_at(states, 0, part, bh, n + 1, N, ck, cv, K, V, PARTS), mask=inside, other=0.0)
            right = tl.load(_state_at(d_states, 1, part, bh, n, N, ck, cv, K, V, PARTS), mask=inside, other=0.0)
            across += tl.sum(left.to(tl.float32) * right.to(tl.float32), 0)
            left = tl.load(_state_at(d_states, 0, part, bh, n + 1, N, ck, cv, K, V, PARTS), mask=inside, other=0.0)
            right = tl.load(_state_at(states, 1, part, bh, n, N, ck, cv, K, V, PARTS), mask=inside, other=0.0)
            across += tl.sum(left.to(tl.float32) * right.to(tl.float32), 0)
        d_decay += across[None, :]
    # Smaller log decays count as -80.
    decay = load_rows(base(g, bh, T, H, V), t, cv, T, H, V, BV)
    store_rows(base(dg, bh, T, H, V), tl.where(decay < -80.0, 0.0, d_decay), t, cv, T, H, V, BV)


@triton.jit(do_not_specialize=["T", "N"])
def score_gradient_kernel(
    dy, q, k, v, b, y, r, states, d_states, dq, dk, T, N, H: tl.constexpr,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr, LEVELS: tl.constexpr,
    MATMUL_LIMIT: tl.constexpr, PARTS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Write the gradients of queries and keys."""
    n, bh = tl.program_id(0), tl.program_id(1)
    row, ck = tl.arange(0, C), tl.arange(0, BK)
    t = n * C + row
    v, b = base(v, bh, T, H, V), base(b, bh, T, H, V)
    d_scores, diagonal = tl.zeros([C, C], tl.float32), tl.zeros([C], tl.float32)
    d_query, d_key = tl.zeros([C, BK], tl.float32), tl.zeros([C, BK], tl.float32)
    for block in tl.static_range(0, V, BV):
        cv = block + tl.arange(0, BV)
        value = load_rows(v, t, cv, T, H, V, BV).to(tl.float32)
        grad, weight = _gradients(dy, y, r, bh, t, cv, T, H, V, BV, PARTS)
        until = load_rows(b, t, cv, T, H, V, BV)
        products = grad * value
        if PARTS == 2:
            products += weight
        diagonal += tl.sum(products, 1)
        total = _total(b, n, cv, T, H, V, C)
        right, left, levels = _factors(until, total, MATMUL_LIMIT, LEVELS)
        below = tl.dot(right * grad, tl.trans(left * value), input_precision=PRECISION)
        above = tl.dot(left * grad, tl.trans(right * value), input_precision=PRECISION)
        if PARTS == 2:
            below = tl.dot(right * weight, tl.trans(left), below, input_precision=PRECISION)
            above = tl.dot(left * weight, tl.trans(right), above, input_precision=PRECISION)
        d_scores += tl.where(row[:, None] > row[None, :], below, 0.0)
        d_scores += tl.where(row[:, None] < row[None, :], above, 0.0)
        for level in range(0, levels):
            factor = _factor(b, until, row, t, cv, T, H, V, BV, level)
            pairs = tl.dot(factor * grad, tl.trans(factor * value), input_precision=PRECISION)
            if PARTS == 2:
                pairs = tl.dot(factor * weight, tl.trans(factor), pairs, input_precision=PRECISION)
            d_scores += tl.where(_pairs(row, level), pairs, 0.0)
        if states is not None:
            inside = (ck < K)[:, None] & (cv < V)[None, :]
            for side in tl.static_range(2):
                near = tl.exp2(until if side == 0 else total[None, :] - until)
                for part in tl.static_range(PARTS):
                    place = _state_at(states, side, part, bh, n, N, ck, cv, K, V, PARTS)
                    state = tl.load(place, mask=inside, other=0.0)
                    place = _state_at(d_states, side, part, bh, n, N, ck, cv, K, V, PARTS)
                    d_state = tl.load(place, mask=inside, other=0.0)
                    reader = (grad if part == 0 else weight) * near
                    d_query = tl.dot(reader, tl.trans(state).to(tl.float32), d_query, input_precision=PRECISION)
                    reader = value * near if part == 0 else near
                    d_key = tl.dot(reader, tl.trans(d_state).to(tl.float32), d_key, input_precision=PRECISION)
    d_scores += tl.where(row[:, None] == row[None, :], diagonal[:, None], 0.0)
    key = load_rows(base(k, bh, T, H, K), t, ck, T, H, K, BK).to(tl.float32)
    d_query = tl.dot(d_scores, key, d_query, input_precision=PRECISION)
    store_rows(base(dq, bh, T, H, K), d_query, t, ck, T, H, K, BK)
    # The transposed gradient: Triton miscompiles a matmul with a transposed accumulator on Hopper.
    query = load_rows(base(q, bh, T, H, K), t, ck, T, H, K, BK).to(tl.float32)
    d_key += tl.trans(tl.dot(tl.trans(query), d_scores, input_precision=PRECISION))
    store_rows(base(dk, bh, T, H, K), d_key, t, ck, T, H, K, BK)


@triton.jit
def _both_sides(
    x, y, u, w, b, states, bh, n, t, ck, cv, T, N, H: tl.constexpr,
    K: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, C: tl.constexpr, LEVELS: tl.constexpr,
    MATMUL_LIMIT: tl.constexpr, PARTS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Return the sum over all tokens and that over the left minus that over the right, of u and (with two parts) of w.

    x, y: tiles [C, BK]; u, w: float32 tiles [C, BV]; b: a `base`. The diagonal is not in the differences.
    """
    row = tl.arange(0, C)
    until = load_rows(b, t, cv, T, H, V, BV)
    diagonal = tl.sum(x.to(tl.float32) * y.to(tl.float32), 1)[:, None]
    out, difference = diagonal * u, tl.zeros([C, BV], tl.float32)
    weight, weight_difference = diagonal * w, tl.zeros([C, BV], tl.float32)
    total = _total(b, n, cv, T, H, V, C)
    if states is not None:
        inside = (ck < K)[:, None] & (cv < V)[None, :]
        for side in tl.static_range(2):
            near = tl.exp2(until if side == 0 else total[None, :] - until)
            state = tl.load(_state_at(states, side, 0, bh, n, N, ck, cv, K, V, PARTS), mask=inside, other=0.0)
            term = near * tl.dot(x.to(state.dtype), state, input_precision=PRECISION)
            out += term
            difference += term if side == 0 else -term
            if PARTS == 2:
                state = tl.load(_state_at(states, side, 1, bh, n, N, ck, cv, K, V, PARTS), mask=inside, other=0.0)
                term = near * tl.dot(x.to(state.dtype), state, input_precision=PRECISION)
                weight += term
                weight_difference += term if side == 0 else -term
    scores = tl.dot(x, tl.trans(y), input_precision=PRECISION)
    right, left, levels = _factors(until, total, MATMUL_LIMIT, LEVELS)
    below = tl.where(row[:, None] > row[None, :], scores, 0.0)
    above = tl.where(row[:, None] < row[None, :], scores, 0.0)
    from_left = right * tl.dot(below, left * u, input_precision=PRECISION)
    from_right = left * tl.dot(above, right * u, input_precision=PRECISION)
    out += from_left + from_right
    difference += from_left - from_right
    if PARTS == 2:
        from_left = right * tl.dot(below, left * w, input_precision=PRECISION)
        from_right = left * tl.dot(above, right * w, input_precision=PRECISION)
        weight += from_left + from_right
        weight_difference += from_left - from_right
    for level in range(0, levels):
        factor = _factor(b, until, row, t, cv, T, H, V, BV, level)
        seen = tl.where(_pairs(row, level), scores, 0.0)
        # 1 in the right half of a block, whose tokens see those on their left, else -1.
        sign = (((row >> level) & 1) * 2 - 1).to(tl.float32)[:, None]
        term = factor * tl.dot(seen, factor * u, input_precision=PRECISION)
        out += term
        difference += sign * term
        if PARTS == 2:
            term = factor * tl.dot(seen, factor * w, input_precision=PRECISION)
            weight += term
            weight_difference += sign * term
    return out, difference, weight, weight_difference


@triton.jit
def _gradients(dy, y, r, bh, t, cv, T, H, V: tl.constexpr, BV: tl.constexpr, PARTS: tl.constexpr):
    """Return the gradients of numerator and normalizer in float32; with one part, dy twice."""
    grad = load_rows(base(dy, bh, T, H, V), t, cv, T, H, V, BV).to(tl.float32)
    weight = grad
    if PARTS == 2:
        grad *= load_rows(base(r, bh, T, H, V), t, cv, T, H, V, BV)
        weight = -grad * load_rows(base(y, bh, T, H, V), t, cv, T, H, V, BV)
    return grad, weight


@triton.jit
def _factors(until, total, MATMUL_LIMIT: tl.constexpr, LEVELS: tl.constexpr):
    """Return the factors of a pair's right and left token, p = 2^(b - B / 2) and 1 / p, [C, BV], and the levels left: 0.

    If B is below -MATMUL_LIMIT, the factors are 0 and all LEVELS are left. A condition around the matmuls would be simpler, but
    its code reads invalid addresses on Hopper (Triton 3.6).
    """
    fits = tl.min(total, 0) >= -MATMUL_LIMIT
    exponent = until - 0.5 * total[None, :]
    return tl.where(fits, tl.exp2(exponent), 0.0), tl.where(fits, tl.exp2(-exponent), 0.0), tl.where(fits, 0, LEVELS)


@triton.jit
def _factor(b, until, row, t, cv, T, H, V: tl.constexpr, BV: tl.constexpr, level):
    """Return f of a level, [C, BV]. In a block beyond T it is at most 1, like everywhere, and unused."""
    middle = t - row + (((row >> (level + 1)) << (level + 1)) + ((1 << level) - 1))
    return tl.exp2(-tl.abs(until - load_rows(b, middle, cv, T, H, V, BV)))


@triton.jit
def _pairs(row, level):
    """Return whether `level` is the highest bit in which two rows differ, [C, C]."""
    return ((row[:, None] ^ row[None, :]) >> level) == 1


@triton.jit
def _total(b, n, cv, T, H, V: tl.constexpr, C: tl.constexpr):
    """Return the log decay of chunk n, [BV]: the running sum at its last token."""
    return tl.load(b + (tl.minimum(n * C + C, T) - 1) * (H * V) + cv, mask=cv < V, other=0.0)


@triton.jit
def _state_at(states, side, part, bh, n, N, ck, cv, K: tl.constexpr, V: tl.constexpr, PARTS: tl.constexpr):
    """Return the addresses of a tile in states [batch * heads, 2 sides, PARTS, N, K, V]."""
    i = ((bh.to(tl.int64) * 2 + side) * PARTS + part) * N + n
    return states + i * (K * V) + ck[:, None] * V + cv[None, :]
