"""Sequences of different lengths in one tensor: packed along the length (`cu_seqlens`), or padded (`mask`)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ..recompute import recomputable
from .context_parallel import context_parallel_group, from_previous_rank, refuse_state, shard_segments


def check_packed(x: Tensor, cu_seqlens: Tensor) -> None:
    """Raise ValueError unless x [batch, length, ...] is one row that cu_seqlens covers (`check_cu_seqlens`)."""
    if x.shape[0] != 1:
        raise ValueError(f"cu_seqlens needs batch 1 with the segments packed along the length, got {list(x.shape)}")
    check_cu_seqlens(cu_seqlens, x.shape[1])


def check_cu_seqlens(cu_seqlens: Tensor, length: int) -> None:
    """Raise ValueError unless cu_seqlens [segments + 1] int rises from 0 to the length. On CUDA the values are not read."""
    if cu_seqlens.dim() != 1 or not len(cu_seqlens) or cu_seqlens.is_floating_point():
        raise ValueError(
            f"cu_seqlens {cu_seqlens.dtype} {list(cu_seqlens.shape)}: expected integers [segments + 1] from 0 to {length}"
        )
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


def check_sequences(x: Tensor, cu_seqlens: Tensor | None, initial_state: Tensor | None, *state: int) -> None:
    """Raise ValueError unless cu_seqlens and initial_state [batch or segments, *state] fit x [batch, length, ...]."""
    sequences = x.shape[0]
    if cu_seqlens is not None:
        check_packed(x, cu_seqlens)
        sequences = len(cu_seqlens) - 1
    if initial_state is not None and initial_state.shape != (sequences, *state):
        raise ValueError(f"initial_state {list(initial_state.shape)}: expected {[sequences, *state]}")


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


def previous(x: Tensor, initial: Tensor | None, cu_seqlens: Tensor | None) -> Tensor:
    """Return x_{t-1} of the same sequence, in x's shape [batch, length, channels].

    initial: [batch or segments, channels], the value before the first token of every sequence; zero if None.
    """
    if x.shape[1] == 0:
        return x
    shifted = torch.cat([torch.zeros_like(x[:, :1]), x[:, :-1]], 1)
    if cu_seqlens is None:
        return shifted if initial is None else torch.cat([initial.to(x.dtype).unsqueeze(1), x[:, :-1]], 1)
    segment, first = segment_starts(cu_seqlens, x.shape[1])
    start = x.new_zeros(()) if initial is None else initial.to(x.dtype)[segment]
    return torch.where(first.unsqueeze(-1), start, shifted)


def last(x: Tensor, initial: Tensor | None, cu_seqlens: Tensor | None) -> Tensor:
    """Return x of the last token of every sequence, [batch or segments, channels]; `initial` where a sequence is empty."""
    if cu_seqlens is None:
        if x.shape[1]:
            return x[:, -1]
        return x.new_zeros(x.shape[0], x.shape[2]) if initial is None else initial.to(x.dtype)
    empty = (cu_seqlens.diff() == 0).unsqueeze(-1)
    start = x.new_zeros(len(empty), x.shape[2]) if initial is None else initial.to(x.dtype)
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


def token_shift(
    x: Tensor, mask: Tensor | None, cu_seqlens: Tensor | None, initial: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return x_{t-1} for every token of x [batch, length, channels], and the last real token of every sequence.

    mask: [batch, length] bool, True for real tokens; padding is outside of the sequence. cu_seqlens: [segments + 1] with
    batch 1. initial: [batch or segments, channels], the second result of an earlier call; None for zeros.
    Under context parallelism x is the local shard, cu_seqlens is that of the whole sequence, and there is no `initial`.
    """
    group = context_parallel_group()
    if group is not None:
        if initial is not None:
            refuse_state()
        if mask is not None:
            x = x.masked_fill(~mask.unsqueeze(-1), 0.0)
        mask, initial = None, from_previous_rank(group, x[:, -1])
        if cu_seqlens is not None:
            segments = shard_segments(cu_seqlens, x.shape[1], group)
            zeros = initial.new_zeros(len(cu_seqlens) - 1, x.shape[2])
            initial = zeros.index_copy(0, segments.first, initial * segments.from_left[0])
            cu_seqlens = segments.cu_seqlens
    if cu_seqlens is not None:
        check_packed(x, cu_seqlens)
    if mask is None or x.shape[1] == 0:
        return previous(x, initial, cu_seqlens), last(x, initial, cu_seqlens)
    x = x.masked_fill(~mask.unsqueeze(-1), 0.0)
    shifted = previous(x, None, cu_seqlens)
    if cu_seqlens is not None:
        return _in_segments(x, shifted, mask, cu_seqlens, initial)
    place = torch.arange(x.shape[1], device=x.device)
    final = torch.where(mask, place, -1).amax(1)
    newest = x.gather(1, final.clamp_min(0)[:, None, None].expand(-1, 1, x.shape[2])).squeeze(1)
    if initial is None:
        return shifted, newest
    initial = initial.to(x.dtype)
    first = (place == mask.int().argmax(1, keepdim=True)) & mask
    shifted = torch.where(first.unsqueeze(-1), initial.unsqueeze(1), shifted)
    return shifted, torch.where((final < 0).unsqueeze(-1), initial, newest)


def _in_segments(
    x: Tensor, shifted: Tensor, mask: Tensor, cu_seqlens: Tensor, initial: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Compute `token_shift` of packed sequences with padding. x: zero at padding. shifted: x_{t-1} without `initial`."""
    first, end = real_bounds(mask, cu_seqlens)
    empty = (first == end).unsqueeze(-1)
    start = x.new_zeros(len(first), x.shape[2]) if initial is None else initial.to(x.dtype)
    newest = torch.where(empty, start, x[0, (end - 1).clamp_min(0)])
    if initial is not None:
        # No token reads the `initial` of a sequence without real tokens. Its start may be after the last token.
        place = torch.where(empty.squeeze(-1), x.shape[1], first)
        shifted = F.pad(shifted, (0, 0, 0, 1)).index_copy(1, place, start.unsqueeze(0))[:, :-1]
    return shifted, newest
