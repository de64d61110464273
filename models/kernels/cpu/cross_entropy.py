"""Softmax of rows of logits in C++: as `models/kernels/cross_entropy.py` on CUDA. Reference: `models.operators.cross_entropy`.

In PyTorch's operators float32 copies of the logits are read and written six times.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .build import is_supported, run, shared_object


def supports_cross_entropy(hidden: Tensor, weight: Tensor) -> bool:
    """Whether the functions below compute with hidden weight^T."""
    return (
        is_supported(hidden, weight)
        and weight.shape[0] % 16 == 0
        and shared_object("cross_entropy", hidden.dtype) is not None
    )


def row_statistics(
    logits: Tensor, bias: Tensor | None, label: Tensor, first: bool = True
) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
    """Of each row of z = logits + bias: max_j z_j, the first j that has it (None unless `first`), sum_j exp(z_j - max), z[label].

    logits: [rows, vocab], bias: [vocab] or None, contiguous; label: int64 [rows], 0 <= label < vocab, which nobody checks.
    Returns float32 [rows] each, the second int64.
    """
    largest, mass, chosen = logits.new_empty(3, len(logits), dtype=torch.float32)
    best = torch.empty(len(logits), dtype=torch.int64) if first else None
    compiled, bias = shared_object("cross_entropy", logits.dtype), None if bias is None else bias.float()
    run(compiled, "statistics", logits, bias, label.contiguous(), largest, best, mass, chosen, *logits.shape)
    return largest, best, mass, chosen


def gradient_in_place(logits: Tensor, bias: Tensor | None, label: Tensor, log_sum: Tensor, weight: Tensor) -> None:
    """logits <- weight (exp(z - log_sum) - [j == label]), z = logits + bias.

    log_sum, weight: float32 [rows]; label: int64 [rows], negative for a row whose label stands elsewhere.
    """
    bias = None if bias is None else bias.float()
    rows = [x.contiguous() for x in (label, log_sum, weight)]
    run(shared_object("cross_entropy", logits.dtype), "gradient", logits, bias, *rows, *logits.shape)


def add_product(total: Tensor, x: Tensor, y: Tensor) -> None:
    """total += x y."""
    total += x @ y
