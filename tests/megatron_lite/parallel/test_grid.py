"""The coordinates of processes."""

from __future__ import annotations

import torch

from megatron_lite.parallel.grid import Grid


def test_replicas_are_numbered_in_the_order_of_their_processes():
    """Number replicas as DeepSpeed's groups do: under ZeRO 3, replica r holds part r of each weight."""
    grids = [
        Grid(
            (data * 2 + context) * 2 + tensor,
            12,
            0,
            data_rank=data,
            data_size=3,
            device=torch.device("cpu"),
            context_rank=context,
            context_size=2,
            tensor_rank=tensor,
            tensor_size=2,
        )
        for data in range(3)
        for context in range(2)
        for tensor in range(2)
    ]
    assert [grid.rank for grid in grids] == list(range(12))
    assert [grid.replica_rank for grid in grids[::2]] == list(range(6)) == [grid.replica_rank for grid in grids[1::2]]
    assert {grid.replicas for grid in grids} == {6}
