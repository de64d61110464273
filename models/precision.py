"""The precision of gates, decays, norms and row sums, whatever the model computes in."""

from __future__ import annotations

from torch import Tensor

# Added to a row sum before anything is divided by it, in every form and kernel alike.
ROW_SUM_EPS = 1e-6


def wide(x: Tensor) -> Tensor:
    """x in float32; float64 stays float64."""
    return x.double() if x.is_floating_point() and x.element_size() == 8 else x.float()
