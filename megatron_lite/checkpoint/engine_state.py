"""Saving and loading a training run: every process writes what it owns of the engine's state, and reads what it owns.

The format and its readers: `megatron_lite.checkpoint.reader`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_lite.checkpoint.reader import OPTIMIZER_KEYS, CheckpointError, Reader, read_manifest, resolve
from megatron_lite.checkpoint.writer import CheckpointWriter, refuse_not_finite
from megatron_lite.engine.engine import Engine
from megatron_lite.parallel.collectives import barrier, gather


def save(engine: Engine, directory: Path, *, step: int, state: Mapping[str, Any], config_yaml: str) -> Path:
    """Write `directory/step_XXXXXXXX` and let `latest` name it. Every process of the run calls this.

    Raises CheckpointError as `CheckpointWriter`, whose arguments these are.
    """
    writer = CheckpointWriter(engine, directory)
    writer.begin(step=step, state=state, config_yaml=config_yaml)
    writer.finish()
    assert writer.last is not None
    return writer.last.path


def load(engine: Engine, path: Path) -> dict[str, Any]:
    """Read a checkpoint into the engine and return the trainer's state that was saved with it.

    Args:
        path: a run folder, a checkpoints folder or a step folder.

    Raises:
        CheckpointError: no checkpoint there, a missing or corrupted file, or another architecture.
        NotFiniteError: a weight or moment is not finite; on every process.
    """
    path = resolve(path)
    manifest = read_manifest(path)
    check_shapes(engine.parameter_shapes(), manifest, path)
    reader = Reader(path, manifest)
    for kind in ("weight", *OPTIMIZER_KEYS):  # kind by kind, so that a tensor is assembled once where it has to be
        for fragment in engine.optimizer_state.fragments():
            target = fragment.tensors[kind]
            if target.numel():
                target.copy_(reader.read(kind, fragment.name, fragment.shard, fragment.start, target.numel()))
    refuse_not_finite(f"{path} is not finite", gather(reader.not_finite, engine.grid), path.parent, engine.grid)
    engine.optimizer_state.loss_scaler = manifest["loss_scale"]
    engine.optimizer_state.finish_load(manifest["optimizer_steps"])
    barrier(engine.grid)
    return manifest["state"]


def check_shapes(model: Mapping[str, tuple[int, ...]], manifest: Mapping[str, Any], path: Path) -> None:
    """Raises CheckpointError where the shapes of a model's parameters are not those of the checkpoint at `path`."""
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
