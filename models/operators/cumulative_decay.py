"""Sums of log decays over intervals, computed by additions only.

A difference of two cumulative log decays is nan if both are -inf, and cancels if both are large. A sum over the interval is
exact to rounding, and its exponential never exceeds 1.
"""

from __future__ import annotations

import torch
from torch import Tensor

# Entries per chunk, the lower level of a running sum.
_CHUNK = 128


def sum_after(log_decay: Tensor, dim: int) -> Tensor:
    """Return out_j = sum of log_decay_t over t > j along `dim`; the last entry is 0."""
    length = log_decay.shape[dim]
    if length == 0:
        return log_decay
    reversed_decay = log_decay.narrow(dim, 1, length - 1).flip(dim)
    none = torch.zeros_like(log_decay.narrow(dim, 0, 1))
    return torch.cat([none, reversed_decay], dim).cumsum(dim).flip(dim)


def running_sum(x: Tensor, dim: int) -> Tensor:
    """Return out_i = sum of x_t over t <= i along `dim`, in x's dtype, for sequences of any length.

    The sum has two levels: inside chunks, and over chunks in double precision. The error is that of a short sum. A GPU sums
    each column with one thread, and two levels give it more columns.
    """
    inside, preceding = _two_levels(x, dim)
    return (inside + preceding.to(x.dtype)).flatten(dim, dim + 1).narrow(dim, 0, x.shape[dim])


def decay_from_start(log_decay: Tensor, dim: int) -> Tensor:
    """Return out_i = exp(sum of log_decay_t over t <= i) along `dim`, as `running_sum`; real or complex."""
    inside, preceding = _two_levels(log_decay, dim)
    factor = inside.exp() * preceding.exp().to(log_decay.dtype)
    return factor.flatten(dim, dim + 1).narrow(dim, 0, log_decay.shape[dim])


def decay_to_end(log_decay: Tensor, dim: int) -> Tensor:
    """Return out_i = exp(sum of log_decay_t over t > i) along `dim`, as `running_sum`; real or complex."""
    reversed_decay = log_decay.narrow(dim, 1, log_decay.shape[dim] - 1).flip(dim)
    none = torch.zeros_like(log_decay.narrow(dim, 0, 1))
    return decay_from_start(torch.cat([none, reversed_decay], dim), dim).flip(dim)


def _two_levels(x: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """Split `dim` into [chunks, chunk]. Return running sums inside each chunk, and the sum of all chunks before it in double."""
    missing = -x.shape[dim] % _CHUNK
    if missing:
        shape = list(x.shape)
        shape[dim] = missing
        x = torch.cat([x, x.new_zeros(shape)], dim)
    inside = x.unflatten(dim, (-1, _CHUNK)).cumsum(dim + 1)
    totals = inside.narrow(dim + 1, _CHUNK - 1, 1)
    preceding = torch.cat(
        [torch.zeros_like(totals.narrow(dim, 0, 1)), totals.narrow(dim, 0, totals.shape[dim] - 1)], dim
    )
    return inside, preceding.cumsum(dim, dtype=torch.complex128 if x.is_complex() else torch.float64)


def pairwise_decay(log_decay: Tensor, dim: int) -> Tensor:
    """Return out_ij = exp(sum of log_decay_t over j < t <= i) for j <= i, 0 for j > i; axis j follows axis i = `dim`."""
    length = log_decay.shape[dim]
    position = torch.arange(length, device=log_decay.device)
    trailing = (1,) * (log_decay.dim() - 1 - dim)
    after = (position[:, None] > position[None, :]).view(length, length, *trailing)
    causal = (position[:, None] >= position[None, :]).view(length, length, *trailing)
    steps = log_decay.unsqueeze(dim + 1)
    expanded = steps.expand(*steps.shape[: dim + 1], length, *steps.shape[dim + 2 :])
    return torch.where(after, expanded, 0.0).cumsum(dim).exp() * causal
