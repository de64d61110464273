"""Sums of log decays over intervals, formed by adding only.

A difference of two cumulated log decays is nan where both are -inf and loses digits where both are large; a sum over
the interval itself is exact to rounding, and its exponential never exceeds 1.
"""

from __future__ import annotations

import torch
from torch import Tensor


def sum_after(log_decay: Tensor, dim: int) -> Tensor:
    """out_j = sum of log_decay_t over t > j along `dim`; the last entry is 0."""
    length = log_decay.shape[dim]
    if length == 0:
        return log_decay
    later = log_decay.narrow(dim, 1, length - 1).flip(dim)
    none = torch.zeros_like(log_decay.narrow(dim, 0, 1))
    return torch.cat([none, later], dim).cumsum(dim).flip(dim)


def pairwise_decay(log_decay: Tensor, dim: int) -> Tensor:
    """out_ij = exp(sum of log_decay_t over j < t <= i) for j <= i, and 0 for j > i; axis j follows axis i = `dim`."""
    length = log_decay.shape[dim]
    position = torch.arange(length, device=log_decay.device)
    trailing = (1,) * (log_decay.dim() - 1 - dim)
    after = (position[:, None] > position[None, :]).view(length, length, *trailing)
    reached = (position[:, None] >= position[None, :]).view(length, length, *trailing)
    steps = log_decay.unsqueeze(dim + 1)
    expanded = steps.expand(*steps.shape[: dim + 1], length, *steps.shape[dim + 2 :])
    return torch.where(after, expanded, 0.0).cumsum(dim).exp() * reached
