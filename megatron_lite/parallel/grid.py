"""The coordinates of this process among all processes of the run.

They follow from the environment variables RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT, which torchrun, srun and
the deepspeed launcher set. Without them the run has one process, which needs no port.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import os
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from megatron_lite.parallel.launcher import claim_rank, join_launcher
from megatron_lite.plural import counted

START_TIMEOUT_MINUTES = 30.0  # of collectives before the first step


@dataclass(frozen=True)
class Grid:
    """Coordinates of this process.

    rank = ((pipe_rank * data_size + data_rank) * context_size + context_rank) * tensor_size + tensor_rank, so that ranks with
    much communication are neighbours, on one machine if possible.

    Attributes:
        rank, world_size: over all processes of the run.
        local_rank: on this machine; the index of its GPU.
        data_rank, data_size: decide the samples it reads.
        context_rank, context_size: decide the part of each sequence it holds.
        tensor_rank, tensor_size: decide the part of each layer it holds.
        pipe_rank, pipe_size: decide the layers it holds.
        device: the device of this process.
        tensor_group, context_group: the processes that differ in that coordinate only; None for a single process.
        stage_group: the processes with the same layers, of all tensor, context and data ranks; None for a single process.
    """

    rank: int
    world_size: int
    local_rank: int
    data_rank: int
    data_size: int
    device: torch.device
    context_rank: int = 0
    context_size: int = 1
    tensor_rank: int = 0
    tensor_size: int = 1
    pipe_rank: int = 0
    pipe_size: int = 1
    tensor_group: dist.ProcessGroup | None = None
    context_group: dist.ProcessGroup | None = None
    stage_group: dist.ProcessGroup | None = None

    @property
    def is_main(self) -> bool:
        """Return whether this process writes logs, progress and shared files."""
        return self.rank == 0

    @property
    def replicas(self) -> int:
        """Return data ranks x context ranks: the processes with equal weights whose gradients are summed."""
        return self.data_size * self.context_size

    @property
    def replica_rank(self) -> int:
        """Return the rank among the replicas."""
        return self.data_rank * self.context_size + self.context_rank

    @property
    def is_last_stage(self) -> bool:
        """Return whether this process computes the loss."""
        return self.pipe_rank == self.pipe_size - 1


def init_grid(
    device: str = "auto",
    timeout_minutes: float = START_TIMEOUT_MINUTES,
    *,
    tensor: int = 1,
    pipeline: int = 1,
    context: int = 1,
) -> Grid:
    """Join the run that the environment describes and return this process's coordinates.

    Args:
        device: "cpu", "cuda", or "auto" for CUDA if there is a device.
        timeout_minutes: timeout of collectives, which ends a run whose peer has died.
        tensor, pipeline, context: parallel sizes; the data size follows.

    Raises:
        ValueError: "cuda" without a device, more processes on a machine than GPUs, or sizes that do not divide the processes.
        RankRefused: this process belongs to an earlier start, or its rank is taken.
    """
    rank, world_size, local_rank = (
        int(os.environ.get(key, default)) for key, default in (("RANK", 0), ("WORLD_SIZE", 1), ("LOCAL_RANK", 0))
    )
    if world_size % (tensor * pipeline * context):
        raise ValueError(
            f"WORLD_SIZE {world_size} is no multiple of tensor {tensor} x pipeline {pipeline} x context {context}; start a "
            f"multiple of {tensor * pipeline * context} processes"
        )
    place = _device(device, local_rank)
    if place.type == "cuda":
        torch.cuda.set_device(place)
    else:
        os.environ["DS_ACCELERATOR"] = "cpu"
        # Huge pages for tensors of two MiB and more: every step allocates its activations, with one page fault per page.
        os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
        _keep_freed_memory()
    if not dist.is_initialized():
        backend = "nccl" if place.type == "cuda" else "gloo"
        limit = timedelta(minutes=timeout_minutes)
        if world_size == 1:
            os.environ.setdefault("LOCAL_RANK", "0")  # required by DeepSpeed
            dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=limit)
        else:
            store = _store(rank, world_size, limit)
            dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=limit)
        atexit.register(dist.destroy_process_group)
    ranks = torch.arange(world_size).reshape(pipeline, -1, context, tensor)
    pipe_rank, data_rank, context_rank, tensor_rank = (ranks == rank).nonzero()[0].tolist()
    return Grid(
        rank,
        world_size,
        local_rank,
        data_rank=data_rank,
        data_size=ranks.shape[1],
        device=place,
        context_rank=context_rank,
        context_size=context,
        tensor_rank=tensor_rank,
        tensor_size=tensor,
        pipe_rank=pipe_rank,
        pipe_size=pipeline,
        tensor_group=_group(ranks, 3, rank, urgent=place.type == "cuda"),
        context_group=_group(ranks, 2, rank),
        stage_group=_group(ranks.reshape(pipeline, -1), 1, rank),
    )


def _group(ranks: torch.Tensor, dimension: int, rank: int, *, urgent: bool = False) -> dist.ProcessGroup | None:
    """Return the group of the processes that differ from `rank` in one dimension only. Every process builds all groups.

    urgent: NCCL's kernels of the group have priority over other kernels.
    """
    if ranks.shape[dimension] == 1:
        return None
    local = None
    for members in ranks.movedim(dimension, -1).reshape(-1, ranks.shape[dimension]).tolist():
        options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True) if urgent else None
        group = dist.new_group(members, pg_options=options)
        if rank in members:
            local = group
    return local


def _store(rank: int, world_size: int, limit: timedelta) -> dist.Store:
    """Return the rendezvous store. Raises RankRefused.

    Between machines each restart has a new store (TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1, docs/guide/launch.md).
    """
    store, _, _ = next(dist.rendezvous("env://", timeout=limit))
    if os.environ.get("LOCAL_WORLD_SIZE") == str(world_size):
        store = join_launcher(store, world_size, limit.total_seconds())
    claim_rank(store, rank)
    return store


def _keep_freed_memory() -> None:
    """Let glibc keep freed memory. Returned to the system, it would cost one page fault per page in the next step."""
    mmap_threshold, trim_threshold = -3, -1  # M_MMAP_THRESHOLD, M_TRIM_THRESHOLD of malloc.h
    with contextlib.suppress(OSError, AttributeError):  # another libc
        libc = ctypes.CDLL(None)
        libc.mallopt(mmap_threshold, 32 << 20)  # its maximum
        libc.mallopt(trim_threshold, 2**31 - 1)


def _device(name: str, local_rank: int) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ValueError("run.device = cuda: torch sees no CUDA device; set run.device=cpu or auto")
    if local_rank >= torch.cuda.device_count():
        raise ValueError(
            f"LOCAL_RANK {local_rank}: this machine has {counted(torch.cuda.device_count(), 'GPU')}; "
            f"start at most that many processes on it (torchrun --nproc-per-node)"
        )
    return torch.device("cuda", local_rank)
