"""This process's place among all processes, and the few collectives that the trainer needs.

The environment says everything (`torchrun`, `srun` and the deepspeed launcher all set it): RANK, WORLD_SIZE,
LOCAL_RANK, MASTER_ADDR, MASTER_PORT. Without them the run has one process, which talks to nobody and needs no port.
"""

from __future__ import annotations

import atexit
import os
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class Grid:
    """Coordinates of this process.

    Attributes:
        rank, world_size: over all processes of the run.
        local_rank: on this machine; the index of its GPU.
        data_rank, data_size: place in and size of the data-parallel group.
        device: where this process computes.
    """

    rank: int
    world_size: int
    local_rank: int
    data_rank: int
    data_size: int
    device: torch.device

    @property
    def is_main(self) -> bool:
        """Whether this process writes logs, progress and shared files."""
        return self.rank == 0


def init_grid(device: str = "auto", timeout_minutes: float = 30.0) -> Grid:
    """Join the run that the environment describes and return this process's place in it.

    Args:
        device: "cpu", "cuda", or "auto" for CUDA where there is one.
        timeout_minutes: a collective that waits longer than this fails, which ends a run whose peer has died.

    Raises:
        ValueError: CUDA is asked for and absent, or there are more processes on a machine than GPUs.
    """
    rank, world_size, local_rank = (
        int(os.environ.get(key, default)) for key, default in (("RANK", 0), ("WORLD_SIZE", 1), ("LOCAL_RANK", 0))
    )
    place = _device(device, local_rank)
    if place.type == "cuda":
        torch.cuda.set_device(place)
    else:
        os.environ["DS_ACCELERATOR"] = "cpu"
    if not dist.is_initialized():
        backend = "nccl" if place.type == "cuda" else "gloo"
        limit = timedelta(minutes=timeout_minutes)
        if world_size == 1:
            os.environ.setdefault("LOCAL_RANK", "0")  # DeepSpeed insists on it
            dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=limit)
        else:
            dist.init_process_group(backend, timeout=limit)
        atexit.register(dist.destroy_process_group)
    return Grid(rank, world_size, local_rank, data_rank=rank, data_size=world_size, device=place)


def reduce_sum(values: list[float], grid: Grid) -> list[float]:
    """Sums of the values over the data-parallel group, in float64 (the same on every process)."""
    if grid.data_size == 1:
        return values
    # NCCL reduces float64 as well as gloo does; one small tensor a step costs microseconds.
    tensor = torch.tensor(values, dtype=torch.float64, device=grid.device)
    dist.all_reduce(tensor)
    return tensor.tolist()


def broadcast(value: Any, grid: Grid) -> Any:
    """Rank 0's value, on every process. The value is pickled between processes of the same run."""
    if grid.world_size == 1:
        return value
    box = [value]
    dist.broadcast_object_list(box, src=0, device=grid.device)
    return box[0]


def barrier(grid: Grid) -> None:
    """Wait for every process of the run."""
    if grid.world_size > 1:
        dist.barrier()


def _device(name: str, local_rank: int) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ValueError("run.device: cuda is asked for, but torch sees no CUDA device; use run.device=cpu or auto")
    if local_rank >= torch.cuda.device_count():
        raise ValueError(
            f"LOCAL_RANK {local_rank}: this machine has {torch.cuda.device_count()} GPUs; "
            f"start at most that many processes on it (torchrun --nproc-per-node)"
        )
    return torch.device("cuda", local_rank)
