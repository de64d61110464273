"""Write step folders under a temporary name, flush and rename them; archive and delete old ones. Format: `reader.py`."""

from __future__ import annotations

import errno
import json
import math
import os
import re
import shutil
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from megatron_lite.atomic_io import make_folder, sync, temporary_path, write_text
from megatron_lite.checkpoint.checksums import FILE_NAME, CheckpointError, checksums_text, file_sha256
from megatron_lite.checkpoint.reader import (
    CONFIG,
    FORMAT,
    MANIFEST,
    VERSION,
    Reader,
    TensorSlice,
    optimizer_kinds,
    read_manifest,
    step_folder,
    step_folders,
    step_of,
)
from megatron_lite.checkpoint.safetensors_stream import write_tensors
from megatron_lite.parallel.sharding_plan import Shard


def write_weights(
    directory: Path,
    weights: Iterable[tuple[str, Tensor]],
    shapes: Mapping[str, tuple[int, ...]],
    *,
    specs: Mapping[str, str],
    config_yaml: str,
) -> Path:
    """Write `directory/step_00000000` from weights only and let `latest` name it, so that a run can start from it.

    The checkpoint has no optimizer state. A reader of moments gets zeros, the state of a new optimizer. Weights are written one
    at a time.

    Args:
        weights: canonical name and full tensor, in the order of `shapes`.
        specs: sharding spec of every tensor.

    Raises:
        CheckpointError: a file cannot be written. Nothing is left behind, and existing files stay.
        ValueError: a tensor that is not the next one of `shapes`.
    """
    final = step_folder(directory, 0)
    flat = {f"weight/{name}": (math.prod(shape),) for name, shape in shapes.items()}
    layout = {"world_size": 1, "data": 1, "tensor": 1, "pipeline": 1, "context": 1, "dtype": "fp32"}
    manifest = new_manifest(0, layout, shapes, specs) | {"optimizer": "none"}
    for name, shape in shapes.items():
        manifest["tensors"][name]["pieces"] = [TensorSlice(name, Shard(), 0, math.prod(shape)).entry(0)]
    with _temporary_folder(final) as temporary:
        file = temporary / "weights-00000.safetensors"
        write_tensors(file, flat, ((f"weight/{name}", tensor.reshape(-1)) for name, tensor in weights))
        manifest["files"] = file_entry(file)
        publish(temporary, final, manifest, config_yaml)
    return final


def new_manifest(
    step: int, layout: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], specs: Mapping[str, str]
) -> dict[str, Any]:
    """Return the manifest of a checkpoint with finite tensors, without trainer and optimizer state, pieces and files."""
    return {
        "format": FORMAT,
        "version": VERSION,
        "step": step,
        "finite": True,
        "optimizer_steps": 0,
        "state": {},
        "loss_scale": {},
        "layout": dict(layout),
        "versions": versions(),
        "command": [Path(sys.argv[0]).name, *sys.argv[1:]],
        "tensors": {
            name: {"shape": list(shape), "partition": specs[name], "pieces": []} for name, shape in shapes.items()
        },
        "files": {},
    }


@contextmanager
def _temporary_folder(final: Path) -> Iterator[Path]:
    """Make a temporary folder beside `final` and remove it at the end. A failed write raises CheckpointError."""
    temporary = temporary_path(final)
    try:
        shutil.rmtree(temporary, ignore_errors=True)
        make_folder(temporary)
        yield temporary
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"could not write {final}: {error}") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def rewrite(
    source: Path,
    directory: Path,
    ranks: Sequence[Sequence[TensorSlice]],
    layout: Mapping[str, Any],
    *,
    progress: Callable[[], object] = lambda: None,
) -> Path:
    """Reshard a step folder into `directory`. Memory holds the tensors of one file at a time.

    Args:
        ranks: the parts that each process of the new layout owns.
        layout: recorded in the manifest.
        progress: called after each process's files.

    Raises:
        CheckpointError: the source cannot be read, the target exists, or a file cannot be written. Nothing is left behind.
    """
    manifest = read_manifest(source)
    reader, final = Reader(source, manifest), directory / source.name
    tensors = {name: {**entry, "pieces": []} for name, entry in manifest["tensors"].items()}
    for rank, parts in enumerate(ranks):
        for part in parts:
            tensors[part.name]["pieces"].append(part.entry(rank))
    files: dict[str, dict[str, Any]] = {}
    resharded = {"version": VERSION, "finite": True, "layout": dict(layout), "tensors": tensors, "files": files}
    changed = {**manifest, **resharded}
    if final.exists():
        if (directory / "latest").exists() or read_manifest(final) | {"files": files} != changed:
            raise CheckpointError(f"{final} exists: name another output folder")
        write_text(directory / "latest", final.name + "\n")  # the same command was killed before this line
        return final
    kinds = {"weights": ("weight",), "optimizer": optimizer_kinds(manifest)}
    stored = {name: ("weight", *optimizer_kinds(manifest, name)) for name in tensors}
    with _temporary_folder(final) as temporary:
        for rank, parts in enumerate(ranks):
            for stem, names in kinds.items():
                group = {
                    f"{kind}/{part.name}": reader.read(kind, part.name, part.shard, part.start, part.numel).clone()
                    for kind in names
                    for part in parts
                    if kind in stored[part.name]
                }
                if names:
                    files |= write_file(temporary / f"{stem}-{rank:05d}.safetensors", group)
            progress()
        reader.require_finite()
        publish(temporary, final, changed, (source / CONFIG).read_text(encoding="utf-8"))
    return final


