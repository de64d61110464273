"""Decide from which checkpoint a run starts."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_lite.checkpoint.checkpointer import Checkpointer, check_shapes
from megatron_lite.checkpoint.reader import (
    CheckpointError,
    exists,
    is_own_checkpoint,
    read_config_yaml,
    read_manifest,
    resolve,
)
from megatron_lite.checkpoint.storage import archive_all, rollback_to
from megatron_lite.checkpoint.verify import newest_verified
from megatron_lite.config.schema import CheckpointConfig
from megatron_lite.parallel.collectives import on_all, on_main
from megatron_lite.parallel.grid import Grid


@dataclass(frozen=True)
class StartPoint:
    """The checkpoint that a run starts from.

    Attributes:
        path: its step folder.
        is_own: the run wrote it; otherwise the run takes its weights and optimizer state and begins at step 0.
        rolls_back: later checkpoints of the run are archived.
        manifest: its manifest.
    """

    path: Path
    is_own: bool
    rolls_back: bool
    manifest: dict[str, Any]

    @property
    def is_trained(self) -> bool:
        """Return whether the run has completed steps; an imported checkpoint has none."""
        return self.is_own and self.manifest["step"] > 0

    def read_train_steps(self) -> int:
        """Return `schedule.train_steps` of the run that wrote the checkpoint. Raises CheckpointError."""
        return read_config_yaml(self.path)["schedule"]["train_steps"]


def find_start(config: CheckpointConfig, grid: Grid) -> StartPoint | None:
    """Return the checkpoint to start from, the same on every process; None for a new run.

    `resume: never` archives the checkpoints of the folder. A path of another run applies to the first start only; later starts
    resume from the run's own checkpoints.

    Raises:
        CheckpointError: the checkpoint is missing or cannot be read.
    """

    def find() -> tuple[Path | None, bool, bool]:
        if _effective_resume(config) == "never":
            archive_all(Path(config.directory))
        return _find(config)

    path, is_own, rolls_back = on_main(grid, find)
    return StartPoint(path, is_own, rolls_back, on_all(grid, lambda: read_manifest(path))) if path else None


def restore(checkpointer: Checkpointer, start: StartPoint, grid: Grid) -> tuple[dict[str, Any], Path | None]:
    """Load the start point into the engine. Every process calls it.

    Returns:
        the trainer's state, empty for a checkpoint of another run; and the archive of later checkpoints, or None.

    Raises:
        CheckpointError, NotFiniteError: as `Checkpointer.load`.
    """
    state = checkpointer.load(start.path)
    if not start.is_own:
        return {}, None
    return state, on_main(grid, lambda: rollback_to(start.path)) if start.rolls_back else None


def _find(config: CheckpointConfig) -> tuple[Path | None, bool, bool]:
    """Return the step folder, whether this run wrote it, and whether the run rolls back to it."""
    directory, resume = Path(config.directory), _effective_resume(config)
    if resume == "never":
        return None, False, False
    if resume == "newest_readable":
        newest, problems = newest_verified(directory)
        for problem in problems:
            print(f"unreadable checkpoint: {problem}", file=sys.stderr)
        return newest, newest is not None, bool(problems)
    source = _named_source(directory, resume)
    if source is None:
        return None, False, False
    is_own = source.resolve().parent == directory.resolve()
    if is_own and resume != "auto" and not is_own_checkpoint(resume, directory):
        print(
            f"checkpoint.resume = {resume} applies to the first start only: resuming from this run's own checkpoints "
            f"(to start from there again, set another run.name or run.directory, or move {directory} away)"
        )
    path = directory / source.resolve().name if is_own else source
    return path, is_own, is_own and is_own_checkpoint(resume, directory)


def check_start(
    config: CheckpointConfig, sequence_length: int, shapes: Mapping[str, tuple[int, ...]]
) -> Mapping[str, Any] | None:
    """Return the manifest of the checkpoint that a start would read; None for a new run. Archive nothing.

    shapes: of the model's parameters. Raises the errors of `find_start`, `check_length` and `check_shapes`.
    """
    path, is_own, rolls_back = _find(config)
    if path is None:
        return None
    start = StartPoint(path, is_own, rolls_back, read_manifest(path))
    check_length(start, sequence_length)
    check_shapes(shapes, start.manifest, path)
    return start.manifest


def check_length(start: StartPoint, sequence_length: int) -> None:
    """Raise ValueError unless a run keeps its sequence length, and a new run is no shorter than the one it starts from.

    An imported checkpoint has completed no steps and allows every length.
    """
    if start.manifest["step"] == 0:
        return
    trained = read_config_yaml(start.path)["batch"].get("sequence_length")
    if start.is_own and trained != sequence_length:
        raise ValueError(
            f"batch.sequence_length = {sequence_length}: {start.path} was trained with {trained}, and its position in the "
            f"data counts samples of that length; set batch.sequence_length={trained}, or start another length stage as a "
            f"run of its own: run.name=NAME checkpoint.resume={start.path.parent.parent}"
        )
    if sequence_length < trained:
        raise ValueError(
            f"batch.sequence_length = {sequence_length}: a length stage cannot start from a longer one, and "
            f"checkpoint.resume = {start.path} was trained with {trained}; at least {trained} is allowed. Set "
            f"batch.sequence_length={trained}, or name a shorter stage in checkpoint.resume. An exported and "
            "imported model (python -m tools.convert_hf) may start with any length"
        )


def _named_source(directory: Path, resume: str) -> Path | None:
    """Return the step folder to start from; None for a new run.

    A path counts at the first start, or if it names a checkpoint of this run. Later starts read the newest own checkpoint.
    """
    has_begun = exists(directory)
    if resume != "auto" and (not has_begun or is_own_checkpoint(resume, directory)):
        try:
            return resolve(resume)
        except CheckpointError as error:
            words = "; auto, newest_readable and never are also allowed"
            raise CheckpointError(f"checkpoint.resume = {resume}: {error}{words}") from error
    return resolve(directory) if has_begun else None


def _effective_resume(config: CheckpointConfig) -> str:
    """Return `checkpoint.resume`, or auto if a launcher restarts a command that has already written a checkpoint."""
    directory, resume = Path(config.directory), config.resume
    if resume == "newest_readable":
        return resume
    # torchrun --max-restarts; a job that SLURM requeued.
    counts = (os.environ.get(name, "0") for name in ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT"))
    if any(count != "0" for count in counts) and exists(directory):
        with suppress(CheckpointError, KeyError):
            if read_config_yaml(directory)["checkpoint"]["resume"] == resume:
                return "auto"
    return resume
