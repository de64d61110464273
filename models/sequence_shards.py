"""One sequence over several processes: what a mixer asks of its neighbours, and who answers is set from outside.

Each shard holds a contiguous stretch of the sequence, [batch, length / count, ...], stretch 0 first. The operators of
this package look for `current_shards()` and then exchange states and total decays, never tokens but the few that a
short convolution reads. Nothing here knows how shards talk to one another.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, NoReturn, Protocol

from torch import Tensor

if TYPE_CHECKING:
    from .config import ModelConfig


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


def check_sequence_shards(config: ModelConfig, count: int, length: int) -> None:
    """Refuse, before anything is built, a model or a sequence length that cannot be split into `count` stretches.

    A mixer says with `splits_sequence = True` that its layer can; one that does not say so is refused. Raises
    ValueError naming the mixer or the lengths, and what is possible.
    """
    if count == 1:
        return
    from .mixers import MIXERS

    for name in dict.fromkeys(config.mixers):
        if not getattr(MIXERS[name], "splits_sequence", False):
            able = [other for other in MIXERS if getattr(MIXERS[other], "splits_sequence", False)]
            raise ValueError(
                f"model.mixers: {name!r} cannot be split along the sequence: every token needs all others, not a state of "
                f"constant size; sequence shards are for {', '.join(able)}"
            )
    if length % count:
        raise ValueError(
            f"sequence length {length} does not divide into {count} stretches; nearest lengths that do: "
            f"{length // count * count or count} or {-(-length // count) * count}"
        )
    reach = max(getattr(config.options_of(name), "conv_kernel", 1) - 1 for name in config.mixers)
    if length // count < reach:
        raise ValueError(
            f"stretches of {length} / {count} = {length // count} tokens are shorter than the {reach} tokens before them "
            "that a convolution of this model reads; use fewer stretches"
        )