def publish(temporary: Path, final: Path, manifest: Mapping[str, Any], config_yaml: str) -> None:
    """Complete a folder of tensors, rename it to `final` and let `latest` name it. Raises OSError.

    An existing folder of that name stays until the new one replaces it.
    """
    write_text(temporary / CONFIG, config_yaml)
    write_text(temporary / MANIFEST, json.dumps(manifest, indent=1) + "\n")
    sums = {name: entry["sha256"] for name, entry in manifest.get("files", {}).items()}
    sums |= {name: file_sha256(temporary / name) for name in (CONFIG, MANIFEST)}
    write_text(temporary / FILE_NAME, checksums_text(sums))
    replaced = temporary_path(final.with_name(f"{final.name}.former"))
    if final.exists():
        shutil.rmtree(replaced, ignore_errors=True)
        os.replace(final, replaced)
    os.replace(temporary, final)
    sync(final.parent)
    write_text(final.parent / "latest", final.name + "\n")
    shutil.rmtree(replaced, ignore_errors=True)


def next_free_name(directory: Path) -> Path:
    """Return the first of `directory.1`, `directory.2`, ... that does not exist."""
    number = 1
    while directory.with_name(f"{directory.name}.{number}").exists():
        number += 1
    return directory.with_name(f"{directory.name}.{number}")


def rollback_to(folder: Path) -> Path | None:
    """Let `latest` name a step folder and archive the later ones. Call it on one process.

    Returns:
        the archive, a new folder; None if there were no later ones. If the process is killed in between, the folders that were
        not moved are later than `latest`, so a resume ignores them.
    """
    directory = folder.parent
    later = [path for step, path in step_folders(directory).items() if step > step_of(folder)]
    write_text(directory / "latest", folder.name + "\n")
    return _archive(directory, later)


def archive_all(directory: Path) -> Path | None:
    """Archive all checkpoints, for a run that starts over; return as `rollback_to`. The locked folder itself stays."""
    return _archive(directory, [*step_folders(directory).values(), *directory.glob("latest")])


def _archive(directory: Path, paths: Sequence[Path]) -> Path | None:
    if not paths:
        return None
    archive = next_free_name(directory.resolve())  # on the disk of a link's target
    archive.mkdir()
    for path in paths:
        path.rename(archive / path.name)
    sync(archive)
    sync(directory)
    return archive


def prune(directory: Path, *, keep_last: int, keep: set[int]) -> list[Path]:
    """Delete old checkpoints, but not the one that `latest` names or later ones. Call it on one process.

    A checkpoint that cannot be deleted causes a warning, and the next call tries again.

    Args:
        keep_last: number of newest checkpoints to keep, without `keep`; 0 keeps all.
        keep: steps that always stay (log-spaced and listed ones).

    Returns:
        the deleted folders.
    """
    steps = step_folders(directory)
    latest = directory / "latest"
    # Later folders than `latest` exist after a rollback, or a kill before `latest` was written. The run replaces them.
    end = step_of(Path(latest.read_text().strip())) if latest.is_file() else max(steps, default=0)
    counted = [step for step in sorted(steps) if step <= end and step not in keep]
    deleted = []
    for folder in [steps[step] for step in counted[:-keep_last]]:  # [:-0] is none
        try:
            # The manifest goes first: a folder without it is no checkpoint, and the next call removes it.
            (folder / MANIFEST).unlink(missing_ok=True)
            shutil.rmtree(folder)
            deleted.append(folder)
        except OSError as error:  # protected, or open on a network disk
            warnings.warn(f"the old checkpoint {folder} cannot be deleted, and stays: {error}", stacklevel=2)
    return deleted


def write_file(path: Path, tensors: dict[str, Tensor]) -> dict[str, dict[str, Any]]:
    """Write a safetensors file, flush it and return its `file_entry`. Raises OSError."""
    path.touch()  # for the default permissions: safetensors grants access to the owner only
    permissions = path.stat().st_mode
    try:
        save_file(tensors, path)
    except SafetensorError as error:  # only its text holds the error number of a full disk
        number = re.search(r"os error (\d+)", str(error))
        code = int(number[1]) if number else errno.EIO
        raise OSError(code, os.strerror(code) if number else str(error), str(path)) from error
    path.chmod(permissions)
    sync(path)
    return file_entry(path)


def file_entry(path: Path) -> dict[str, dict[str, Any]]:
    """Return the manifest's entry of a file."""
    return {path.name: {"bytes": path.stat().st_size, "sha256": file_sha256(path)}}


def versions() -> dict[str, str]:
    """Return the versions of the interpreter and of the packages that affect the results."""
    import platform
    from importlib.metadata import PackageNotFoundError, version

    versions_by_name = {"python": platform.python_version()}
    for package in ("torch", "deepspeed", "flash-linear-attention", "triton", "transformers", "numpy"):
        try:
            versions_by_name[package] = version(package)
        except PackageNotFoundError:
            continue
    return versions_by_name
