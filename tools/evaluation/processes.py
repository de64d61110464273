"""The processes that share an evaluation: each computes a part of the requests, all get all answers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class Processes:
    """This process's place among those that evaluate together (`torchrun --nproc-per-node 8 eval.py ...`)."""

    rank: int = 0
    size: int = 1

    @property
    def is_main(self) -> bool:
        """Whether this process prints and writes."""
        return self.rank == 0

    def merge(self, part: dict[Any, Any]) -> dict[Any, Any]:
        """The entries of every process's part, on every process."""
        if self.size == 1:
            return part
        parts: list[Any] = [None] * self.size
        dist.all_gather_object(parts, part)
        return {key: value for found in parts for key, value in found.items()}

    def wait(self) -> None:
        """Until all are here."""
        if self.size > 1:
            dist.barrier()


def join_processes(device: str) -> tuple[Processes, str]:
    """The processes that torchrun started, or this one alone; and the device of this one.

    Raises ValueError as `megatron_lite.grid.init_grid`.
    """
    import os

    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        if device == "auto":
            device = "cuda" if torch.cuda.is_available() else "cpu"
        return Processes(), device
    from megatron_lite.grid import init_grid

    grid = init_grid(device if device in ("auto", "cpu") else "cuda")
    return Processes(grid.rank, grid.world_size), str(grid.device)
