"""Distribute groups of runs over processes: the parent assigns groups and writes results, the workers train."""

from __future__ import annotations

import math
import multiprocessing
import multiprocessing.resource_tracker
import os
import platform
import signal
import sys
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

from tools.cli.process_status import describe_status

from .experiment import Run
from .results import Line, Results, result_line
from .run_checkpoint import TimeUpError, remove_checkpoints

# A worker's message: its kind ("progress", "done", "failed", "stopped") and its content.
Message = tuple[str, Any]
# Seconds after the time limit in which processes end their epoch and save. A longer epoch is interrupted.
_GRACE = 60.0


@dataclass(frozen=True)
class Group:
    """Hold runs of one sweep that are trained together."""

    runs: tuple[Run, ...]
    sweep: tuple[Run, ...]

    @property
    def steps(self) -> int:
        return sum(run.steps for run in self.runs)

    @property
    def work(self) -> int:
        """Return a number that grows with the longest training time."""
        return sum(run.steps * run.batch_size * run.length * run.width for run in self.runs)

    def split(self) -> list[Group]:
        middle = len(self.runs) // 2
        return [Group(self.runs[:middle], self.sweep), Group(self.runs[middle:], self.sweep)]

    @property
    def name(self) -> str:
        rates = ", ".join(f"{rate:g}" for rate in dict.fromkeys(run.lr for run in self.runs))
        return f"{self.runs[0].name} lr {rates}"


def groups_of(
    sweeps: Sequence[Sequence[Run]], results: Results, side_by_side: int | None, workers: int = 1
) -> list[Group]:
    """Return the groups of all pending runs, sorted by seed, width and task as in the table, then longest first.

    side_by_side: most runs per group. None puts a whole sweep in one group, and splits groups until there is one per worker.
    """
    groups = []
    for sweep in sweeps:
        pending = results.pending(sweep)
        size = side_by_side or max(1, len(pending))
        for start in range(0, len(pending), size):
            groups.append(Group(tuple(pending[start : start + size]), tuple(sweep)))
    while (
        side_by_side is None
        and len(groups) < workers
        and (divisible := [group for group in groups if len(group.runs) > 1])
    ):
        longest = max(divisible, key=lambda group: group.work)
        groups.remove(longest)
        groups += longest.split()
    rows = [_row(sweep[0]) for sweep in sweeps]
    orders = [list(dict.fromkeys(values)) for values in zip(*rows, strict=True)]
    return sorted(groups, key=lambda group: (*map(list.index, orders, _row(group.runs[0])), -group.work))


def _row(run: Run) -> tuple[int, int, str]:
    """Return the seed, width and task that the results in one row of the table share."""
    return run.seed, run.width, run.base_task


