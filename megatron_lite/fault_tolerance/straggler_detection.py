"""How far apart the processes are in speed, and which one holds the others up.

Every process waits for the slowest, so the seconds of a step are equal everywhere and say nothing. What a process does by
itself differs: waiting for its data, the forward pass of its layers, and a fixed matrix product (the probe). Where layers
exchange data within (tensor and context parallel, ZeRO 3), a slow process slows the forward pass of its group, and the probe
tells it from its neighbours. Stages of a pipeline hold different layers and are compared within a stage.
"""

from __future__ import annotations

import contextlib
import socket
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from megatron_lite.parallel.collectives import gather
from megatron_lite.parallel.grid import Grid

SLOW = 1.3  # times the median of the stage
LEAST_SECONDS = 2e-3  # over the median: less is noise
WORDS = {
    "data": "waits for its data",
    "forward": "takes for the forward pass of its layers",
    "probe": "takes for a fixed matrix product",
}


@dataclass(frozen=True)
class Spread:
    """One comparison.

    Attributes:
        slowest: the rank with the most seconds of its own (data and forward pass).
        ratio: its seconds over the median of its stage.
        probe_ratio: the same of the probe, for the rank that is slowest there.
        slow: sentences about ranks that were slow twice running.
    """

    slowest: int
    ratio: float
    probe_ratio: float
    slow: list[str]


class SpreadMeter:
    """Times this process's own work in some steps and compares it with the others'.

    Args:
        layers: whose forward pass is timed.
        interval: every how many steps; 0: never.
    """

    def __init__(self, layers: Sequence[nn.Module], grid: Grid, interval: int) -> None:
        self._layers, self._grid = layers, grid
        self._interval = interval if grid.world_size > 1 else 0
        self._begin: Any = None
        self._passes: list[tuple[Any, Any]] = []
        self._suspects: set[tuple[int, str]] = set()
        self._hosts: list[str] = []

    def due(self, step: int) -> bool:
        """Whether step `step` (counted from 1) is one to measure."""
        return self._interval > 0 and step % self._interval == 0

    @contextlib.contextmanager
    def timing(self, step: int) -> Iterator[None]:
        """Around a training step: marks begin and end of every layer's forward pass, where the step is due."""
        self._passes = []
        if not self.due(step):
            yield
            return
        handles = [layer.register_forward_pre_hook(self._begins) for layer in self._layers]
        handles += [layer.register_forward_hook(self._ends) for layer in self._layers]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def compare(self, data_seconds: float) -> Spread:
        """After a step that was timed, on every process: the same answer everywhere.

        Args:
            data_seconds: time that this process waited for the data of the step.
        """
        if not self._hosts:
            self._hosts = gather(socket.gethostname(), self._grid)
        values = [self._grid.pipe_rank, data_seconds, self._forward_seconds(), self._probe_seconds()]
        own = torch.tensor(values, dtype=torch.float64, device=self._grid.device)
        rows = [torch.empty_like(own) for _ in range(self._grid.world_size)]
        dist.all_gather(rows, own)
        return self._judge([row.tolist() for row in rows])

    def _judge(self, rows: list[list[float]]) -> Spread:
        parts = {"data": [r[1] for r in rows], "forward": [r[2] for r in rows], "probe": [r[3] for r in rows]}
        stages = [int(row[0]) for row in rows]
        medians = {name: _medians(values, stages) for name, values in parts.items()}
        found = {
            (rank, name)
            for name, values in parts.items()
            for rank, value in enumerate(values)
            if value > SLOW * medians[name][rank] and value > medians[name][rank] + LEAST_SECONDS
        }
        slow = [
            f"rank {rank} ({self._hosts[rank]}) {WORDS[name]} {parts[name][rank] * 1e3:.3g} ms, the others "
            f"{medians[name][rank] * 1e3:.3g} ms: every process waits for it"
            for rank, name in sorted(found & self._suspects)
        ]
        self._suspects = found
        whole = [row[1] + row[2] for row in rows]
        ratios = [value / max(median, 1e-9) for value, median in zip(whole, _medians(whole, stages), strict=True)]
        probes = [value / max(m, 1e-9) for value, m in zip(parts["probe"], medians["probe"], strict=True)]
        slowest = max(range(len(rows)), key=ratios.__getitem__)
        return Spread(slowest, ratios[slowest], max(probes), slow)

    def _begins(self, *_: Any) -> None:
        self._begin = self._mark()

    def _ends(self, *_: Any) -> None:
        # A pass has an end for its begin, but where activation checkpointing stops a second one when it has what it needs.
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
    """For each rank the lower median of its stage: of two processes, the faster."""
    by_stage = {
        stage: statistics.median_low([value for value, other in zip(values, stages, strict=True) if other == stage])
        for stage in set(stages)
    }
    return [by_stage[stage] for stage in stages]
