"""Kernels of the cross entropy in C++, as `models/kernels/cross_entropy.py` on CUDA.

Reference: `models.operators.cross_entropy`. PyTorch's operators read or write float32 copies of the logits six times.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .build import is_supported, run, shared_object


def supports_cross_entropy(hidden: Tensor, weight: Tensor) -> bool:
    """Return whether the functions below support the logits hidden weight^T: a multiple of 16 rows of weight, a compiler."""
    return (
        is_supported(hidden, weight)
        and weight.shape[0] % 16 == 0
        and shared_object("cross_entropy", hidden.dtype) is not None
    )


def row_statistics(
    logits: Tensor, bias: Tensor | None, label: Tensor, first: bool = True
) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
    """Return the statistics of `models.kernels.cross_entropy.row_statistics`."""
    largest, mass, chosen = logits.new_empty(3, len(logits), dtype=torch.float32)
    best = torch.empty(len(logits), dtype=torch.int64) if first else None
    compiled, bias = shared_object("cross_entropy", logits.dtype), None if bias is None else bias.float()
    run(compiled, "statistics", logits, bias, label.contiguous(), largest, best, mass, chosen, *logits.shape)
    return largest, best, mass, chosen


def gradient_in_place(logits: Tensor, bias: Tensor | None, label: Tensor, log_sum: Tensor, weight: Tensor) -> None:
    """Compute `models.kernels.cross_entropy.gradient_in_place`."""
    bias = None if bias is None else bias.float()
    rows = [x.contiguous() for x in (label, log_sum, weight)]
    run(shared_object("cross_entropy", logits.dtype), "gradient", logits, bias, *rows, *logits.shape)
