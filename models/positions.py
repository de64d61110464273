"""Positions of tokens in their sequences, for mixers whose maps depend on them."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def token_positions(
    x: Tensor, mask: Tensor | None, cu_seqlens: Tensor | None, start: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Positions that count real tokens, so that padding shifts nothing.

    x: [batch, length, ...], read for its shape. mask: [batch, length] bool, True for real tokens. cu_seqlens:
    [segments + 1] with batch 1: every segment counts for itself. start: [batch or segments] int, where each sequence
    goes on; None for 0.
    Returns the positions [batch, length], -1 before the first real token of a sequence that starts at 0, and the
    position of the next token [batch or segments].
    """
    batch, length = x.shape[:2]
    real = torch.ones(batch, length, dtype=torch.long, device=x.device) if mask is None else mask.long()
    seen = real.cumsum(1)
    if cu_seqlens is None:
        first = torch.zeros(batch, dtype=torch.long, device=x.device) if start is None else start
        return seen - 1 + first[:, None], first + real.sum(1)
    edges = F.pad(seen[0], (1, 0))[cu_seqlens.long()]
    offset = -edges[:-1] if start is None else start - edges[:-1]
    token = torch.arange(length, device=x.device)
    segment = torch.searchsorted(cu_seqlens[1:].to(token), token, right=True)
    return seen - 1 + offset[segment], edges[1:] + offset
