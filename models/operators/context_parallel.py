"""One sequence over several processes: what a mixer asks of its neighbours, and who answers is set from outside.

Each shard holds a contiguous stretch of the sequence, [batch, length / count, ...], stretch 0 first. The operators of
this package look for `current_shards()` and then exchange states and total decays, never tokens but the few that a
short convolution reads. Nothing here knows how shards talk to one another.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NoReturn, Protocol

from torch import Tensor


class SequenceShards(Protocol):
    """This shard's place among those of its sequence, and the one way in which they talk."""

    @property
    def index(self) -> int:
        """This shard's number, 0 for the start of the sequence."""

    @property
    def count(self) -> int:
        """Number of shards of the sequence."""

    def gather(self, x: Tensor) -> Tensor:
        """x, of the same shape and dtype in every shard -> [count, *x.shape], the shards' x in order, in every shard.

        Differentiable where x is of floating point: the gradient of x in a shard is the sum, over all shards, of the
        gradient of their row of this shard (a reduce-scatter). Every shard calls it equally often, in the same order,
        forward and backward: the operators see to that.
        """


_CURRENT: ContextVar[SequenceShards | None] = ContextVar("sequence_shards", default=None)


def current_shards() -> SequenceShards | None:
    """The shards set by `sequence_shards` around this call; None where the sequence is whole."""
    return _CURRENT.get()


@contextmanager
def sequence_shards(shards: SequenceShards | None) -> Iterator[None]:
    """Have the operators called inside take their sequences for stretches of one that lies over `shards`.

    It must also be entered where activation checkpointing calls a layer again, in the backward pass.
    """
    token = _CURRENT.set(shards)
    try:
        yield
    finally:
        _CURRENT.reset(token)


def refuse_state() -> NoReturn:
    """A decode state, in or out, belongs to a whole sequence. Raises ValueError."""
    raise ValueError(
        "a decode state was given or asked for inside sequence_shards: a state belongs to a whole sequence; prefill and "
        "decode outside of it"
    )
