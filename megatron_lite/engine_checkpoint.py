"""Saving and loading a training run: every process writes what it owns of the engine's state, and reads what it owns.

The format and its readers: `megatron_lite.checkpoint`.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from megatron_lite.checkpoint import (
    FORMAT,
    OPTIMIZER_KEYS,
    VERSION,
    CheckpointError,
    Part,
    Reader,
    read_manifest,
    resolve,
    sync,
    versions,
    write_file,
    write_text,
)
from megatron_lite.engine import Engine
from megatron_lite.grid import barrier, gather


def save(engine: Engine, directory: Path, *, step: int, state: Mapping[str, Any], config_yaml: str) -> Path:
    """Write `directory/step_XXXXXXXX` and let `latest` name it. Every process of the run calls this.

    Args:
        directory: the checkpoints folder of the run, on a disk that all processes share.
        state: the trainer's state, as JSON values; returned by `load`.

    Raises:
        CheckpointError: on every process, when one of them could not write (a full disk, say). Nothing is left behind.
    """
    grid = engine.grid
    final = directory / f"step_{step:08d}"
    aside = directory / f".step_{step:08d}.writing"
    problem = ""
    if grid.is_main:
        try:
            directory.mkdir(parents=True, exist_ok=True)
            for leftover in directory.glob(".step_*.writing"):  # of a save that was killed
                shutil.rmtree(leftover)
            aside.mkdir()
        except OSError as error:
            problem = str(error)
    barrier(grid)
    pieces: dict[str, list[dict[str, Any]]] = {}
    files: dict[str, dict[str, Any]] = {}
    try:
        if not problem:
            pieces, files = _write_own(engine, aside)
    except (OSError, SafetensorError) as error:
        problem = str(error)
    everyone = gather((problem, pieces, files), grid)
    problem = next((text for text, _, _ in everyone if text), "")
    if not problem and grid.is_main:
        try:
            _write_manifest(engine, aside, everyone, step, state, config_yaml)
            if final.exists():  # the same step saved again, after a resume from an earlier one
                shutil.rmtree(final)
            os.replace(aside, final)
            sync(directory)
            write_text(directory / "latest", final.name + "\n")
        except OSError as error:
            problem = str(error)
    problem = next((text for text in gather(problem, grid) if text), "")
    if problem:
        if grid.is_main:
            shutil.rmtree(aside, ignore_errors=True)
        free = shutil.disk_usage(directory).free / 2**30 if directory.exists() else math.nan
        raise CheckpointError(
            f"could not write the checkpoint {final}: {problem} ({free:.2f} GiB free on that disk). "
            f"Earlier checkpoints are untouched; free space or set checkpoint.directory elsewhere, then resume"
        )
    return final


def load(engine: Engine, path: Path) -> dict[str, Any]:
    """Read a checkpoint into the engine and return the trainer's state that was saved with it.

    Args:
        path: a run folder, a checkpoints folder or a step folder.

    Raises:
        CheckpointError: no checkpoint there, a missing or corrupted file, or another architecture.
    """
    path = resolve(path)
    manifest = read_manifest(path)
    _check_shapes(engine.parameter_shapes(), {name: tuple(t["shape"]) for name, t in manifest["tensors"].items()}, path)
    reader = Reader(path, manifest)
    for kind in ("weight", *OPTIMIZER_KEYS):  # kind by kind, so that a tensor is assembled once where it has to be
        for fragment in engine.optimizer_state.fragments():
            target = fragment.tensors[kind]
            if target.numel():
                target.copy_(reader.read(kind, fragment.name, fragment.shard, fragment.start, target.numel()))
    engine.optimizer_state.loss_scaler = manifest["loss_scale"]
    engine.optimizer_state.finish_load(manifest["optimizer_steps"])
    barrier(engine.grid)
    return manifest["state"]


def _write_own(engine: Engine, aside: Path) -> tuple[dict[str, list[dict[str, Any]]], dict[str, dict[str, Any]]]:
    rank = engine.grid.rank
    tensors: dict[str, dict[str, Tensor]] = {"weights": {}, "optimizer": {}}
    pieces: dict[str, list[dict[str, Any]]] = {}
    for fragment in engine.optimizer_state.fragments():
        numel = fragment.tensors["weight"].numel()
        if not numel or not fragment.primary:
            continue
        part = Part(fragment.name, fragment.shard, fragment.start, numel)
        pieces.setdefault(fragment.name, []).append(part.entry(rank))
        tensors["weights"][f"weight/{fragment.name}"] = _host_copy(fragment.tensors["weight"])
        for key in OPTIMIZER_KEYS:
            tensors["optimizer"][f"{key}/{fragment.name}"] = _host_copy(fragment.tensors[key])
    files: dict[str, dict[str, Any]] = {}
    for stem, group in tensors.items():
        files |= write_file(aside / f"{stem}-{rank:05d}.safetensors", group)
    return pieces, files


def _write_manifest(
    engine: Engine, aside: Path, everyone: list[Any], step: int, state: Mapping[str, Any], config_yaml: str
) -> None:
    tensors: dict[str, dict[str, Any]] = {
        name: {"shape": list(shape), "partition": engine.words[name], "pieces": []}
        for name, shape in engine.parameter_shapes().items()
    }
    for _, pieces, _ in everyone:
        for name, entries in pieces.items():
            tensors[name]["pieces"].extend(entries)
    manifest = {
        "format": FORMAT,
        "version": VERSION,
        "step": step,
        "optimizer_steps": step - int(state.get("skipped_steps", 0)),
        "state": dict(state),
        "loss_scale": engine.optimizer_state.loss_scaler,
        "layout": engine.layout,
        "versions": versions(),
        "command": [Path(sys.argv[0]).name, *sys.argv[1:]],
        "tensors": tensors,
        "files": {name: entry for _, _, files in everyone for name, entry in files.items()},
    }
    write_text(aside / "config.yml", config_yaml)
    write_text(aside / "manifest.json", json.dumps(manifest, indent=1) + "\n")
    sync(aside)


def _check_shapes(model: Mapping[str, tuple[int, ...]], stored: Mapping[str, tuple[int, ...]], path: Path) -> None:
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


def _host_copy(view: Tensor) -> Tensor:
    # A copy also on the CPU: safetensors refuses tensors that share memory, and fragments are views of one buffer.
    return torch.empty(view.shape, dtype=torch.float32).copy_(view.detach())
