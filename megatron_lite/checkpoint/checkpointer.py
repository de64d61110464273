"""The checkpoints of a run, for its trainer: save, save in the background, load, find the latest.

The format: `megatron_lite.checkpoint.reader`. The files are written by `megatron_lite.checkpoint.writer`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_lite.checkpoint.reader import (
    OPTIMIZER_KEYS,
    CheckpointError,
    Reader,
    exists,
    read_manifest,
    resolve,
    step_folders,
)
from megatron_lite.checkpoint.storage import prune
from megatron_lite.checkpoint.writer import CheckpointWriter, refuse_not_finite
from megatron_lite.engine.engine import Engine
from megatron_lite.parallel.collectives import barrier, gather, on_all


class Checkpointer(CheckpointWriter):
    """Saves and loads the state of an engine. Every process of the run calls the same methods after the same steps.

    Args:
        directory: the checkpoints folder of the run, on a disk that all processes share.
        asynchronous: write while training goes on, from a copy that stays allocated for the next one.
        timeout_seconds: longest time that `finish` waits for a file; inf: no limit.
        keep_last: how many of the newest checkpoints stay when one is complete; 0: all.
        is_permanent: whether the checkpoint of a step stays in any case, and does not count.
    """

    def __init__(
        self,
        engine: Engine,
        directory: Path,
        *,
        asynchronous: bool = False,
        timeout_seconds: float = math.inf,
        keep_last: int = 0,
        is_permanent: Callable[[int], bool] = lambda step: False,
    ) -> None:
        super().__init__(engine, directory, asynchronous=asynchronous, timeout_seconds=timeout_seconds)
        self._keep_last, self._is_permanent = keep_last, is_permanent

    def save(self, *, step: int, state: Mapping[str, Any], config_yaml: str) -> Path:
        """Save and wait; return the step folder. Arguments and errors are those of `save_async`."""
        self.save_async(step=step, state=state, config_yaml=config_yaml)
        self.finish()
        assert self.last is not None
        return self.last.path

    def load(self, path: Path | None = None) -> dict[str, Any]:
        """Read a checkpoint into the engine and return the trainer's state that was saved with it.

        Args:
            path: a run folder, a checkpoints folder or a step folder; None: the folder of this run.

        Raises:
            CheckpointError: no checkpoint there, a missing or corrupted file, or another architecture; on every rank, also
                if one rank alone reads the file.
            NotFiniteError: a weight or moment is not finite; on every rank.
        """
        optimizer, grid = self._engine.optimizer_state, self._engine.grid
        path, manifest, not_finite = on_all(grid, lambda: self._read_state(path or self._directory))
        refuse_not_finite(f"{path} is not finite", gather(not_finite, grid), path.parent, grid)
        optimizer.loss_scaler = manifest["loss_scale"]
        optimizer.finish_load(manifest["optimizer_steps"])
        barrier(grid)
        return manifest["state"]

    def latest(self) -> Path | None:
        """Return the newest step folder of the run; None where there is none. Raises CheckpointError."""
        return resolve(self._directory) if exists(self._directory) else None

    def refuse_not_finite(self, what: str, names: Sequence[str]) -> None:
        """Raise NotFiniteError on every process where tensors are named, the same on all of them.

        Args:
            what: begins the message: "step 3 is not finite".
        """
        refuse_not_finite(what, [names], self._directory, self._engine.grid)

    def _read_state(self, folder: Path) -> tuple[Path, dict[str, Any], list[str]]:
        """Copy this rank's weights and moments; return the step folder, its manifest and the names that are not finite."""
        path = resolve(folder)
        manifest = read_manifest(path)
        check_shapes(self._engine.parameter_shapes(), manifest, path)
        reader = Reader(path, manifest)
        for kind in ("weight", *OPTIMIZER_KEYS):  # kind by kind, so that a tensor is assembled once where it has to be
            for fragment in self._engine.optimizer_state.fragments():
                target = fragment.tensors[kind]
                if target.numel():
                    target.copy_(reader.read(kind, fragment.name, fragment.shard, fragment.start, target.numel()))
        return path, manifest, reader.not_finite

    def _after_save(self) -> None:
        if self._keep_last:
            keep = {step for step in step_folders(self._directory) if self._is_permanent(step)}
            prune(self._directory, keep_last=self._keep_last, keep=keep)


def check_shapes(model: Mapping[str, tuple[int, ...]], manifest: Mapping[str, Any], path: Path) -> None:
    """Raise CheckpointError where the shapes of a model's parameters are not those of the checkpoint at `path`."""
    stored = {name: tuple(tensor["shape"]) for name, tensor in manifest["tensors"].items()}
    differing = [
        f"{name}: {stored.get(name, 'absent')} in the checkpoint, {model.get(name, 'absent')} in the model"
        for name in [*model, *(name for name in stored if name not in model)]
        if model.get(name) != stored.get(name)
    ]
    if differing:
        raise CheckpointError(
            f"{path} is of another architecture: {len(differing)} of {len(model)} tensors differ, the first ones "
            + "; ".join(differing[:3])
            + ". Start with the model section of its config.yml, or in another run.directory"
        )
