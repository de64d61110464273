"""LION-s' decay logits: their projection from the layer's input and running sums in one kernel, and the gradients.

    decay = x W^T (+ b)      dx = d_decay W      dW = d_decay^T x      db = sum of d_decay
The projection to a few heads is limited by memory: each kernel reads x once. Every program sums dW and db over its tokens. A
further kernel sums over programs in a fixed order.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from ..launch import Launch, tl, triton
from .common import LionCase, block, log_decay, per_token

# A tile holds all heads, at most this many.
LARGEST = 256
# Channels per tile; programs that share the tokens of the backward pass.
_CHANNELS, _PROGRAMS = 128, 128


def project(
    case: LionCase, chunk: int | None, x: Tensor, weight: Tensor, bias: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Return decay logits [batch, length, heads] in x's dtype, and with `chunk` also their `common.running_sum`.

    chunk: a power of two or None. x: [batch, length, size]; weight: [heads, size]; bias: [heads] or None.
    """
    decay = x.new_empty((case.batch, case.length, case.heads))
    sums = None if chunk is None else per_token(case, x)
    _project_launch(case, chunk, x.shape[-1])(x, weight, bias, decay, sums)
    return decay, sums


def project_backward(
    case: LionCase, d_decay: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return the gradients of x, weight and bias."""
    dx, dweight = torch.empty_like(x), torch.empty_like(weight)
    dbias = None if bias is None else torch.empty_like(bias)
    gradients, reduce, programs = _backward_launches(case, x.shape[-1])
    partial = x.new_empty((programs, weight.numel() + case.heads), dtype=torch.float32)
    gradients(d_decay, x, weight, dx, partial)
    reduce(partial, dweight, dbias)
    return dx, dweight, dbias


@lru_cache(4096)
def _project_launch(case: LionCase, chunk: int | None, size: int) -> Launch:
    rows = chunk or 64
    return Launch(
        _lion_logits_forward, (-(-case.length // rows), case.batch), case.length, case.heads, size, block(case.heads),
        min(_CHANNELS, block(size)), rows, case.mode, chunk is not None, case.flags()[-1],
        num_warps=4, num_stages=3 if _sixteen_bits(case) else 2,
    )  # fmt: skip


@lru_cache(4096)
def _backward_launches(case: LionCase, size: int) -> tuple[Launch, Launch, int]:
    tokens, rows, channels = case.batch * case.length, 64, min(_CHANNELS, block(size))
    programs = min(-(-tokens // rows), _PROGRAMS)
    gradients = Launch(
        _lion_logits_backward, (programs, -(-size // channels)), tokens, case.heads, size, block(case.heads), channels,
        rows, case.flags()[-1], num_warps=4, num_stages=3 if _sixteen_bits(case) else 2,
    )  # fmt: skip
    numbers = case.heads * size
    reduce = Launch(
        _lion_logits_reduce, (-(-(numbers + case.heads) // 64),), numbers, case.heads, programs, _PROGRAMS, num_warps=4
    )
    return gradients, reduce, programs


def _sixteen_bits(case: LionCase) -> bool:
    return case.decay_dtype is not None and case.decay_dtype.itemsize == 2


@triton.jit(do_not_specialize=["T"])
def _lion_logits_forward(
    x, weight, bias, decay, sums, T, H, S: tl.constexpr, BH: tl.constexpr, BS: tl.constexpr, C: tl.constexpr,
    DECAY: tl.constexpr, SUM: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    t, h, d = tl.program_id(0) * C + tl.arange(0, C), tl.arange(0, BH), tl.arange(0, BS)
    row = tl.program_id(1).to(tl.int64) * T + t
    logits = tl.zeros([C, BH], tl.float32)
    for start in range(0, S, BS):
        s = start + d
        tile = tl.load(x + row[:, None] * S + s[None, :], mask=(t < T)[:, None] & (s < S)[None, :], other=0.0)
        w = tl.load(weight + h[None, :] * S + s[:, None], mask=(h < H)[None, :] & (s < S)[:, None], other=0.0)
        logits = tl.dot(tile, w, logits, input_precision=PRECISION)
    logits = logits.to(decay.dtype.element_ty)
    inside = (t < T)[:, None] & (h < H)[None, :]
    tl.store(decay + row[:, None] * H + h[None, :], logits, mask=inside)
    if SUM:
        value = logits.to(tl.float32)
        if DECAY == 3:
            value += tl.load(bias + h, mask=h < H, other=0.0).to(tl.float32)[None, :]
        total = tl.cumsum(tl.where((t < T)[:, None], log_decay(value, DECAY), 0.0), 0)
        address = sums + (tl.program_id(1).to(tl.int64) * H + h[None, :]) * T + t[:, None]
        tl.store(address, total, mask=inside)


@triton.jit
def _lion_logits_backward(
    d_decay, x, weight, dx, partial, N, H, S: tl.constexpr, BH: tl.constexpr, BS: tl.constexpr, BT: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute dx and partial sums. partial: [program][weight, bias]; the programs of the first channels write the bias."""
    h, s = tl.arange(0, BH), tl.program_id(1) * BS + tl.arange(0, BS)
    of_weight = (h < H)[:, None] & (s < S)[None, :]
    w = tl.load(weight + h[:, None] * S + s[None, :], mask=of_weight, other=0.0)
    total, of_bias = tl.zeros([BH, BS], tl.float32), tl.zeros([BH], tl.float32)
    for start in range(tl.program_id(0) * BT, N, tl.num_programs(0) * BT):
        t = start + tl.arange(0, BT)
        row = t.to(tl.int64)[:, None]
        of_x = (t < N)[:, None] & (s < S)[None, :]
        tile = tl.load(x + row * S + s[None, :], mask=of_x, other=0.0)
        d = tl.load(d_decay + row * H + h[None, :], mask=(t < N)[:, None] & (h < H)[None, :], other=0.0)
        tl.store(dx + row * S + s[None, :], tl.dot(d, w, input_precision=PRECISION).to(dx.dtype.element_ty), mask=of_x)
        total = tl.dot(tl.trans(d), tile, total, input_precision=PRECISION)
        of_bias += tl.sum(d.to(tl.float32), 0)
    partial += tl.program_id(0) * (H * S + H)
    tl.store(partial + h[:, None] * S + s[None, :], total, mask=of_weight)
    if tl.program_id(1) == 0:
        tl.store(partial + H * S + h, of_bias, mask=h < H)


@triton.jit
def _lion_logits_reduce(partial, dweight, dbias, N, H, P, ROWS: tl.constexpr):
    i, rows = tl.program_id(0) * 64 + tl.arange(0, 64), tl.arange(0, ROWS)
    address = partial + rows[:, None] * (N + H) + i[None, :]
    total = tl.sum(tl.load(address, mask=(rows < P)[:, None] & (i < N + H)[None, :], other=0.0), 0)
    tl.store(dweight + i, total.to(dweight.dtype.element_ty), mask=i < N)
    if dbias is not None:
        tl.store(dbias + i - N, total.to(dbias.dtype.element_ty), mask=(i >= N) & (i < N + H))
