"""Runs over several processes: a parent that hands out sweeps and writes results, workers that train."""

from __future__ import annotations

import math
import multiprocessing
import os
import platform
import signal
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from .experiment import Run
from .results import Line, Results, line_of
from .run_checkpoint import TimeUpError, forget

# A worker's message: what it is about, and what it says.
Message = tuple[str, Any]


@dataclass(frozen=True)
class Group:
    """Runs of one sweep that are trained side by side."""

    runs: tuple[Run, ...]
    sweep: tuple[Run, ...]

    @property
    def steps(self) -> int:
        return sum(run.steps for run in self.runs)

    @property
    def work(self) -> int:
        """Grows with the time that it takes at most."""
        return sum(run.steps * run.batch_size * run.length * run.width for run in self.runs)

    def halves(self) -> list[Group]:
        middle = len(self.runs) // 2
        return [Group(self.runs[:middle], self.sweep), Group(self.runs[middle:], self.sweep)]

    @property
    def name(self) -> str:
        rates = ", ".join(f"{rate:g}" for rate in dict.fromkeys(run.lr for run in self.runs))
        return f"{self.runs[0].name} lr {rates}"


def groups_of(
    sweeps: Sequence[Sequence[Run]], results: Results, side_by_side: int | None, workers: int = 1
) -> list[Group]:
    """What is left to do, row by row of the table: seed by seed, the widths in their order, the tasks in theirs; within a row
    the longest first.

    side_by_side: at most so many runs a group; None for a sweep's all, or fewer where there are not enough sweeps for as
    many workers.
    """
    found = []
    for sweep in sweeps:
        pending = results.pending(sweep)
        size = side_by_side or max(1, len(pending))
        for start in range(0, len(pending), size):
            found.append(Group(tuple(pending[start : start + size]), tuple(sweep)))
    while (
        side_by_side is None and len(found) < workers and (several := [group for group in found if len(group.runs) > 1])
    ):
        longest = max(several, key=lambda group: group.work)
        found.remove(longest)
        found += longest.halves()
    rows = [_row(sweep[0]) for sweep in sweeps]
    places = [list(dict.fromkeys(values)) for values in zip(*rows, strict=True)]
    return sorted(found, key=lambda group: (*map(list.index, places, _row(group.runs[0])), -group.work))


def _row(run: Run) -> tuple[int, int, str]:
    """What the results of a row of the table have in common: they are compared when all of them are there."""
    return run.seed, run.width, run.task.partition("/")[0]


def train_groups(
    groups: Sequence[Group],
    results: Results,
    devices: Sequence[str],
    *,
    graph: bool = True,
    seconds: float = math.inf,
    progress: Callable[[int, str], None] = lambda steps, text: None,
    finished: Callable[[Group, list[Line]], None] = lambda group, lines: None,
) -> list[str]:
    """Trains the groups on `devices`, one process a device named there (a device may be named twice), and adds results.

    One device alone is used by this process. When `seconds` have passed, what is not finished is given up (in one process:
    at the end of an epoch). progress is told steps done, or no longer needed, and how far they are.
    Returns what failed, a line each with its reason; the other groups go on.
    """
    todo = list(groups)
    end = time.monotonic() + seconds
    failed: list[str] = []
    unfinished = results.path.parent / "unfinished"

    def next_group() -> Group | None:
        while todo and time.monotonic() < end:
            group = todo.pop(0)
            if not results.reached(group.sweep):
                return group
            progress(group.steps, "")
        return None

    def take(group: Group, told: list[int], message: Message) -> bool:
        """Whether the group has ended with this message."""
        kind, content = message
        if kind == "progress":
            told[0] += content[0]
            progress(*content)
            return False
        if kind == "failed":
            failed.append(f"{group.name}: {content}")
        elif kind == "done":
            for line in content:
                results.add(line)
            finished(group, content)
        if kind != "stopped" or results.reached(group.sweep):
            progress(group.steps - told[0], "")
        if results.reached(group.sweep):
            forget(unfinished, group.sweep)
        elif kind == "done":
            forget(unfinished, group.runs)
        return True

    if len(devices) == 1:
        trainer = Trainer(devices[0], graph, 1, unfinished, end)
        while (group := next_group()) is not None:
            trainer.train(group, partial(take, group, [0]))
        return failed
    with _worker_processes(devices, graph, unfinished) as workers:
        busy: dict[Any, tuple[Group, list[int]]] = {}
        idle = list(workers)
        while True:
            while idle and (group := next_group()) is not None:
                connection = idle.pop(0)
                connection.send(group)
                busy[connection] = (group, [0])
            if not busy:
                return failed
            ready: list[Any] = wait(list(busy), None if end == math.inf else max(0.0, end - time.monotonic()))
            if not ready:
                return failed
            for connection in ready:
                group, told = busy[connection]
                try:
                    message = connection.recv()
                except EOFError:
                    message = ("failed", f"its process ended with status {_status(workers[connection])}")
                    del workers[connection]
                if take(group, told, message):
                    del busy[connection]
                    if connection in workers:
                        idle.append(connection)
                    for other, (theirs, _) in busy.items():
                        if theirs.sweep == group.sweep and results.reached(group.sweep):
                            other.send(None)
            if not workers:
                return [*failed, *(f"{group.name}: no process is left to train it" for group in todo)]


