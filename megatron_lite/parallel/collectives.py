"""Collectives over the replicas or over all ranks, their timeout, and asynchronous copies of device scalars to the host."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_lite.parallel.grid import START_TIMEOUT_MINUTES, Grid

T = TypeVar("T")

# The names of torch 2.13, which warns about those of earlier releases.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def all_reduce_sum(values: list[float], grid: Grid) -> list[float]:
    """Return the sums of the values over the replicas (data and context ranks), in float64, the same on every rank.

    The ranks of one tensor-parallel group and of one pipeline hold copies. Only tensor rank 0 of the last pipeline stage
    contributes: that stage computes the loss.
    """
    if grid.world_size == 1:
        return values
    return all_reduce_async(torch.tensor(values, dtype=torch.float64, device=grid.device), grid)()


def all_reduce_async(values: Tensor, grid: Grid) -> Callable[[], list[float]]:
    """Start `all_reduce_sum` of values [n], float64 on the device. Return a function that waits for the sums.

    The function does not wait for work that the device is given in the meantime.
    """
    if grid.world_size > 1:
        counted = grid.is_last_stage and grid.tensor_rank == 0
        # NCCL reduces float64 as well as gloo does; one small tensor per step costs microseconds.
        values = values.clone() if counted else torch.zeros_like(values)
        dist.all_reduce(values)
    return async_to_host(values)


def async_to_host(x: Tensor) -> Callable[[], list[float]]:
    """Start a copy of x [n] to pinned host memory. Return a function that waits for this copy alone and gives the values."""
    if x.device.type != "cuda":
        values = x.tolist()
        return lambda: values
    host = torch.empty_like(x, device="cpu", pin_memory=True)
    host.copy_(x, non_blocking=True)
    done = torch.cuda.Event()
    done.record()

    def wait() -> list[float]:
        done.synchronize()
        return host.tolist()

    return wait


def any_rank(flags: Sequence[bool], grid: Grid) -> list[bool]:
    """Return for each flag whether it is set on any rank; the same answer on every rank."""
    if grid.world_size == 1:
        return list(flags)
    tensor = torch.tensor([float(flag) for flag in flags], device=grid.device)
    dist.all_reduce(tensor, dist.ReduceOp.MAX)
    return [value > 0 for value in tensor.tolist()]


def all_gather(x: Tensor, group: dist.ProcessGroup, count: int) -> Tensor:
    """Return [count, *x.shape]: x of every rank of the group, in order."""
    out = x.new_empty(count, *x.shape)
    all_gather_single(out.view(-1), x.contiguous().view(-1), group=group)
    return out


def reduce_scatter(parts: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return this rank's row of the sum over the group of parts [count, ...]."""
    out = torch.empty_like(parts[0], memory_format=torch.contiguous_format)
    reduce_scatter_single(out.view(-1), parts.contiguous().view(-1), group=group)
    return out


def broadcast(value: T, grid: Grid) -> T:
    """Return rank 0's value on every rank. The value is pickled between processes of the same run."""
    if grid.world_size == 1:
        return value
    box = [value]
    dist.broadcast_object_list(box, src=0, device=grid.device)
    return box[0]


def gather(value: T, grid: Grid) -> list[T]:
    """Return every rank's value, in rank order, on every rank. The values are pickled as in `broadcast`."""
    if grid.world_size == 1:
        return [value]
    values: list[Any] = [None] * grid.world_size
    dist.all_gather_object(values, value)
    return values


def on_main(grid: Grid, function: Callable[[], T], *, timeout_hours: float | None = None) -> T:
    """Call the function on rank 0 alone and return its value on every rank. Raise its exception on every rank.

    timeout_hours: longest time that the other ranks wait, at the start of a run; None: the timeout of collectives.
    """
    result: Any = None
    error: Exception | None = None
    if timeout_hours is not None:
        set_collective_timeout(3600 * timeout_hours)
    if grid.is_main:
        try:
            result = function()
        except Exception as problem:
            error = problem
    result, sent = broadcast((result, None if error is None else _sendable(error)), grid)
    if timeout_hours is not None:
        set_collective_timeout(60 * START_TIMEOUT_MINUTES)
    if sent is not None:
        raise sent if error is None else error
    return result


def on_all(grid: Grid, function: Callable[[], T]) -> T:
    """Call the function on every rank and return its value there. Raise the first failed rank's exception on every rank."""
    result: Any = None
    error: Exception | None = None
    try:
        result = function()
    except Exception as problem:
        error = problem
    for rank, sent in enumerate(gather(None if error is None else _sendable(error), grid)):
        if sent is not None:
            raise error if rank == grid.rank and error is not None else sent
    return result


def _sendable(error: Exception) -> Exception:
    """Return an error that other ranks can read: this one, or one with its text if pickling fails or loses the text.

    The other one is a ValueError or an OSError if this one is, because they decide the exit status.
    """
    try:
        if str(pickle.loads(pickle.dumps(error))) == str(error):
            return error
    except Exception:  # a class may raise anything
        pass
    for kind in (ValueError, OSError):
        if isinstance(error, kind):
            return kind(str(error))
    return RuntimeError(f"{type(error).__name__}: {error}")


def set_collective_timeout(seconds: float) -> None:
    """Set the timeout of the collectives of every group. Callers raise it for work that takes longer (as in torchtitan)."""
    from torch.distributed import distributed_c10d

    for group in list(distributed_c10d._world.pg_map):
        distributed_c10d._set_pg_timeout(timedelta(seconds=seconds), group)


def barrier(grid: Grid) -> None:
    """Wait for every rank of the run."""
    if grid.world_size > 1:
        dist.barrier()
