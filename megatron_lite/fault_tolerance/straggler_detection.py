"""Straggler detection: compare the speed of the processes and name the slow ones.

Every process waits for the slowest, so all have equal step times. The local times differ: waiting for data, the forward pass of
the layers, and a fixed matmul (the probe). With collectives inside layers (tensor and context parallelism, ZeRO 3), a slow
process slows the forward pass of its whole group; the probe identifies it. Processes are compared within a pipeline stage. With
torch.compile, CUDA graphs or tensor overlap the forward pass is not timed.
"""

from __future__ import annotations

import contextlib
import socket
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from megatron_lite.parallel.collectives import gather
from megatron_lite.parallel.grid import Grid

if TYPE_CHECKING:
    from megatron_lite.config.schema import ParallelConfig

SLOW = 1.3  # times the median of the stage
LEAST_SECONDS = 2e-3  # above the median; smaller differences are noise
WORDS = {"data": "waits for data", "forward": "takes for its forward pass", "probe": "takes for a fixed matmul"}


@dataclass(frozen=True)
class StragglerReport:
    """Result of one comparison.

    Attributes:
        slowest: the rank with the largest `ratio`.
        ratio: its local seconds (data and forward pass) over the median of its stage.
        probe_ratio: the largest ratio of the probe.
        slow: sentences about ranks that were slow twice in a row.
    """

    slowest: int
    ratio: float
    probe_ratio: float
    slow: list[str]


def timed_layers(layers: Sequence[nn.Module], parallel: ParallelConfig) -> Sequence[nn.Module]:
    """Return the layers whose forward pass can be timed by hooks.

    There are none with torch.compile, which would compile the blocks again, and with CUDA graphs and tensor overlap, which do not
    call the layers.
    """
    return [] if parallel.compile or parallel.cuda_graph or parallel.tensor_overlap else layers


class StragglerDetector:
    """Times the local work of this process in some steps and compares it with that of other processes.

    Args:
        layers: their forward pass is timed; may be empty.
        interval: steps between two measurements; 0: never.
    """

    def __init__(self, layers: Sequence[nn.Module], grid: Grid, interval: int) -> None:
        self._layers, self._grid = layers, grid
        self._interval = interval if grid.world_size > 1 else 0
        self._begin: Any = None
        self._passes: list[tuple[Any, Any]] = []
        self._suspects: set[tuple[int, str]] = set()
        self._hosts: list[str] = []

    def is_due(self, step: int) -> bool:
        """Return whether step `step` (from 1) is measured."""
        return self._interval > 0 and step % self._interval == 0

    @contextlib.contextmanager
    def timing(self, step: int) -> Iterator[None]:
        """Wrap a training step: record begin and end of every layer's forward pass if the step is due."""
        self._passes = []
        if not self.is_due(step):
            yield
            return
        handles = [layer.register_forward_pre_hook(self._begin_pass) for layer in self._layers]
        handles += [layer.register_forward_hook(self._end_pass) for layer in self._layers]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def compare(self, data_seconds: float) -> StragglerReport:
        """Compare the processes after a timed step. Every process calls it and gets the same result.

        data_seconds: time that this process waited for the data of the step.
        """
        if not self._hosts:
            self._hosts = gather(socket.gethostname(), self._grid)
        values = [self._grid.pipe_rank, data_seconds, self._forward_seconds(), self._probe_seconds()]
        local = torch.tensor(values, dtype=torch.float64, device=self._grid.device)
        rows = [torch.empty_like(local) for _ in range(self._grid.world_size)]
        dist.all_gather(rows, local)
        return self._judge([row.tolist() for row in rows])

    def _judge(self, rows: list[list[float]]) -> StragglerReport:
        parts = {"data": [r[1] for r in rows], "forward": [r[2] for r in rows], "probe": [r[3] for r in rows]}
        stages = [int(row[0]) for row in rows]
        medians = {name: _medians(values, stages) for name, values in parts.items()}
        outliers = {
            (rank, name)
            for name, values in parts.items()
            for rank, value in enumerate(values)
            if value > SLOW * medians[name][rank] and value > medians[name][rank] + LEAST_SECONDS
        }
        slow = [
            f"rank {rank} ({self._hosts[rank]}) {WORDS[name]} {parts[name][rank] * 1e3:.3g} ms, the median is "
            f"{medians[name][rank] * 1e3:.3g} ms: every process waits for it"
            for rank, name in sorted(outliers & self._suspects)
        ]
        self._suspects = outliers
        local = [row[1] + row[2] for row in rows]
        ratios = [value / max(median, 1e-9) for value, median in zip(local, _medians(local, stages), strict=True)]
        probes = [value / max(m, 1e-9) for value, m in zip(parts["probe"], medians["probe"], strict=True)]
        slowest = max(range(len(rows)), key=ratios.__getitem__)
        return StragglerReport(slowest, ratios[slowest], max(probes), slow)

    def _begin_pass(self, *_: Any) -> None:
        self._begin = self._mark()

    def _end_pass(self, *_: Any) -> None:
        # Activation checkpointing may stop a recomputed pass before its end.
        self._passes.append((self._begin, self._mark()))

    def _mark(self) -> Any:
        if self._grid.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _forward_seconds(self) -> float:
        if self._grid.device.type == "cuda":
            torch.cuda.synchronize(self._grid.device)
            return sum(begin.elapsed_time(end) for begin, end in self._passes) / 1e3
        return sum(end - begin for begin, end in self._passes)

    def _probe_seconds(self) -> float:
        cuda = self._grid.device.type == "cuda"
        size, kind = (4096, torch.bfloat16) if cuda else (384, torch.float32)
        a = torch.ones(size, size, dtype=kind, device=self._grid.device)
        times = []
        for _ in range(5):
            begin = time.perf_counter()
            a @ a
            if cuda:
                torch.cuda.synchronize(self._grid.device)
            times.append(time.perf_counter() - begin)
        return statistics.median(times)


def _medians(values: Sequence[float], stages: Sequence[int]) -> list[float]:
    """Return for each rank the lower median of its stage; for two processes, the faster one."""
    by_stage = {
        stage: statistics.median_low([value for value, other in zip(values, stages, strict=True) if other == stage])
        for stage in set(stages)
    }
    return [by_stage[stage] for stage in stages]
