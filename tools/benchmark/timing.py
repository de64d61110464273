"""Measure the time of one function, launched by PyTorch or as a CUDA graph, and its peak memory."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

Step = Callable[[], object]
T = TypeVar("T")


@dataclass(frozen=True)
class Measurement:
    """Hold milliseconds, and peak GiB beyond the memory allocated before. None: out of memory or not measured."""

    method: str
    length: int
    batch: int
    launched: float | None = None
    queued: float | None = None
    replayed: float | None = None
    memory: float | None = None


def timed(work: Callable[[], T], *, cuda: bool) -> tuple[T, float]:
    """Return the result of one call and its seconds. On CUDA the device is idle before and after."""
    if cuda:
        torch.cuda.synchronize()
    begin = time.perf_counter()
    result = work()
    if cuda:
        torch.cuda.synchronize()
    return result, time.perf_counter() - begin


def measure(method: str, length: int, batch: int, build: Callable[[], tuple[Step, list[Tensor]]]) -> Measurement:
    """Measure a function on the CUDA device. `build` returns the function and the leaves whose gradients it computes."""
    launched = queued = replayed = memory = None
    torch.cuda.empty_cache()
    try:
        step, leaves = build()
        launched = launched_ms(step, leaves)
        memory = peak_gib(step, leaves)
        queued = queued_ms(step, leaves)
        replayed = launched_ms(capture(step, leaves).replay, [])
    except torch.OutOfMemoryError:
        pass
    torch.cuda.synchronize()
    return Measurement(method, length, batch, launched, queued, replayed, memory)


def launched_ms(step: Step, leaves: Sequence[Tensor], seconds: float = 0.2) -> float:
    """Return the median milliseconds of runs that begin with an idle device, an overwritten L2 cache and no gradients."""
    scratch = torch.empty(64 * 2**20, dtype=torch.int32, device="cuda")

    def once() -> float:
        _clear_gradients(leaves)
        scratch.zero_()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        step()
        end.record()
        end.synchronize()
        return start.elapsed_time(end)

    first = min(once() for _ in range(5))
    return statistics.median(once() for _ in range(_runs(first, seconds)))


def queued_ms(step: Step, leaves: Sequence[Tensor]) -> float:
    """Return the milliseconds per run of ten runs launched in sequence, the median over several groups of ten."""

    def ten() -> float:
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(10):
            _clear_gradients(leaves)
            step()
        torch.cuda.synchronize()
        return (time.perf_counter() - begin) * 100

    first = min(ten() for _ in range(2))
    return statistics.median(ten() for _ in range(max(3, _runs(10 * first, 0.2) // 2)))


def host_ms(step: Step, leaves: Sequence[Tensor]) -> float:
    """Return the median milliseconds on a CPU."""

    def once() -> float:
        _clear_gradients(leaves)
        begin = time.perf_counter()
        step()
        return (time.perf_counter() - begin) * 1e3

    return statistics.median(once() for _ in range(_runs(once(), 0.5)))


def peak_gib(step: Step, leaves: Sequence[Tensor]) -> float:
    _clear_gradients(leaves)
    torch.cuda.synchronize()
    allocated = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    step()
    return (torch.cuda.max_memory_allocated() - allocated) / 2**30


def capture(step: Step, leaves: Sequence[Tensor]) -> torch.cuda.CUDAGraph:
    _clear_gradients(leaves)
    torch.cuda.empty_cache()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    _clear_gradients(leaves)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph


def _clear_gradients(leaves: Sequence[Tensor]) -> None:
    for leaf in leaves:
        leaf.grad = None


def _runs(milliseconds: float, seconds: float) -> int:
    return max(5, min(200, int(1e3 * seconds / milliseconds)))
