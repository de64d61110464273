"""Context parallelism: several processes share a sequence, each with a contiguous local shard of it.

The layers exchange states, total decays, and the few tokens that a short convolution reads. This file provides their
collective: an all-gather whose gradient is a reduce-scatter.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_lite.parallel.collectives import all_gather, reduce_scatter
from megatron_lite.parallel.grid import Grid


@dataclass(frozen=True)
class ContextParallelGroup:
    """The processes that share a sequence.

    Attributes:
        group, index, count: the process group, this process's rank in it, and its size.
    """

    group: dist.ProcessGroup
    index: int
    count: int

    def gather(self, x: Tensor) -> Tensor:
        """Return x of every process in order, [count, *x.shape].

        The gradient of x is the sum, over all processes, of the gradients of its row.
        """
        if x.is_complex():
            return torch.view_as_complex(self.gather(torch.view_as_real(x)))
        return _Gather.apply(x, self) if x.is_floating_point() else all_gather(x, self.group, self.count)


def context_parallel_group(grid: Grid) -> ContextParallelGroup | None:
    """Return the group of this process; None without context parallelism."""
    if grid.context_group is None:
        return None
    return ContextParallelGroup(grid.context_group, grid.context_rank, grid.context_size)


def local_shard(batch: Mapping[str, Tensor], group: ContextParallelGroup) -> dict[str, Tensor]:
    """Return this process's shard of a batch: its part of every [batch, length] tensor along the length.

    `cu_seqlens` describes the whole row: the start of a packed sequence decides what it receives from previous ranks.
    """
    length = batch["tokens"].shape[1] // group.count
    return {
        key: value if key == "cu_seqlens" else value.narrow(1, group.index * length, length)
        for key, value in batch.items()
    }


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ContextParallelGroup) -> Tensor:
        ctx.group = group
        return all_gather(x, group.group, group.count)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return reduce_scatter(grad, ctx.group.group), None
