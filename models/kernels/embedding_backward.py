"""Embedding look-up whose gradient does not sort the tokens: for small vocabularies with many repetitions.

In a tile, a matmul with the matrix of equal tokens sums the gradients of each id. Memory then receives one float32 atomic
addition per id and tile. The order of these additions depends on timing, and so do the last bits. PyTorch's gradient sorts all
tokens and sums each id's tokens sequentially, which is slow if one id is most of the text, as in the synthetic tasks.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from .launch import Launch, aligned, tl, triton

# Tokens and channels per tile.
_TOKENS, _CHANNELS = 64, 64


def look_up_repeated(tokens: Tensor, weight: Tensor, vectors: Tensor | None) -> Tensor:
    """Return the rows of weight [vocab_size, hidden_size] for tokens, plus vectors, as `models.layers.embedding.look_up`."""
    rows = _LookUp.apply(tokens, weight)
    return rows if vectors is None else rows + vectors


class _LookUp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tokens: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(tokens)
        ctx.shape, ctx.dtype = weight.shape, weight.dtype
        return F.embedding(tokens, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor]:
        (tokens,) = ctx.saved_tensors
        out = torch.zeros(ctx.shape, dtype=torch.float32, device=grad.device)
        if grad.numel():
            tokens = tokens.contiguous()
            _launch(grad.device, grad.dtype, tokens.dtype, tokens.numel(), ctx.shape[1])(tokens, aligned(grad), out)
        return None, out.to(ctx.dtype)


@lru_cache(4096)
def _launch(device: torch.device, dtype: torch.dtype, ids: torch.dtype, number: int, size: int) -> Launch:
    grid = triton.cdiv(number, _TOKENS), triton.cdiv(size, _CHANNELS)
    precision = "ieee" if dtype == torch.float32 else "tf32"
    return Launch(_look_up_gradient, grid, number, size, _TOKENS, _CHANNELS, precision, num_warps=4)


@triton.jit
def _look_up_gradient(tokens, grad, out, N, D, BT: tl.constexpr, BD: tl.constexpr, PRECISION: tl.constexpr):
    i, c = tl.arange(0, BT), tl.program_id(1) * BD + tl.arange(0, BD)
    t = tl.program_id(0).to(tl.int64) * BT + i
    # Positions after the last token are equal to no other.
    ids = tl.load(tokens + t, mask=t < N, other=-1)
    equal_ids = ids[:, None] == tl.load(tokens + t, mask=t < N, other=-2)[None, :]
    rows = tl.load(grad + t[:, None] * D + c[None, :], mask=(t < N)[:, None] & (c < D)[None, :], other=0.0)
    total = tl.dot(equal_ids.to(rows.dtype), rows, input_precision=PRECISION)
    first = tl.sum((equal_ids & (i[None, :] < i[:, None])).to(tl.int32), 1) == 0
    write = (first & (t < N))[:, None] & (c < D)[None, :]
    tl.atomic_add(out + ids.to(tl.int64)[:, None] * D + c[None, :], total, mask=write, sem="relaxed")
