"""Divide the requests of an evaluation among processes. Every process gets all answers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class Processes:
    """Hold the rank of this process and the number of processes (`torchrun --nproc-per-node 8 eval.py ...`)."""

    rank: int = 0
    size: int = 1

    @property
    def is_main(self) -> bool:
        """Return whether this process prints and writes."""
        return self.rank == 0

    def compute_shared(self, compute: Callable[[], dict[Any, Any]]) -> dict[Any, Any]:
        """Compute a part on every process and return the entries of all parts on every process.

        An error of one process is raised on all processes (as RuntimeError on the others), so that none waits forever.
        """
        if self.size == 1:
            return compute()
        part: dict[Any, Any] = {}
        error: Exception | None = None
        try:
            part = compute()
        except Exception as problem:
            error = problem
        parts = self.gather((part, None if error is None else f"{type(error).__name__}: {error}"))
        if error is not None:
            raise error
        if problems := [text for _, text in parts if text is not None]:
            raise RuntimeError(f"on another process: {problems[0]}")
        return {key: value for entries, _ in parts for key, value in entries.items()}

    def gather(self, value: Any) -> list[Any]:
        """Return the values of all processes, on every process."""
        values: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(values, value)
        return values

    def barrier(self) -> None:
        """Wait until every process has called this function."""
        if self.size > 1:
            dist.barrier()


def join_processes(device: str) -> tuple[Processes, str]:
    """Return the processes that torchrun started, or this one alone, and the device of this one.

    Raises ValueError as `megatron_lite.parallel.grid.init_grid`.
    """
    import os

    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        if device == "auto":
            device = "cuda" if torch.cuda.is_available() else "cpu"
        return Processes(), device
    from megatron_lite.parallel.grid import init_grid

    grid = init_grid(device if device in ("auto", "cpu") else "cuda")
    return Processes(grid.rank, grid.world_size), str(grid.device)
