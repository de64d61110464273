"""Context parallelism: a sequence that lies over several processes, each with a stretch of it.

The layers decide what they exchange (states and total decays, and the few tokens that a short convolution reads); here
is how: an all-gather whose gradient is a reduce-scatter.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_lite.parallel.grid import Grid, all_gather, reduce_scatter


@dataclass(frozen=True)
class ContextShards:
    """This process's stretch among those of its sequence.

    Attributes:
        group, index, count: the processes of the sequence, and this one's place among them.
    """

    group: dist.ProcessGroup
    index: int
    count: int

    def gather(self, x: Tensor) -> Tensor:
        """[count, *x.shape]: x of every stretch, in order. The gradient of x is the sum over all processes of that of
        its row."""
        if x.is_complex():
            return torch.view_as_complex(self.gather(torch.view_as_real(x)))
        return _Gather.apply(x, self) if x.is_floating_point() else all_gather(x, self.group, self.count)


def context_shards(grid: Grid) -> ContextShards | None:
    """The stretches of this process's sequences; None where they are whole."""
    if grid.context_group is None:
        return None
    return ContextShards(grid.context_group, grid.context_rank, grid.context_size)


def own_stretch(batch: Mapping[str, Tensor], shards: ContextShards) -> dict[str, Tensor]:
    """This process's stretch of a batch: everything that is [batch, length] is cut along the length.

    `cu_seqlens` stays that of the whole row: where a packed sequence began tells what it takes from the left.
    """
    length = batch["tokens"].shape[1] // shards.count
    return {
        key: value if key == "cu_seqlens" else value.narrow(1, shards.index * length, length)
        for key, value in batch.items()
    }


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, shards: ContextShards) -> Tensor:
        ctx.shards = shards
        return all_gather(x, shards.group, shards.count)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return reduce_scatter(grad, ctx.shards.group), None
