"""Context parallelism: one sequence over several ranks, each with a contiguous local shard of it.

Rank 0 holds the start of the sequence, [batch, length / count, ...]. Every causal operator with decays runs in
four steps (`causal_over_ranks`), with S a state and b_t the sum of log decays up to token t of the shard:

1. local result: outputs and end state from a zero state, by any kernel;
2. exchange: one all-gather of (end state, total decay), whose size does not depend on the length;
3. incoming state: S <- exp(b_last) S + (end state), over the previous ranks;
4. correction: o_t = (local o)_t + q_t exp(b_t) S.

The transition of the delta rule is a matrix (`ShardMaps`). Each rank computes the affine map of its shard, exchanges it, and then
runs the operator from its incoming state. Both steps share everything that does not depend on the state.

All ranks build the same graph, so that their backward passes call the same collectives. A trainer sets the group from
outside with `context_parallel`; this file does not depend on how the ranks communicate.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import NoReturn, Protocol

import torch
from torch import Tensor


class ContextParallelGroup(Protocol):
    """The ranks that share a sequence, seen from one of them."""

    @property
    def index(self) -> int:
        """Return this rank's number, 0 for the start of the sequence."""

    @property
    def count(self) -> int:
        """Return the number of ranks."""

    def gather(self, x: Tensor) -> Tensor:
        """Return x of every rank in order, [count, *x.shape]. x has the same shape and dtype on every rank.

        Differentiable for floating point: the gradient of x is the sum, over all ranks, of the gradients of its row (a
        reduce-scatter). Every rank calls it equally often and in the same order, forward and backward.
        """


_GROUP: ContextVar[ContextParallelGroup | None] = ContextVar("context_parallel_group", default=None)


def context_parallel_group() -> ContextParallelGroup | None:
    """Return the group set by `context_parallel` around this call, or None for a sequence on one rank."""
    return _GROUP.get()


@contextmanager
def context_parallel(group: ContextParallelGroup | None) -> Iterator[None]:
    """Make the operators called inside treat their inputs as the local shard of a sequence over `group`.

    Activation checkpointing must enter it again where it recomputes a layer in the backward pass.
    """
    token = _GROUP.set(group)
    try:
        yield
    finally:
        _GROUP.reset(token)


def refuse_state() -> NoReturn:
    """Raise ValueError: a decode state belongs to a whole sequence."""
    raise ValueError(
        "a decode state was given or requested under context parallelism: a state belongs to a whole sequence; prefill and "
        "decode on one rank"
    )


@dataclass(frozen=True)
class ShardSegments:
    """Describe packed sequences inside the local shard.

    cu_seqlens: [segments + 1], inside the shard; segments outside it are empty.
    from_left, from_right: [length] bool, tokens whose segment began before the shard, or continues after it.
    first, last: [1] int, the segment of the first and of the last token.
    age: [1] int, the number of tokens of the first segment before the shard.
    """

    cu_seqlens: Tensor
    from_left: Tensor
    from_right: Tensor
    first: Tensor
    last: Tensor
    age: Tensor


def shard_segments(cu_seqlens: Tensor, length: int, group: ContextParallelGroup) -> ShardSegments:
    """Return the segments inside the local shard of `length` tokens. cu_seqlens: [segments + 1] of the whole sequence.

    Raises ValueError unless cu_seqlens covers the whole sequence. On CUDA the values are not read.
    """
    total = length * group.count
    # Reading a CUDA tensor would synchronise with the device.
    if cu_seqlens.is_cpu and (int(cu_seqlens[0]) != 0 or int(cu_seqlens[-1]) != total):
        raise ValueError(
            f"cu_seqlens runs from {int(cu_seqlens[0])} to {int(cu_seqlens[-1])}: with {group.count} context-parallel ranks "
            f"of {length} tokens it must be that of the whole sequence, from 0 to {total}"
        )
    edges = cu_seqlens.long() - group.index * length
    inside = edges.clamp(0, length)
    token = torch.arange(length, device=edges.device)
    segment = torch.searchsorted(edges[1:], token, right=True)
    return ShardSegments(
        inside,
        edges[segment] < 0,
        edges[segment + 1] > length,
        segment[:1],
        segment[-1:],
        -edges[segment[:1]],
    )


def causal_over_ranks(
    group: ContextParallelGroup,
    length: int,
    cu_seqlens: Tensor | None,
    initial_state: Tensor | None,
    *,
    local: Callable[[Tensor | None], tuple[Tensor, Tensor]],
    total_decay: Callable[[Tensor | None], Tensor],
    correction: Callable[[Tensor, Tensor | None], Tensor],
) -> tuple[Tensor, Tensor]:
    """Run a causal linear operator on the local shard, of `length` tokens, in the four steps of this module.

    cu_seqlens: [segments + 1] of the whole sequence, or None. initial_state: must be None.
    local: (cu_seqlens of the shard) -> outputs and final states [batch or segments, ...] from a zero state.
    total_decay: (tokens [length] bool, None for all) -> the factor of those tokens on a state, of broadcastable shape.
    correction: (incoming state [batch, ...], tokens that see it as above) -> the addition to the outputs.

    Returns the outputs, and the final states of the shard's segments at its end. Raises ValueError for an initial state.
    """
    if initial_state is not None:
        refuse_state()
    segments = None if cu_seqlens is None else shard_segments(cu_seqlens, length, group)
    o, final = local(None if segments is None else segments.cu_seqlens)
    decay = total_decay(None)
    if segments is None:
        (state,) = incoming_states(group, (final, decay))
        return o + correction(state, None).to(o.dtype), final + decay * state
    from_left = segments.from_left
    (state,) = incoming_states(group, (final.index_select(0, segments.last), decay * from_left[-1]))
    first_decay = total_decay(from_left) * from_left[0]
    return o + correction(state, from_left).to(o.dtype), final.index_add(0, segments.first, first_decay * state)


