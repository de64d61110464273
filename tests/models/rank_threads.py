"""`ContextParallelGroup` with one thread per rank, for tests in one process."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from models.operators.context_parallel import context_parallel


@dataclass
class Meeting:
    """Exchange tensors between the threads of a test; `gathers` counts the elements that one thread sends forward."""

    count: int
    gathers: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.barrier = threading.Barrier(self.count, timeout=120)
        self.parts: list[Tensor] = [torch.empty(0)] * self.count

    def all_parts(self, index: int, part: Tensor) -> Tensor:
        self.parts[index] = part
        self.barrier.wait()
        together = torch.stack(self.parts)
        self.barrier.wait()
        return together


@dataclass(frozen=True)
class Threads:
    """`ContextParallelGroup` with one thread per rank."""

    index: int
    count: int
    meeting: Meeting

    def gather(self, x: Tensor) -> Tensor:
        if self.index == 0:
            self.meeting.gathers.append(x.numel())
        return _Gather.apply(x, self)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Threads) -> Tensor:
        ctx.group = group
        return group.meeting.all_parts(group.index, x.detach().clone())

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        group = ctx.group
        return group.meeting.all_parts(group.index, gradient)[:, group.index].sum(0), None


def over_ranks(count: int, work: Callable[[int], Any], meeting: Meeting | None = None) -> list[Any]:
    """Call work(index) in `count` threads, each under context parallelism. Return the results in order."""
    meeting = meeting or Meeting(count)
    results: list[Any] = [None] * count

    def run(index: int) -> None:
        try:
            with context_parallel(Threads(index, count, meeting)):
                results[index] = work(index)
        except BaseException as error:
            meeting.barrier.abort()
            results[index] = error

    threads = [threading.Thread(target=run, args=(index,)) for index in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    errors = [result for result in results if isinstance(result, BaseException)]
    for error in sorted(errors, key=lambda error: isinstance(error, threading.BrokenBarrierError)):
        raise error
    return results
