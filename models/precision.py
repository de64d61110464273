"""The precision of gates, decays, norms and normalizers, whatever the model computes in."""

from __future__ import annotations

import torch
from torch import Tensor

# Added to a normalizer before the division, in every form and kernel alike.
NORMALIZER_EPS = 1e-6


def accumulation_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype in which sums over x accumulate: float32, or float64 for float64."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def to_accumulation_dtype(x: Tensor) -> Tensor:
    """Return x in float32; float64 stays float64."""
    return x.double() if x.is_floating_point() and x.element_size() == 8 else x.float()
