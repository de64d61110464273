"""What has been measured: a line of JSON a run, in one file that grows by whole lines."""

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
    """The lines of a results file, by the id of their run. Lines are added inside `writing`.

    Raises ValueError for a line that is no result; an unfinished last line, of a process that was killed, is cut off when
    the next one is written. Whole lines that others append in between stay.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.lines: dict[str, Line] = {}
        if path.is_file():
            self._read()

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Keeps the file for this process; lines that others have added since are read. ValueError where another has it."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.with_suffix(".lock").open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise ValueError(
                    f"{self.path} is being written by another command: wait for its end, or set output=FOLDER"
                ) from None
            if self.path.is_file():
                self._read()
            yield

    def add(self, line: Line) -> None:
        """Appends a line; it is on the disk when this returns."""
        with self.path.open("a+b") as file:
            file.seek(0)
            file.truncate(file.read().rfind(b"\n") + 1)
            file.write((json.dumps(line) + "\n").encode())
            file.flush()
            os.fsync(file.fileno())
        self.lines[line["id"]] = line

    def of(self, runs: Iterable[Run]) -> list[Line]:
        """The lines of those of the runs that were finished."""
        return [self.lines[run.id] for run in runs if run.id in self.lines]

    def reached(self, sweep: Iterable[Run]) -> bool:
        """Whether one of a sweep's runs has reached the target, so that the rest need not run."""
        return any(
            run.target is not None and run.id in self.lines and self.lines[run.id]["best_accuracy"] >= run.target
            for run in sweep
        )

    def pending(self, sweep: Iterable[Run]) -> list[Run]:
        """What a sweep still needs."""
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
                    f"{self.path}:{number} is no result of a run: {shown!r}; take the line out, or set output=FOLDER"
                ) from None


def line_of(run: Run, found: Mapping[str, Any], about: Mapping[str, Any]) -> Line:
    """A run's settings, then what was found, then about what it ran on."""
    settings = {
        "id": run.id,
        "suite": run.suite,
        "task": run.task,
        "model": run.model,
        "width": run.width,
        "lr": run.lr,
        "weight_decay": run.weight_decay,
        "seed": run.seed,
    }
    rest = {"batch_size": run.batch_size, "precision": run.precision, "network": run.network, "data": run.data}
    # Half of a line would be digits of accuracies that no test set tells apart.
    history = [round(accuracy, 5) for accuracy in found["history"]]
    return {**settings, **found, "history": history, **rest, **about}
