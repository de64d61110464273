"""Several linears of one input."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor, nn

# An attribute of the modules that use it, so that a trainer can put its own in place. A module in which all that tensor
# parallelism cuts is computed from its fan-out says so by `fan_out_is_entry`.
FanOut = Callable[[Tensor, Sequence[nn.Linear]], tuple[Tensor, ...]]


def apply_each(x: Tensor, linears: Sequence[nn.Linear]) -> tuple[Tensor, ...]:
    """linear(x) for every linear, in order."""
    return tuple(linear(x) for linear in linears)
