"""Save and load one checkpoint per run at the end of an epoch: weights, optimizer moments and accuracies."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from data.atomic_io import atomic_write

from .experiment import Run

SECONDS_BETWEEN = 60.0
# Training time per writing time, at least.
_MIN_TRAINING_PER_WRITING = 20.0


class Evaluation(NamedTuple):
    """Hold the result of evaluating a run once.

    Attributes:
        accuracy: on the first evaluation set.
        perplexity: on the first evaluation set, averaged over its batches.
        test_accuracy: on the last evaluation set, which may be the first.
    """

    accuracy: float
    perplexity: float
    test_accuracy: float


class GroupState(NamedTuple):
    """Hold the state of a group of runs after an epoch.

    Attributes:
        history: all evaluations so far, one list per run.
        model_runs: `ModelRun.state` of each run.
    """

    epoch: int
    seconds: float
    history: list[list[Evaluation]]
    model_runs: list[dict[str, Any]]


class TimeUpError(Exception):
    """Report that the time limit has passed; the state is saved. The message tells the epoch and the accuracies."""


class CheckpointStore:
    """Save and load a group's state. With folder None nothing is saved or loaded."""

    def __init__(self, folder: Path | None, runs: Sequence[Run]) -> None:
        self._folder, self._runs = folder, runs
        self._next = time.monotonic() + SECONDS_BETWEEN

    @property
    def due(self) -> bool:
        return self._folder is not None and time.monotonic() >= self._next

    def save(self, state: GroupState) -> None:
        """Write one file per run, so that the runs can continue in other groups."""
        if self._folder is None:
            return
        begin = time.monotonic()
        self._folder.mkdir(parents=True, exist_ok=True)
        for run, history, model_run in zip(self._runs, state.history, state.model_runs, strict=True):
            evaluations = [tuple(evaluation) for evaluation in history]
            content = {"epoch": state.epoch, "seconds": state.seconds, "history": evaluations, "model_run": model_run}
            with atomic_write(_file(self._folder, run)) as file:
                torch.save(content, file)
        end = time.monotonic()
        self._next = end + max(SECONDS_BETWEEN, _MIN_TRAINING_PER_WRITING * (end - begin))

    def load(self) -> GroupState | None:
        """Return the saved state, or None unless all runs were saved after the same epoch.

        Raises ValueError for a file that cannot be read.
        """
        if self._folder is None or not all(_file(self._folder, run).is_file() for run in self._runs):
            return None
        saved = [_read(_file(self._folder, run)) for run in self._runs]
        first = saved[0]
        if any(content["epoch"] != first["epoch"] for content in saved):
            return None
        histories, model_runs = ([content[key] for content in saved] for key in ("history", "model_run"))
        return GroupState(first["epoch"], first["seconds"], histories, model_runs)


def remove_checkpoints(folder: Path, runs: Iterable[Run]) -> None:
    """Remove the files of runs that are finished or no longer needed."""
    for run in runs:
        _file(folder, run).unlink(missing_ok=True)


def _file(folder: Path, run: Run) -> Path:
    return folder / f"{run.id}.pt"


def _read(path: Path) -> dict[str, Any]:
    try:
        content: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
        evaluations = [Evaluation(*values) for values in content["history"]]
        return {key: content[key] for key in ("epoch", "seconds", "model_run")} | {"history": evaluations}
    except Exception as error:  # the unpickler raises many types for a damaged file
        reason = (str(error).strip() or "it ends early").splitlines()[0]
        raise ValueError(
            f"{path} cannot be read ({reason}): remove it, and the run starts from the beginning"
        ) from None