def train_groups(
    groups: Sequence[Group],
    results: Results,
    devices: Sequence[str],
    *,
    graph: bool = True,
    seconds: float = math.inf,
    progress: Callable[[int, str], None] = lambda steps, text: None,
    finished: Callable[[Group, list[Line]], None] = lambda group, lines: None,
    saved: Callable[[str], None] = lambda text: None,
) -> list[str]:
    """Train the groups and add their results. Return one line with the reason per failed group; the others continue.

    Args:
        devices: one process per entry; a device may appear twice. A single device is used in this process.
        seconds: time limit. Groups that are not finished stop and save at the end of an epoch.
        progress: called with the steps that were done or are no longer needed, and a status text.
        finished: called with each finished group and its result lines.
        saved: called with the state of each group that the time limit stopped, in words.
    """
    todo = list(groups)
    end = time.monotonic() + seconds
    failed: list[str] = []
    checkpoint_folder = results.unfinished

    def next_group() -> Group | None:
        while todo and time.monotonic() < end:
            group = todo.pop(0)
            if not results.reached(group.sweep):
                return group
            progress(group.steps, "")
        return None

    def receive(group: Group, reported: list[int], message: Message) -> bool:
        """Process a message and return whether the group has ended. reported: [steps] so far, updated."""
        kind, content = message
        if kind == "progress":
            reported[0] += content[0]
            progress(*content)
            return False
        if kind == "failed":
            failed.append(f"{group.name}: {content}")
        elif kind == "done":
            for line in content:
                results.add(line)
            finished(group, content)
        elif kind == "stopped" and content:
            saved(content)
        if kind != "stopped" or results.reached(group.sweep):
            progress(group.steps - reported[0], "")
        if results.reached(group.sweep):
            remove_checkpoints(checkpoint_folder, group.sweep)
        elif kind == "done":
            remove_checkpoints(checkpoint_folder, group.runs)
        return True

    if len(devices) == 1:
        trainer = Trainer(devices[0], graph, 1, checkpoint_folder, end)
        while (group := next_group()) is not None:
            trainer.train(group, partial(receive, group, [0]))
        return failed
    with _worker_processes(devices, graph, checkpoint_folder, end) as workers:
        busy: dict[Any, tuple[Group, list[int]]] = {}
        idle = list(workers)
        while True:
            while idle and (group := next_group()) is not None:
                connection = idle.pop(0)
                connection.send(group)
                busy[connection] = (group, [0])
            if not busy:
                return failed
            ready: list[Any] = wait(list(busy), None if end == math.inf else max(0.0, end + _GRACE - time.monotonic()))
            if not ready:
                return failed
            for connection in ready:
                group, reported = busy[connection]
                try:
                    message = connection.recv()
                except EOFError:
                    message = ("failed", f"its worker process: {_status(workers[connection])}")
                    del workers[connection]
                if receive(group, reported, message):
                    del busy[connection]
                    if connection in workers:
                        idle.append(connection)
                    for other, (other_group, _) in busy.items():
                        if other_group.sweep == group.sweep and results.reached(group.sweep):
                            other.send(None)
            if not workers:
                return [*failed, *(f"{group.name}: not trained, because all worker processes ended" for group in todo)]


class NotNeededError(Exception):
    """Report that another group of the sweep has reached the target."""


