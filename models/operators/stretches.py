"""What the operators of one stretch of a sequence exchange with the other stretches: states, total decays, a few tokens.

Every linear operator here is, from a stretch's zero state, its own result plus what reaches it from outside: with S the
state that the stretches before it hand on and b_t the sum of log decays up to token t,

    o_t = (local o)_t + q_t exp(b_t) S        S <- exp(b_last) S + (local end state), a stretch at a time.

So all stretches work at once, one gather of (end state, exp(b_last)) follows, and the rest is linear in length. All
shards build the same graph, whatever their number, so that their backward passes meet in the same gathers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from .context_parallel import SequenceShards


@dataclass(frozen=True)
class Packing:
    """Packed sequences as one stretch sees them.

    cu_seqlens: [segments + 1], inside the stretch; sequences that lie elsewhere are empty.
    from_left, from_right: [length] bool, tokens whose sequence began before the stretch (goes on behind it).
    first, last: [1] int, the segment of the first and of the last token.
    age: [1] int, tokens of the first segment that lie before the stretch.
    """

    cu_seqlens: Tensor
    from_left: Tensor
    from_right: Tensor
    first: Tensor
    last: Tensor
    age: Tensor


def packing(cu_seqlens: Tensor, length: int, shards: SequenceShards) -> Packing:
    """cu_seqlens: [segments + 1], those of the whole sequence, of which this stretch holds `length` tokens.

    Raises ValueError where they do not cover that.
    """
    total = length * shards.count
    # Reading the values of a CUDA tensor would wait for the device.
    if not cu_seqlens.is_cuda and (int(cu_seqlens[0]) != 0 or int(cu_seqlens[-1]) != total):
        raise ValueError(
            f"cu_seqlens runs from {int(cu_seqlens[0])} to {int(cu_seqlens[-1])}: over {shards.count} sequence shards of "
            f"{length} tokens it must be that of the whole sequence, from 0 to {total}"
        )
    edges = cu_seqlens.long() - shards.index * length
    inside = edges.clamp(0, length)
    token = torch.arange(length, device=edges.device)
    segment = torch.searchsorted(edges[1:], token, right=True)
    return Packing(
        inside,
        edges[segment] < 0,
        edges[segment + 1] > length,
        segment[:1],
        segment[-1:],
        -edges[segment[:1]],
    )


def exchange(shards: SequenceShards, *tensors: Tensor) -> list[list[Tensor]]:
    """The tensors of every shard, in order, through one gather. All of one dtype, or all complex of one dtype."""
    shapes = [x.shape for x in tensors]
    flat = torch.cat([x.flatten() for x in tensors])
    sizes = [shape.numel() for shape in shapes]
    rows = shards.gather(torch.view_as_real(flat) if flat.is_complex() else flat).unbind(0)
    parts = ((torch.view_as_complex(row) if flat.is_complex() else row).split(sizes) for row in rows)
    return [[x.view(shape) for x, shape in zip(row, shapes, strict=True)] for row in parts]


def carried(index: int, states: Sequence[Tensor], decays: Sequence[Tensor]) -> Tensor:
    """The state that reaches stretch `index`: S <- decay S + state over the stretches before it."""
    state = nothing_of(states[0])
    for before, decay in zip(states[:index], decays[:index], strict=True):
        state = decay * state + before
    return state


def left_neighbour(shards: SequenceShards, x: Tensor) -> Tensor:
    """x of the stretch on the left, zero at the start of the sequence."""
    rows = shards.gather(x).unbind(0)
    return rows[shards.index - 1] if shards.index else nothing_of(rows[0])


def nothing_of(x: Tensor) -> Tensor:
    """Zeros in x's place. x gets a gradient, of zero: no shard may leave out a gather of the backward pass."""
    return x.masked_fill(torch.ones((), dtype=torch.bool, device=x.device), 0.0)


def recomputed(function: Callable[..., Any], *arguments: Any) -> Any:
    """function(*arguments), computed again in the backward pass instead of keeping what it made on the way."""
    if not torch.is_grad_enabled():
        return function(*arguments)
    return checkpoint(function, *arguments, use_reentrant=False, preserve_rng_state=False)
