"""Softmax of rows of logits: what the loss needs to know of each, and the gradient in place of the logits.

Reference: `models.head`. The logits, of 16 bits, are read once and once again from the cache; PyTorch's kernels would write
them out in float32 and pass over them six times. The two halves are apart because a vocabulary that is cut over several
processes is joined between them.
"""

# Kernels take pointers and scalars that have no Python type.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from .launch import Launch

try:
    import triton
    import triton.language as tl
except ImportError as error:
    raise ImportError("the kernels of the cross entropy need Triton: pip install triton") from error

_BLOCK = 4096


def row_statistics(logits: Tensor, bias: Tensor | None, label: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Of each row of z = logits + bias: max_j z_j, the first j that has it, sum_j exp(z_j - max), z[label].

    logits: [rows, vocab] contiguous; bias: [vocab] or None; label: int64 [rows], 0 <= label < vocab. Returns float32
    [rows] each, the second int64.
    """
    rows = len(logits)
    largest, mass, chosen = torch.empty(3, rows, dtype=torch.float32, device=logits.device)
    best = torch.empty(rows, dtype=torch.int64, device=logits.device)
    if rows:
        _launches(*_case(logits, bias))[0](logits, bias, label, largest, best, mass, chosen)
    return largest, best, mass, chosen


def gradient_in_place(logits: Tensor, bias: Tensor | None, label: Tensor, log_sum: Tensor, weight: Tensor) -> None:
    """logits <- weight (exp(z - log_sum) - [j == label]), z = logits + bias, in logits' dtype.

    log_sum, weight: float32 [rows]; label: int64 [rows], negative for a row whose label stands elsewhere.
    """
    if len(logits):
        _launches(*_case(logits, bias))[1](logits, bias, label, log_sum, weight)


def _case(logits: Tensor, bias: Tensor | None) -> tuple[torch.device, torch.dtype, torch.dtype | None, int, int]:
    return logits.device, logits.dtype, None if bias is None else bias.dtype, *logits.shape


@lru_cache(4096)
def _launches(
    device: torch.device, dtype: torch.dtype, bias: torch.dtype | None, rows: int, vocab: int
) -> tuple[Launch, Launch]:
    """Statistics and gradient."""
    statistics, gradient = (
        Launch(kernel, (rows,), vocab, bias is not None, _BLOCK, num_warps=8) for kernel in (_statistics, _gradient)
    )
    return statistics, gradient


@triton.jit
def _row(logits, bias, start, vocab, BIAS: tl.constexpr, BLOCK: tl.constexpr):
    j = start + tl.arange(0, BLOCK)
    z = tl.load(logits + j, mask=j < vocab, other=float("-inf")).to(tl.float32)
    if BIAS:
        z += tl.load(bias + j, mask=j < vocab, other=0.0).to(tl.float32)
    return j, z


@triton.jit
def _statistics(logits, bias, label, largest, best, mass, chosen, vocab, BIAS: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    logits += row.to(tl.int64) * vocab
    # One value a lane, joined at the end: a lane's maximum needs no other.
    top = tl.full((BLOCK,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    place = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, vocab, BLOCK):
        j, z = _row(logits, bias, start, vocab, BIAS, BLOCK)
        higher = z > top
        new = tl.where(higher, z, top)
        # -inf minus itself is nan: lanes that saw nothing yet, and logits of -inf, count nothing.
        before = tl.where(top == float("-inf"), 0.0, tl.exp(top - new))
        total = total * before + tl.where(z == float("-inf"), 0.0, tl.exp(z - new))
        place = tl.where(higher, j, place)
        top = new
    highest = tl.max(top, 0)
    tl.store(largest + row, highest)
    tl.store(best + row, tl.min(tl.where(top == highest, place, vocab), 0).to(tl.int64))
    tl.store(mass + row, tl.sum(tl.where(top == float("-inf"), total, total * tl.exp(top - highest)), 0))
    at = tl.load(label + row)
    z = tl.load(logits + at).to(tl.float32)
    if BIAS:
        z += tl.load(bias + at).to(tl.float32)
    tl.store(chosen + row, z)


@triton.jit
def _gradient(logits, bias, label, log_sum, weight, vocab, BIAS: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    logits += row.to(tl.int64) * vocab
    at, total, scale = tl.load(label + row), tl.load(log_sum + row), tl.load(weight + row)
    for start in range(0, vocab, BLOCK):
        j, z = _row(logits, bias, start, vocab, BIAS, BLOCK)
        p = (tl.exp(z - total) - tl.where(j == at, 1.0, 0.0)) * scale
        tl.store(logits + j, p.to(logits.dtype.element_ty), mask=j < vocab)
