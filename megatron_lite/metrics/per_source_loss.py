"""The loss of each source of the text: by step, and summed between two lines of the log."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from megatron_lite.parallel.collectives import all_reduce_sum
from megatron_lite.parallel.grid import Grid


def with_loss_weight_grad(batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The batch with a loss weight that remembers what became of it, for `loss_by_source`."""
    # d loss / d loss_weight is a token's nll, up to a factor that all tokens of a step share: so the loss of each is
    # known after the backward pass in every layout, and nothing else in the step changes.
    return {**batch, "loss_weight": batch["loss_weight"].detach().clone().requires_grad_()}


def loss_by_source(
    batches: Sequence[Mapping[str, Tensor]], count: int, total: float, grid: Grid
) -> tuple[tuple[float, float], ...]:
    """(sum of weight * nll, sum of weight) of each source, over all processes, after the backward pass.

    Args:
        batches: the `with_loss_weight_grad` micro batches of this process; `source` is int64 like the labels.
        count: number of sources.
        total: sum of weight * nll over all of them.
    """
    sums = torch.zeros(2, count, dtype=torch.float64, device=grid.device)
    for batch in batches:
        weight, source = batch["loss_weight"].detach().double().flatten(), batch["source"].flatten()
        if batch["loss_weight"].grad is not None:  # None on all stages of a pipeline but the last
            sums[0].index_add_(0, source, weight * batch["loss_weight"].grad.double().flatten())
        sums[1].index_add_(0, source, weight)
    values = all_reduce_sum(sums.flatten().tolist(), grid)
    factor = total / (sum(values[:count]) or math.nan)
    return tuple((nll * factor, weight) for nll, weight in zip(values[:count], values[count:], strict=True))


class PerSourceLoss:
    """The loss of each source over the steps since the last line of the log.

    sums: name -> [sum of weight * nll, sum of weight] over these steps. It is kept up to date, for a checkpoint between two
    lines.
    """

    def __init__(self, names: Sequence[str], sums: dict[str, list[float]]) -> None:
        self.names, self._sums = names, sums

    def add(self, by_source: Sequence[tuple[float, float]]) -> None:
        """What `loss_by_source` gave for a step; steps that are not finite are left out."""
        for name, (nll, weight) in zip(self.names, by_source, strict=bool(self.names)):
            if math.isfinite(nll):
                before = self._sums.get(name, (0.0, 0.0))
                self._sums[name] = [before[0] + nll, before[1] + weight]

    def take(self) -> dict[str, float]:
        """`loss/NAME` of the sources that had a share, from here on anew."""
        known = ((name, self._sums.get(name, (0.0, 0.0))) for name in self.names)
        values = {f"loss/{name}": nll / weight for name, (nll, weight) in known if weight}
        self._sums.clear()
        return values