class Trainer:
    """Train groups on one device. Reuse the examples of the previous group if they are equal."""

    def __init__(self, device: str, graph: bool, processes: int, checkpoint_folder: Path, end: float) -> None:
        import torch

        from tools.cli.devices import use_device

        self._device = use_device(device)
        self._graph = graph
        self._unfinished = checkpoint_folder
        self._end = end
        self._examples: tuple[Any, Any] | None = None
        if processes > 1:
            torch.set_num_threads(max(1, (os.cpu_count() or 1) // processes))
        prepare_kernels(self._device)

    def train(self, group: Group, send: Callable[[Message], object]) -> None:
        """Train a group. Send ("progress", (steps, text)) messages and one final message.

        The final message is ("done", lines), ("failed", reason), or ("stopped", text) if the time is up. The text is
        empty if `send` raised NotNeededError.
        """
        from .batches import data_key, prepare

        try:
            key = data_key(group.runs[0])
            if self._examples is None or self._examples[0] != key:
                self._examples = None
                self._examples = (key, prepare(group.runs[0], self._device))
            measured = self._together(list(group.runs), self._examples[1], send)
        except (NotNeededError, TimeUpError) as error:
            send(("stopped", str(error)))
            return
        except Exception as error:
            frame = traceback.extract_tb(error.__traceback__)[-1]
            send(("failed", f"{error_line(error)} ({os.path.relpath(frame.filename)}:{frame.lineno})"))
            return
        environment = self._environment()
        lines = [result_line(run, values, environment) for run, values in zip(group.runs, measured, strict=True)]
        send(("done", lines))

    def _together(self, runs: list[Run], examples: Any, send: Callable[[Message], object]) -> list[dict[str, Any]]:
        """Train the runs together. If memory does not suffice, train one half after the other."""
        import torch

        from .training import train_together

        try:
            return train_together(
                runs,
                examples,
                self._device,
                graph=self._graph,
                progress=lambda steps, text: send(("progress", (steps, text))),
                checkpoint_folder=self._unfinished,
                end=self._end,
            )
        except torch.OutOfMemoryError:
            if len(runs) == 1:
                raise
        finally:
            self._free_memory()
        half = len(runs) // 2
        return self._together(runs[:half], examples, send) + self._together(runs[half:], examples, send)

    def _free_memory(self) -> None:
        """Release cached memory, which other processes on the device need too."""
        import gc

        import torch

        if self._device.type == "cuda":
            gc.collect()
            # The allocator raises after a failed capture.
            with suppress(RuntimeError):
                torch.cuda.empty_cache()

    def _environment(self) -> dict[str, Any]:
        import torch

        from megatron_lite.checkpoint.storage import versions

        name = torch.cuda.get_device_name(self._device) if self._device.type == "cuda" else platform.machine()
        date = datetime.now(UTC).isoformat(timespec="seconds")
        return {"device": name, "date": date, "versions": versions()}


def error_line(error: BaseException) -> str:
    """Return the type of an error and the first line of its message."""
    return f"{type(error).__name__}: {(str(error).strip() or 'no message').splitlines()[0]}"


def prepare_kernels(device: Any) -> None:
    """Use on CUDA one configuration per flash-linear-attention kernel: autotuning takes minutes per shape and process."""
    if device.type == "cuda":
        from tools.loading.triton_autotune import without_tuning

        without_tuning()


@contextmanager
def without_interrupts() -> Iterator[None]:
    """Start processes that never get SIGINT (Ctrl-C). This one gets it afterwards, and ends its workers."""
    received: list[int] = []
    # The first process would start it, which unblocks the signal for that process.
    multiprocessing.resource_tracker.ensure_running()
    # A process inherits the blocked signal. The handler is for this one, since another of its threads may get the signal.
    handler = signal.signal(signal.SIGINT, lambda number, _: received.append(number))
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        signal.signal(signal.SIGINT, handler)
        if received:
            signal.raise_signal(signal.SIGINT)


@contextmanager
def _worker_processes(
    devices: Sequence[str], graph: bool, checkpoint_folder: Path, end: float
) -> Iterator[dict[Any, Any]]:
    """Start one process per device and yield {connection: process}. End the processes at exit."""
    context = multiprocessing.get_context("spawn")
    workers: dict[Any, Any] = {}
    try:
        for device in devices:
            parent_end, worker_end = context.Pipe()
            arguments = (worker_end, device, graph, len(devices), checkpoint_folder, end)
            # Not a daemon, which could not start processes that generate examples.
            process = context.Process(target=_work, args=arguments)
            with without_interrupts():
                process.start()
            worker_end.close()
            workers[parent_end] = process
        yield workers
    finally:
        for connection, process in workers.items():
            connection.close()
            process.terminate()
            process.join(timeout=10)
            process.kill()


def _work(
    connection: Connection, device: str, graph: bool, processes: int, checkpoint_folder: Path, end: float
) -> None:
    # So that the exit is an ordinary one, which releases semaphores.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    trainer: Trainer | None = None

    def send(message: Message) -> None:
        # During training the parent sends only None: the group is no longer needed.
        if message[0] == "progress" and connection.poll():
            connection.recv()
            raise NotNeededError
        connection.send(message)

    while True:
        try:
            group = connection.recv()
        except EOFError:
            return
        if group is None:  # sent after the group had ended
            continue
        try:
            trainer = trainer or Trainer(device, graph, processes, checkpoint_folder, end)
        except Exception as error:
            connection.send(("failed", error_line(error)))
            continue
        trainer.train(group, send)


def _status(process: Any) -> str:
    process.join(timeout=10)
    return "no exit status" if process.exitcode is None else describe_status(process.exitcode)
