"""Token shift: the previous token of the same sequence, as the RWKV models mix it into each token."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ..operators.context_parallel import context_parallel_group, from_previous_rank, refuse_state, shard_segments
from ..operators.varlen import check_packed, last, previous, real_bounds


def token_shift(
    x: Tensor, mask: Tensor | None, cu_seqlens: Tensor | None, before: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return x_{t-1} for every token of x [batch, length, channels], and the last real token of every sequence.

    mask: [batch, length] bool, True for real tokens; padding counts as the outside of the sequence. cu_seqlens: [segments + 1]
    with batch 1. before: [batch or segments, channels], the second result of an earlier call; None for zeros.
    Under context parallelism x is the local shard, cu_seqlens is that of the whole sequence, and there is no `before`.
    """
    group = context_parallel_group()
    if group is not None:
        if before is not None:
            refuse_state()
        if mask is not None:
            x = x.masked_fill(~mask.unsqueeze(-1), 0.0)
        mask, before = None, from_previous_rank(group, x[:, -1])
        if cu_seqlens is not None:
            segments = shard_segments(cu_seqlens, x.shape[1], group)
            none = before.new_zeros(len(cu_seqlens) - 1, x.shape[2])
            cu_seqlens, before = segments.cu_seqlens, none.index_copy(0, segments.first, before * segments.from_left[0])
    if cu_seqlens is not None:
        check_packed(x, cu_seqlens)
    if mask is None or x.shape[1] == 0:
        return previous(x, before, cu_seqlens), last(x, before, cu_seqlens)
    x = x.masked_fill(~mask.unsqueeze(-1), 0.0)
    shifted = previous(x, None, cu_seqlens)
    if cu_seqlens is not None:
        return _in_segments(x, shifted, mask, cu_seqlens, before)
    place = torch.arange(x.shape[1], device=x.device)
    final = torch.where(mask, place, -1).amax(1)
    newest = x.gather(1, final.clamp_min(0)[:, None, None].expand(-1, 1, x.shape[2])).squeeze(1)
    if before is None:
        return shifted, newest
    before = before.to(x.dtype)
    first = (place == mask.int().argmax(1, keepdim=True)) & mask
    shifted = torch.where(first.unsqueeze(-1), before.unsqueeze(1), shifted)
    return shifted, torch.where((final < 0).unsqueeze(-1), before, newest)


def _in_segments(
    x: Tensor, shifted: Tensor, mask: Tensor, cu_seqlens: Tensor, before: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Compute `token_shift` of packed sequences with padding, whose x is zero. shifted: x_{t-1} without `before`."""
    first, end = real_bounds(mask, cu_seqlens)
    empty = (first == end).unsqueeze(-1)
    none = x.new_zeros(len(first), x.shape[2]) if before is None else before.to(x.dtype)
    if x.shape[1] == 0:
        return shifted, none
    newest = torch.where(empty, none, x[0, (end - 1).clamp_min(0)])
    if before is not None:
        # In a sequence without real tokens no token reads `before`. Its start may be after the last token.
        place = torch.where(empty.squeeze(-1), x.shape[1], first)
        shifted = F.pad(shifted, (0, 0, 0, 1)).index_copy(1, place, none.unsqueeze(0))[:, :-1]
    return shifted, newest