@dataclass(frozen=True)
class ShardMaps:
    """Compose the maps S <- M S + B of local shards, for a causal operator with matrix transitions.

    M: [..., dim_k, dim_k]; B: [..., dim_k, dim_v], the state after the shard if the state before it is 0. For packed sequences
    both belong to the last segment of the shard. segments: those of the local shard, None for one sequence.
    """

    group: ContextParallelGroup
    segments: ShardSegments | None

    def incoming_state(self, transition: Tensor, end: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Return the state before the shard, and M of the following ranks for `outgoing_gradient`; (M, B) of this shard.

        The state is 0 where no segment continues into the shard. Differentiable.
        """
        if self.segments is not None:
            transition = transition * self.segments.from_left[-1]
        ranks = all_gather_states(self.group, transition, end)
        state = zeros_with_grad(ranks[0][1])
        for matrix, rest in ranks[: self.group.index]:
            state = matrix @ state + rest
        return self._of_first_segment(state), [matrix for matrix, _ in ranks[self.group.index + 1 :]]

    def outgoing_gradient(self, following: list[Tensor], gradient: Tensor) -> Tensor:
        """Return the gradient of the state after the shard, from the following ranks, for a backward pass without autograd.

        following: M of these ranks. gradient: that of the incoming state, without the following ranks.
        """
        rows = self.group.gather(self._of_first_segment(gradient)).unbind(0)
        total = torch.zeros_like(gradient)
        for matrix, row in zip(reversed(following), reversed(rows[self.group.index + 1 :]), strict=True):
            total = matrix.mT @ total + row
        return total

    def _of_first_segment(self, state: Tensor) -> Tensor:
        return state if self.segments is None else state * self.segments.from_left[0]


def shard_maps(
    length: int, cu_seqlens: Tensor | None, initial_state: Tensor | None
) -> tuple[ShardMaps | None, Tensor | None]:
    """Return the maps of local shards of `length` tokens, None without context parallelism, and cu_seqlens of this shard.

    cu_seqlens: [segments + 1] of the whole sequence, or None. Raises ValueError for an initial state under context parallelism.
    """
    group = context_parallel_group()
    if group is None:
        return None, cu_seqlens
    if initial_state is not None:
        refuse_state()
    if cu_seqlens is None:
        return ShardMaps(group, None), None
    segments = shard_segments(cu_seqlens, length, group)
    return ShardMaps(group, segments), segments.cu_seqlens


def incoming_states(group: ContextParallelGroup, *directions: tuple[Tensor, Tensor]) -> list[Tensor]:
    """Return the state that reaches the local shard in each direction: S <- decay S + end state, over the preceding ranks.

    directions: (end state, total decay) of the local shard. The first runs from rank 0 to the last, the second back.
    """
    ranks = all_gather_states(group, *(x for direction in directions for x in direction))
    states = []
    for number, preceding in enumerate((ranks[: group.index], ranks[: group.index : -1])[: len(directions)]):
        state = zeros_with_grad(ranks[0][2 * number])
        for rank in preceding:
            end, decay = rank[2 * number : 2 * number + 2]
            state = decay * state + end
        states.append(state)
    return states


def all_gather_states(group: ContextParallelGroup, *tensors: Tensor) -> list[list[Tensor]]:
    """Return the tensors of every rank in order, by one all-gather. All have the same dtype, real or complex."""
    shapes = [x.shape for x in tensors]
    flat = torch.cat([x.flatten() for x in tensors])
    sizes = [shape.numel() for shape in shapes]
    rows = group.gather(torch.view_as_real(flat) if flat.is_complex() else flat).unbind(0)
    parts = ((torch.view_as_complex(row) if flat.is_complex() else row).split(sizes) for row in rows)
    return [[x.view(shape) for x, shape in zip(row, shapes, strict=True)] for row in parts]


def from_previous_rank(group: ContextParallelGroup, x: Tensor) -> Tensor:
    """Return x of the previous rank, zeros on rank 0."""
    rows = group.gather(x).unbind(0)
    return rows[group.index - 1] if group.index else zeros_with_grad(rows[0])


def zeros_with_grad(x: Tensor) -> Tensor:
    """Return zeros in x's shape that give x a zero gradient, because no rank may skip a collective of the backward pass."""
    return x.masked_fill(torch.ones((), dtype=torch.bool, device=x.device), 0.0)
