"""Compute the per-source loss of a step, and its mean over the steps between two log lines."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from megatron_lite.parallel.collectives import all_reduce_sum
from megatron_lite.parallel.grid import Grid


def with_loss_weight_grad(batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the batch with a loss weight that receives a gradient, for `per_source_loss`."""
    # d loss / d loss_weight is the nll of a token, up to a factor that all tokens of a step share. So every layout has
    # the loss per token after the backward pass, without a change to the step.
    return {**batch, "loss_weight": batch["loss_weight"].detach().clone().requires_grad_()}


def per_source_loss(
    batches: Sequence[Mapping[str, Tensor]], count: int, total: float, grid: Grid
) -> tuple[tuple[float, float], ...]:
    """Return (sum of weight * nll, sum of weight) per source, all-reduced over all processes. Call it after backward.

    Args:
        batches: micro-batches of this process from `with_loss_weight_grad`; `source` is int64 with the shape of the labels.
        count: number of sources.
        total: sum of weight * nll over all sources.
    """
    sums = torch.zeros(2, count, dtype=torch.float64, device=grid.device)
    for batch in batches:
        weight, source = batch["loss_weight"].detach().double().flatten(), batch["source"].flatten()
        if batch["loss_weight"].grad is not None:  # None on all pipeline stages except the last
            sums[0].index_add_(0, source, weight * batch["loss_weight"].grad.double().flatten())
        sums[1].index_add_(0, source, weight)
    values = all_reduce_sum(sums.flatten().tolist(), grid)
    factor = total / (sum(values[:count]) or math.nan)
    return tuple((nll * factor, weight) for nll, weight in zip(values[:count], values[count:], strict=True))


class PerSourceLoss:
    """Accumulate the loss per source over the steps since the last log line.

    sums: name -> [sum of weight * nll, sum of weight] over these steps. It is updated in place and saved in checkpoints.
    """

    def __init__(self, names: Sequence[str], sums: dict[str, list[float]]) -> None:
        self.names, self._sums = names, sums

    def add(self, by_source: Sequence[tuple[float, float]]) -> None:
        """Add the result of `per_source_loss` for a step. Sources whose nll is not finite are skipped."""
        for name, (nll, weight) in zip(self.names, by_source, strict=bool(self.names)):
            if math.isfinite(nll):
                previous = self._sums.get(name, (0.0, 0.0))
                self._sums[name] = [previous[0] + nll, previous[1] + weight]

    def take(self) -> dict[str, float]:
        """Return `loss/NAME` of the sources that had labels, and reset the sums."""
        known = ((name, self._sums.get(name, (0.0, 0.0))) for name in self.names)
        values = {f"loss/{name}": nll / weight for name, (nll, weight) in known if weight}
        self._sums.clear()
        return values