class NotNeededError(Exception):
    """Another group of the sweep has reached the target."""


class Trainer:
    """Trains groups on one device and keeps the examples of the last one. end: of `train_together`."""

    def __init__(self, device: str, graph: bool, processes: int, unfinished: Path, end: float = math.inf) -> None:
        import torch

        from .training import training_device

        self._device = training_device(device)
        self._graph = graph
        self._unfinished = unfinished
        self._end = end
        self._examples: tuple[Any, Any] | None = None
        if processes > 1:
            torch.set_num_threads(max(1, (os.cpu_count() or 1) // processes))
        prepare_kernels(self._device)

    def train(self, group: Group, tell: Callable[[Message], object]) -> None:
        """Tells ("progress", (steps, text)) now and then, then ("done", lines), ("failed", reason) or, where telling has
        raised NotNeededError or time is up, ("stopped", None)."""
        from .batches import data_key, prepare

        try:
            key = data_key(group.runs[0])
            if self._examples is None or self._examples[0] != key:
                self._examples = None
                self._examples = (key, prepare(group.runs[0], self._device))
            found = self._together(list(group.runs), self._examples[1], tell)
        except (NotNeededError, TimeUpError):
            tell(("stopped", None))
            return
        except Exception as error:
            reason = str(error).strip().split("\n")[0]
            place = traceback.extract_tb(error.__traceback__)[-1]
            tell(("failed", f"{type(error).__name__}: {reason} ({os.path.relpath(place.filename)}:{place.lineno})"))
            return
        about = self._about()
        tell(("done", [line_of(run, one, about) for run, one in zip(group.runs, found, strict=True)]))

    def _together(self, runs: list[Run], examples: Any, tell: Callable[[Message], object]) -> list[dict[str, Any]]:
        """Side by side, or where memory does not suffice for all, first one half of them and then the other."""
        import torch

        from .training import train_together

        try:
            return train_together(
                runs,
                examples,
                self._device,
                graph=self._graph,
                progress=partial(_tell_progress, tell),
                unfinished=self._unfinished,
                end=self._end,
            )
        except torch.OutOfMemoryError:
            if len(runs) == 1:
                raise
        finally:
            self._free_memory()
        half = len(runs) // 2
        return [one for part in (runs[:half], runs[half:]) for one in self._together(part, examples, tell)]

    def _free_memory(self) -> None:
        """What a group held is for the other processes on the device too."""
        import gc

        import torch

        if self._device.type == "cuda":
            gc.collect()
            # After a capture that failed the allocator refuses.
            with suppress(RuntimeError):
                torch.cuda.empty_cache()

    def _about(self) -> dict[str, Any]:
        import torch

        from megatron_lite.checkpoint.storage import versions

        name = torch.cuda.get_device_name(self._device) if self._device.type == "cuda" else platform.machine()
        date = datetime.now(UTC).isoformat(timespec="seconds")
        return {"device": name, "date": date, "versions": versions()}


def prepare_kernels(device: Any) -> None:
    """On CUDA one configuration of every FLA kernel: timing them all takes minutes for every shape, and more in chorus."""
    if device.type == "cuda":
        from tools.loading.triton_autotune import without_tuning

        without_tuning()


@contextmanager
def _without_interrupts() -> Iterator[None]:
    """Processes that are started here ignore interrupts of the keyboard from their first import on: these are for the
    parent, which ends its workers."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def _worker_processes(devices: Sequence[str], graph: bool, unfinished: Path) -> Iterator[dict[Any, Any]]:
    """A process a device, each by the connection to it; ended when left."""
    context = multiprocessing.get_context("spawn")
    workers: dict[Any, Any] = {}
    try:
        for device in devices:
            ours, theirs = context.Pipe()
            process = context.Process(target=_work, args=(theirs, device, graph, len(devices), unfinished), daemon=True)
            with _without_interrupts():
                process.start()
            theirs.close()
            workers[ours] = process
        yield workers
    finally:
        for connection, process in workers.items():
            connection.close()
            process.terminate()
            process.join(timeout=10)
            process.kill()


def _work(connection: Connection, device: str, graph: bool, processes: int, unfinished: Path) -> None:
    trainer: Trainer | None = None

    def tell(message: Message) -> None:
        # While a group is trained nothing comes but None: it is not needed any more.
        if message[0] == "progress" and connection.poll():
            connection.recv()
            raise NotNeededError
        connection.send(message)

    while True:
        try:
            group = connection.recv()
        except EOFError:
            return
        if group is None:  # came too late
            continue
        try:
            trainer = trainer or Trainer(device, graph, processes, unfinished)
        except Exception as error:
            connection.send(("failed", f"{type(error).__name__}: {error}"))
            continue
        trainer.train(group, tell)


def _tell_progress(tell: Callable[[Message], object], steps: int, text: str) -> None:
    tell(("progress", (steps, text)))


def _status(process: Any) -> Any:
    process.join(timeout=10)
    return process.exitcode
