"""Read and write the results file: one line of JSON per run."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from .experiment import Run

Line = dict[str, Any]


class Results:
    """Hold the lines of a results file by run id. Add lines inside `writing` only.

    An incomplete last line, written by a process that was killed, is removed when the next line is added. Complete lines
    that other processes append stay. Raises ValueError for a line that is not a result.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.lines: dict[str, Line] = {}
        if path.is_file():
            self._read()

    @property
    def unfinished(self) -> Path:
        """Return the folder of the checkpoints of unfinished runs."""
        return self.path.parent / "unfinished"

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Lock the file for this process and read lines added since. Raises ValueError if another process holds the lock."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.with_suffix(".lock").open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise ValueError(
                    f"{self.path} is locked by another command: wait until it ends, or set output=FOLDER"
                ) from None
            if self.path.is_file():
                self._read()
            yield

    def add(self, line: Line) -> None:
        """Append a line and wait until it is on the disk."""
        with self.path.open("a+b") as file:
            file.seek(0)
            file.truncate(file.read().rfind(b"\n") + 1)
            file.write((json.dumps(line) + "\n").encode())
            file.flush()
            os.fsync(file.fileno())
        self.lines[line["id"]] = line

    def of(self, runs: Iterable[Run]) -> list[Line]:
        """Return the lines of the finished runs."""
        return [self.lines[run.id] for run in runs if run.id in self.lines]

    def reached(self, sweep: Iterable[Run]) -> bool:
        """Return whether one run of the sweep has reached the target, so that the other runs are not needed."""
        return any(
            run.target is not None and run.id in self.lines and self.lines[run.id]["best_accuracy"] >= run.target
            for run in sweep
        )

    def pending(self, sweep: Iterable[Run]) -> list[Run]:
        """Return the runs of the sweep that are still needed."""
        runs = list(sweep)
        return [] if self.reached(runs) else [run for run in runs if run.id not in self.lines]

    def _read(self) -> None:
        *texts, _ = self.path.read_bytes().split(b"\n")
        for number, text in enumerate(texts, 1):
            try:
                line = json.loads(text)
                self.lines[line["id"]] = line
            except (ValueError, TypeError, KeyError):
                shown = text[:80].decode(errors="replace")
                raise ValueError(
                    f"{self.path}:{number} is not a result of a run: {shown!r}; remove the line, or set output=FOLDER"
                ) from None


def result_line(run: Run, measured: Mapping[str, Any], environment: Mapping[str, Any]) -> Line:
    """Return a line with the run's settings, the measured values and the environment (device, date, versions)."""
    names = ("id", "suite", "task", "model", "width", "lr", "weight_decay", "seed")
    settings = {name: getattr(run, name) for name in names}
    rest = {name: getattr(run, name) for name in ("batch_size", "precision", "network", "data")}
    # Further digits are below the resolution of the test sets.
    history = [round(accuracy, 5) for accuracy in measured["history"]]
    return {**settings, **measured, "history": history, **rest, **environment}
