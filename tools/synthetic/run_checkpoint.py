"""Runs that were interrupted: a file each with weights, moments and accuracies at the end of an epoch, to go on from."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from data.atomic_io import atomic_write

from .experiment import Run

SECONDS_BETWEEN = 60.0
# Writing takes one part in so many of the time.
_SHARE = 20.0


class Evaluated(NamedTuple):
    """What an evaluation found of a run.

    Attributes:
        accuracy, perplexity: on the first set of examples that is not trained on; perplexity is a batch's, then the mean.
        tested: accuracy on the last such set, which may be the same.
    """

    accuracy: float
    perplexity: float
    tested: float


class Unfinished(NamedTuple):
    """The runs of a group after an epoch. lanes: of `Lane.state`; history: what every evaluation found, a list a run."""

    epoch: int
    seconds: float
    history: list[list[Evaluated]]
    lanes: list[dict[str, Any]]


class TimeUpError(Exception):
    """What was trained is kept and goes on another time."""


class Keeper:
    """Writes a group's state now and then. folder None: never, and there is none."""

    def __init__(self, folder: Path | None, runs: Sequence[Run]) -> None:
        self._folder, self._runs = folder, runs
        self._next = time.monotonic() + SECONDS_BETWEEN

    @property
    def due(self) -> bool:
        return self._folder is not None and time.monotonic() >= self._next

    def keep(self, state: Unfinished) -> None:
        """A file a run, so that they may go on in other groups."""
        if self._folder is None:
            return
        begin = time.monotonic()
        self._folder.mkdir(parents=True, exist_ok=True)
        for run, history, lane in zip(self._runs, state.history, state.lanes, strict=True):
            evaluations = [tuple(evaluated) for evaluated in history]
            one = {"epoch": state.epoch, "seconds": state.seconds, "history": evaluations, "lane": lane}
            with atomic_write(_file(self._folder, run)) as file:
                torch.save(one, file)
        end = time.monotonic()
        self._next = end + max(SECONDS_BETWEEN, _SHARE * (end - begin))

    def kept(self) -> Unfinished | None:
        """What was kept of the runs, where they are all after the same epoch. ValueError for a file that cannot be read."""
        if self._folder is None or not all(_file(self._folder, run).is_file() for run in self._runs):
            return None
        found = [_read(_file(self._folder, run)) for run in self._runs]
        if len({one["epoch"] for one in found}) > 1:
            return None
        first = found[0]
        return Unfinished(
            first["epoch"], first["seconds"], [one["history"] for one in found], [one["lane"] for one in found]
        )


def forget(folder: Path, runs: Iterable[Run]) -> None:
    """Runs that are finished, or not needed."""
    for run in runs:
        _file(folder, run).unlink(missing_ok=True)


def _file(folder: Path, run: Run) -> Path:
    return folder / f"{run.id}.pt"


def _read(path: Path) -> dict[str, Any]:
    try:
        content: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
        content["history"] = [Evaluated(*evaluated) for evaluated in content["history"]]
        return content
    except Exception as error:  # what is damaged ends the unpickler in many ways
        reason = (str(error).strip() or "it ends early").splitlines()[0]
        raise ValueError(f"{path} cannot be read ({reason}): remove it, and the run starts anew") from None
