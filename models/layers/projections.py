"""Several linears of one input."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor, nn


class FanOut(Protocol):
    """An attribute of the modules that use it, so that a trainer can put its own in place. A module in which all that
    tensor parallelism cuts is computed from its fan-out says so by `fan_out_is_entry`."""

    def __call__(self, x: Tensor, linears: Sequence[nn.Linear], again: bool = False) -> tuple[Tensor, ...]:
        """linear(x) for every linear, in order; `again`: and x, for one more product, whose gradient of x the others
        are added to, in place."""


def apply_each(x: Tensor, linears: Sequence[nn.Linear], again: bool = False) -> tuple[Tensor, ...]:
    """The fan-out of a model by itself."""
    return (*(linear(x) for linear in linears), *((x,) if again else ()))
