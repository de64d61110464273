"""The checkpoints of a run: save, save in the background, load, find the latest. `reader.py` describes the format."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from megatron_lite.checkpoint.reader import (
    CheckpointError,
    Reader,
    exists,
    is_muon,
    read_manifest,
    resolve,
)
from megatron_lite.checkpoint.writer import CheckpointWriter, refuse_not_finite
from megatron_lite.optim.zero_state import AVERAGE, MOMENTS
from megatron_lite.parallel.collectives import barrier, gather, on_all


class Checkpointer(CheckpointWriter):
    """Saves and loads the state of an engine. Every process of the run calls the same methods after the same steps."""

    def save(self, *, step: int, state: Mapping[str, Any], config_yaml: str) -> Path:
        """Save and wait; return the step folder. Arguments and errors are those of `save_async`."""
        self.save_async(step=step, state=state, config_yaml=config_yaml)
        self.finish()
        assert self.last is not None
        return self.last.path

    def load(self, path: Path | None = None) -> dict[str, Any]:
        """Read a checkpoint into the engine and return the trainer's state of the checkpoint.

        Args:
            path: a run folder, a checkpoints folder or a step folder; None: the folder of this run.

        Raises:
            CheckpointError: no checkpoint, a missing or corrupted file, or another architecture; on every rank.
            NotFiniteError: a weight or moment is not finite; on every rank.
        """
        optimizer, grid = self._engine.optimizer_state, self._engine.grid
        path, manifest, not_finite = on_all(grid, lambda: self._read_state(path or self.directory))
        names = [name for names in gather(not_finite, grid) for name in names]
        refuse_not_finite(f"{path} is not finite", names, path.parent, grid)
        optimizer.loss_scaler_state = manifest["loss_scale"]
        optimizer.finish_load(manifest["optimizer_steps"])
        barrier(grid)
        if grid.is_main and (change := optimizer_change(manifest, self._engine.muon_parameters)):
            print(f"optimizer of {path}: {change}")
        return manifest["state"]

    def latest(self) -> Path | None:
        """Return the newest step folder of the run, or None. Raises CheckpointError."""
        return resolve(self.directory) if exists(self.directory) else None

    def _read_state(self, folder: Path) -> tuple[Path, dict[str, Any], list[str]]:
        """Read this rank's weights and moments; return the step folder, its manifest and the non-finite tensors."""
        path = resolve(folder)
        manifest = read_manifest(path)
        check_shapes(self._engine.parameter_shapes(), manifest, path)
        reader = Reader(path, manifest)
        optimizer, muon = self._engine.optimizer_state, self._engine.muon_parameters
        kinds = {kind: kind for kind in ("weight", *MOMENTS)}
        if optimizer.has_average:  # which begins at the weights of a checkpoint without one
            kinds[AVERAGE] = AVERAGE if manifest.get(AVERAGE) else "weight"
        for kind, stored in kinds.items():  # kind by kind, so that a resharded tensor is assembled only once
            for fragment in optimizer.fragments():
                target = fragment.tensors.get(kind)
                if target is None or not target.numel():
                    continue
                if kind in MOMENTS and fragment.name not in muon and is_muon(manifest, fragment.name):
                    target.zero_()  # without the second moment, AdamW cannot use the first one
                else:
                    target.copy_(reader.read(stored, fragment.name, fragment.shard, fragment.start, target.numel()))
        return path, manifest, reader.not_finite


def optimizer_change(manifest: Mapping[str, Any], muon: Collection[str]) -> str:
    """Return what a change of the optimizer keeps and drops of a checkpoint's state; empty without a change.

    muon: names of the parameters that Muon updates from now on.
    """
    if manifest.get("optimizer") == "none":
        return ""
    stored = {name for name in manifest["tensors"] if is_muon(manifest, name)}
    to_muon, to_adamw = len(set(muon) - stored), len(stored - set(muon))
    changes = []
    if to_muon:
        changes.append(
            f"{to_muon} matrices change from AdamW to Muon: weights and first moments (as momentum) are kept, second moments "
            "are dropped"
        )
    if to_adamw:
        changes.append(
            f"{to_adamw} matrices change from Muon to AdamW: weights are kept, momentum is dropped and both moments begin at "
            "zero"
        )
    return "; ".join(changes) + "; the state of all other parameters is kept" if changes else ""


def check_shapes(model: Mapping[str, tuple[int, ...]], manifest: Mapping[str, Any], path: Path) -> None:
    """Raise CheckpointError if the shapes of a model's parameters differ from those of the checkpoint at `path`."""
    stored = {name: tuple(tensor["shape"]) for name, tensor in manifest["tensors"].items()}
    differing = [
        f"{name}: {stored.get(name, 'absent')} in the checkpoint, {model.get(name, 'absent')} in the model"
        for name in [*model, *(name for name in stored if name not in model)]
        if model.get(name) != stored.get(name)
    ]
    if differing:
        raise CheckpointError(
            f"{path} has another architecture: {len(differing)} of {len(model)} tensors differ, the first ones "
            + "; ".join(differing[:3])
            + ". Use the model section of its config.yml, or another run.name"
        )
