"""Sequences of different lengths in one tensor: packed along the length (`cu_seqlens`), or padded (`mask`)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ..recompute import recomputable


def check_packed(x: Tensor, cu_seqlens: Tensor) -> None:
    """Raise ValueError unless x [batch, length, ...] is one row that cu_seqlens covers (`check_cu_seqlens`)."""
    if x.shape[0] != 1:
        raise ValueError(f"cu_seqlens needs batch 1 with the segments packed along the length, got {list(x.shape)}")
    check_cu_seqlens(cu_seqlens, x.shape[1])


def check_cu_seqlens(cu_seqlens: Tensor, length: int) -> None:
    """Raise ValueError unless cu_seqlens [segments + 1] rises from 0 to the length. On CUDA the values are not read."""
    # Reading a CUDA tensor would synchronise with the device.
    if not cu_seqlens.is_cpu:
        return
    if int(cu_seqlens[0]) != 0 or int(cu_seqlens[-1]) != length:
        raise ValueError(
            f"cu_seqlens runs from {int(cu_seqlens[0])} to {int(cu_seqlens[-1])}: must run from 0 to the length {length}"
        )
    if (falls := (cu_seqlens.diff() < 0).nonzero()).numel():
        at = int(falls[0, 0])
        raise ValueError(
            f"cu_seqlens falls from {int(cu_seqlens[at])} to {int(cu_seqlens[at + 1])}: no segment ends before it begins"
        )


def segment_starts(cu_seqlens: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """Return the segment of every token, [length] int64, and whether the token is the first of it, [length] bool."""
    starts = cu_seqlens[:-1].long()
    segments = torch.arange(len(starts), device=cu_seqlens.device)
    segment = torch.repeat_interleave(segments, cu_seqlens.diff().long(), output_size=length)
    return segment, torch.arange(length, device=cu_seqlens.device) == starts[segment]


def real_bounds(mask: Tensor, cu_seqlens: Tensor) -> tuple[Tensor, Tensor]:
    """Return the first real token of every segment and the index after its last one, [segments] int64 each.

    A segment without real tokens has its own start twice. mask: [1, length] bool, True for real tokens.
    """
    starts, ends = cu_seqlens[:-1].long(), cu_seqlens[1:].long()
    token = torch.arange(mask.shape[1], device=mask.device)
    following = (
        F.pad(torch.where(mask[0], token, len(token)).flip(0), (1, 0), value=len(token)).cummin(0).values.flip(0)
    )
    behind = F.pad(torch.where(mask[0], token + 1, 0), (1, 0)).cummax(0).values
    first = following[starts]
    return torch.where(first < ends, first, starts), torch.maximum(behind[ends], starts)


def previous(x: Tensor, before: Tensor | None, cu_seqlens: Tensor | None) -> Tensor:
    """Return x_{t-1} of the same sequence, in x's shape [batch, length, channels].

    before: [batch or segments, channels], the value before the first token of every sequence; zero if None.
    """
    if x.shape[1] == 0:
        return x
    shifted = torch.cat([torch.zeros_like(x[:, :1]), x[:, :-1]], 1)
    if cu_seqlens is None:
        return shifted if before is None else torch.cat([before.to(x.dtype).unsqueeze(1), x[:, :-1]], 1)
    segment, first = segment_starts(cu_seqlens, x.shape[1])
    start = x.new_zeros(()) if before is None else before.to(x.dtype)[segment]
    return torch.where(first.unsqueeze(-1), start, shifted)


def last(x: Tensor, before: Tensor | None, cu_seqlens: Tensor | None) -> Tensor:
    """Return x of the last token of every sequence, [batch or segments, channels]; `before` where a sequence is empty."""
    if cu_seqlens is None:
        if x.shape[1]:
            return x[:, -1]
        return x.new_zeros(x.shape[0], x.shape[2]) if before is None else before.to(x.dtype)
    empty = (cu_seqlens.diff() == 0).unsqueeze(-1)
    start = x.new_zeros(len(empty), x.shape[2]) if before is None else before.to(x.dtype)
    if x.shape[1] == 0:
        return start
    return torch.where(empty, start, x[0, (cu_seqlens[1:].long() - 1).clamp_min(0)])


def without_padding(mask: Tensor | None, *inputs: Tensor) -> tuple[Tensor, ...]:
    """Return the inputs of a recurrence, [batch, length, ...], with zeros where `mask` [batch, length] is False.

    A padded token then has log decay 0 and adds nothing: it leaves the state unchanged. mask None: all tokens are real.
    """
    if mask is None:
        return inputs
    masked = []
    for x in inputs:
        padding = ~mask.view(*mask.shape, *[1] * (x.dim() - 2))
        masked.append(x.masked_fill(padding, 0.0))
        recomputable(masked[-1], torch.masked_fill, x, padding, 0.0)
    return tuple(masked)
