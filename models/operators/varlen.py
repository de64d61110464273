"""Where packed sequences begin and end, and what stands before a token of its own sequence."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def check_packed(x: Tensor, cu_seqlens: Tensor) -> None:
    """ValueError where x [batch, length, ...] is not one row, or cu_seqlens does not cover it (`check_covers`)."""
    if x.shape[0] != 1:
        raise ValueError(f"cu_seqlens needs batch 1 with the segments packed along the length, got {list(x.shape)}")
    check_covers(cu_seqlens, x.shape[1])


def check_covers(cu_seqlens: Tensor, length: int) -> None:
    """ValueError where cu_seqlens [segments + 1] does not rise from 0 to the length; on CUDA it is not looked at."""
    # Reading the values of a CUDA tensor would wait for the device.
    if cu_seqlens.is_cuda:
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
    """The segment of every token [length] int64, and whether the token is its first [length] bool."""
    starts = cu_seqlens[:-1].long()
    segments = torch.arange(len(starts), device=cu_seqlens.device)
    segment = torch.repeat_interleave(segments, cu_seqlens.diff().long(), output_size=length)
    return segment, torch.arange(length, device=cu_seqlens.device) == starts[segment]


def real_bounds(mask: Tensor, cu_seqlens: Tensor) -> tuple[Tensor, Tensor]:
    """Of every packed sequence its first real token and the place behind its last, [segments] int64 each; where it has
    none, its own start twice. mask: [1, length] bool, True for real tokens.
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
    """x_{t-1} of the same sequence, in x's shape [batch, length, channels].

    before: [batch or segments, channels], what stands before the first token of every sequence; zero if None.
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
    """x of the last token of every sequence [batch or segments, channels], or what stands before an empty one."""
    if cu_seqlens is None:
        if x.shape[1]:
            return x[:, -1]
        return x.new_zeros(x.shape[0], x.shape[2]) if before is None else before.to(x.dtype)
    empty = (cu_seqlens.diff() == 0).unsqueeze(-1)
    start = x.new_zeros(len(empty), x.shape[2]) if before is None else before.to(x.dtype)
    if x.shape[1] == 0:
        return start
    return torch.where(empty, start, x[0, (cu_seqlens[1:].long() - 1).clamp_min(0)])
