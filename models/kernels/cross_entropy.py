"""Kernels of the cross entropy: statistics of each row of logits, and the gradient in place of the logits.

Reference: `models.operators.cross_entropy`. Both kernels read the 16-bit logits; PyTorch's kernels would write them in float32
and read or write them six times. They are two kernels because a vocabulary-parallel loss combines the statistics of all ranks
in between.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from .launch import Launch, aligned, tl, triton

# The most logits of a row that a program reads at once. A smaller vocabulary has a smaller block.
_BLOCK = 4096


def row_statistics(
    logits: Tensor, bias: Tensor | None, label: Tensor, first: bool = True
) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
    """Return four statistics of each row of z = logits + bias: max_j z_j, its first index, sum_j exp(z_j - max), z[label].

    logits: [rows, vocab], bias: [vocab] or None, contiguous. label: int64 [rows], 0 <= label < vocab, not checked.
    first: False returns None instead of the index. The results are float32 [rows], the index int64.
    """
    rows = len(logits)
    largest, mass, chosen = torch.empty(3, rows, dtype=torch.float32, device=logits.device)
    best = torch.empty(rows, dtype=torch.int64, device=logits.device) if first else None
    if rows:
        _launches(*_case(logits, bias), first)[0](logits, bias, label, largest, best, mass, chosen)
    return largest, best, mass, chosen


def gradient_in_place(logits: Tensor, bias: Tensor | None, label: Tensor, log_sum: Tensor, weight: Tensor) -> None:
    """Replace logits by weight (exp(z - log_sum) - [j == label]) with z = logits + bias, in logits' dtype.

    log_sum, weight: float32 [rows]; label: int64 [rows], negative if the label is in another vocabulary shard.
    """
    if len(logits):
        _launches(*_case(logits, bias))[1](logits, bias, label, log_sum, weight)


def add_matmul(total: Tensor, x: Tensor, y: Tensor) -> None:
    """Add the matmul x y to total in place. total: float32; x, y: 16 bits. The matmul is not rounded to 16 bits."""
    if total.device.type == "cuda" and total.dtype != x.dtype:
        torch.addmm(total, x, y, out_dtype=total.dtype, out=total)
    else:
        total += x @ y


def scaled(x: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return x times `factor`, a float32 scalar on the device, in `dtype`. One kernel computes it in float32."""
    x = aligned(x)
    out = torch.empty_like(x, dtype=dtype)
    if x.numel():
        _scale_launch(x.device, x.dtype, dtype, x.numel())(x, factor, out)
    return out


def _case(logits: Tensor, bias: Tensor | None) -> tuple[torch.device, torch.dtype, torch.dtype | None, int, int]:
    return logits.device, logits.dtype, None if bias is None else bias.dtype, *logits.shape


@lru_cache(4096)
def _launches(
    device: torch.device, dtype: torch.dtype, bias: torch.dtype | None, rows: int, vocab: int, first: bool = False
) -> tuple[Launch, Launch]:
    """Return the launches of the statistics and of the gradient."""
    # The statistics read four blocks per iteration.
    part = min(_BLOCK // 2, max(32, triton.next_power_of_2(-(-vocab // 4))))
    block = min(_BLOCK, max(32, triton.next_power_of_2(vocab)))
    statistics = Launch(_logit_statistics, (rows,), vocab, bias is not None, first, part, num_warps=max(1, part // 256))
    return statistics, Launch(_logit_gradient, (rows,), vocab, bias is not None, block, num_warps=max(1, block // 512))


@lru_cache(4096)
def _scale_launch(device: torch.device, dtype: torch.dtype, to: torch.dtype, numel: int) -> Launch:
    return Launch(_scale, (triton.cdiv(numel, 2048),), numel, 2048, num_warps=4)


@triton.jit
def _exp(x):
    """Return exp(x) without the denormal handling of `tl.exp`."""
    return tl.exp2(x * 1.4426950408889634)


@triton.jit
def _row(logits, bias, start, vocab, BIAS: tl.constexpr, BLOCK: tl.constexpr):
    j = start + tl.arange(0, BLOCK)
    z = tl.load(logits + j, mask=j < vocab, other=float("-inf")).to(tl.float32)
    if BIAS:
        z += tl.load(bias + j, mask=j < vocab, other=0.0).to(tl.float32)
    return j, z


@triton.jit
def _logit_statistics(
    logits, bias, label, largest, best, mass, chosen, vocab,
    BIAS: tl.constexpr, FIRST: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    logits += row.to(tl.int64) * vocab
    # One running maximum per lane, combined at the end.
    top = tl.full((BLOCK,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    place = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, vocab, 4 * BLOCK):
        # Four blocks at once need one rescaling of the previous sum.
        ja, za = _row(logits, bias, start, vocab, BIAS, BLOCK)
        jb, zb = _row(logits, bias, start + BLOCK, vocab, BIAS, BLOCK)
        jc, zc = _row(logits, bias, start + 2 * BLOCK, vocab, BIAS, BLOCK)
        jd, zd = _row(logits, bias, start + 3 * BLOCK, vocab, BIAS, BLOCK)
        high_ab, high_cd = tl.maximum(za, zb), tl.maximum(zc, zd)
        high = tl.maximum(high_ab, high_cd)
        if FIRST:
            at = tl.where(za == high, ja, tl.where(zb == high, jb, tl.where(zc == high, jc, jd)))
            place = tl.where(high > top, at, place)
        new = tl.maximum(top, high)
        # -inf - (-inf) is nan. Lanes without a value yet, and logits of -inf, add 0.
        than = tl.where(new == float("-inf"), 0.0, new)
        total = total * _exp(top - than) + _exp(za - than) + _exp(zb - than) + _exp(zc - than) + _exp(zd - than)
        top = new
    highest = tl.max(top, 0)
    tl.store(largest + row, highest)
    if FIRST:
        tl.store(best + row, tl.min(tl.where(top == highest, place, vocab), 0).to(tl.int64))
    tl.store(mass + row, tl.sum(tl.where(top == float("-inf"), total, total * _exp(top - highest)), 0))
    at = tl.load(label + row)
    z = tl.load(logits + at).to(tl.float32)
    if BIAS:
        z += tl.load(bias + at).to(tl.float32)
    tl.store(chosen + row, z)


@triton.jit
def _logit_gradient(logits, bias, label, log_sum, weight, vocab, BIAS: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    logits += row.to(tl.int64) * vocab
    at, total, scale = tl.load(label + row), tl.load(log_sum + row), tl.load(weight + row)
    for start in range(0, vocab, BLOCK):
        j, z = _row(logits, bias, start, vocab, BIAS, BLOCK)
        p = (_exp(z - total) - tl.where(j == at, 1.0, 0.0)) * scale
        tl.store(logits + j, p.to(logits.dtype.element_ty), mask=j < vocab)


@triton.jit
def _scale(x, factor, out, N, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    y = tl.load(x + i, mask=i < N, other=0.0).to(tl.float32) * tl.load(factor).to(tl.float32)
    tl.store(out + i, y.to(out.dtype.element_ty), mask=i < N)
