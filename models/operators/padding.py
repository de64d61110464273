"""Padding inside a recurrence."""

from __future__ import annotations

import torch
from torch import Tensor

from ..recompute import forgettable


def without_padding(mask: Tensor | None, *inputs: Tensor) -> tuple[Tensor, ...]:
    """The inputs of a recurrence [batch, length, ...] with zeros where `mask` [batch, length] is False.

    With a log decay of 0 and nothing to add, a padded token leaves the state as it is. mask None: all tokens are real.
    """
    if mask is None:
        return inputs
    masked = []
    for x in inputs:
        padding = ~mask.view(*mask.shape, *[1] * (x.dim() - 2))
        masked.append(x.masked_fill(padding, 0.0))
        forgettable(masked[-1], torch.masked_fill, x, padding, 0.0)
    return tuple(masked)
