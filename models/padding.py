"""Padding inside a recurrence."""

from __future__ import annotations

from torch import Tensor


def without_padding(mask: Tensor | None, *inputs: Tensor) -> tuple[Tensor, ...]:
    """The inputs of a recurrence [batch, length, ...] with zeros where `mask` [batch, length] is False.

    With a log decay of 0 and nothing to add, a padded token leaves the state as it is. mask None: all tokens are real.
    """
    if mask is None:
        return inputs
    return tuple(x.masked_fill(~mask.view(*mask.shape, *[1] * (x.dim() - 2)), 0.0) for x in inputs)
