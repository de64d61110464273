"""The precision of gates, decays, norms and normalizers, whatever the model computes in."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

# Added to a normalizer before the division, in every form and kernel alike.
NORMALIZER_EPS = 1e-6


def accumulation_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype in which sums over x accumulate: float32, or float64 for float64."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def to_accumulation_dtype(x: Tensor) -> Tensor:
    """Return x in float32; float64 stays float64."""
    return x.to(accumulation_dtype(x))


def without_autocast(x: Tensor) -> AbstractContextManager[object]:
    """Return a context for sums of log decays, states and normalizers, which autocast would compute in 16 bits.

    x: a tensor on the device of the computation.
    """
    device = "cuda" if x.is_meta else x.device.type  # autocast does not know "meta"
    return torch.autocast(device, enabled=False) if torch.is_autocast_enabled(device) else nullcontext()
