"""Writing a step folder: aside, flushed, renamed; the format is that of `megatron_lite.checkpoint.reader`."""

from __future__ import annotations

import errno
import json
import math
import os
import re
import shutil
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from megatron_lite.atomic_io import make_folder, sync, write_text
from megatron_lite.checkpoint.checksums import FILE_NAME, CheckpointError, checksums_text, file_sha256
from megatron_lite.checkpoint.reader import (
    CONFIG,
    FORMAT,
    MANIFEST,
    OPTIMIZER_KEYS,
    VERSION,
    Reader,
    TensorSlice,
    read_manifest,
    step_folders,
)
from megatron_lite.checkpoint.safetensors_stream import write_tensors


def write_weights(
    directory: Path,
    weights: Iterable[tuple[str, Tensor]],
    shapes: Mapping[str, tuple[int, ...]],
    *,
    specs: Mapping[str, str],
    config_yaml: str,
) -> Path:
    """Write `directory/step_00000000` from weights alone and let `latest` name it: a run starts or goes on from it.

    There is no optimizer state; reading it gives zeros, which is what a new optimizer has. Weights come one at a time.

    Args:
        weights: canonical name and full tensor, in the order of `shapes`.
        specs: sharding spec of every tensor.

    Raises:
        CheckpointError: could not be written. Nothing is left behind, and what was there before stays.
        ValueError: a tensor that `shapes` does not expect there.
    """
    final, aside = directory / "step_00000000", directory / ".step_00000000.writing"
    file = aside / "weights-00000.safetensors"
    flat = {f"weight/{name}": (math.prod(shape),) for name, shape in shapes.items()}
    try:
        shutil.rmtree(aside, ignore_errors=True)
        make_folder(aside)
        write_tensors(file, flat, ((f"weight/{name}", tensor.reshape(-1)) for name, tensor in weights))
        manifest = {
            "format": FORMAT,
            "version": VERSION,
            "step": 0,
            "finite": True,  # `write_tensors` refuses others
            "optimizer_steps": 0,
            "optimizer": "none",
            "state": {},
            "loss_scale": {},
            "layout": {"world_size": 1, "data": 1, "tensor": 1, "pipeline": 1, "context": 1, "dtype": "fp32"},
            "versions": versions(),
            "command": [Path(sys.argv[0]).name, *sys.argv[1:]],
            "tensors": {
                name: {
                    "shape": list(shape),
                    "partition": specs[name],
                    "pieces": [{"rank": 0, "start": 0, "numel": math.prod(shape)}],
                }
                for name, shape in shapes.items()
            },
            "files": {file.name: {"bytes": file.stat().st_size, "sha256": file_sha256(file)}},
        }
        publish(aside, final, manifest, config_yaml)
    except OSError as error:
        raise CheckpointError(f"could not write {final}: {error}") from error
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return final


def rewrite(
    source: Path,
    directory: Path,
    ranks: Sequence[Sequence[TensorSlice]],
    layout: Mapping[str, Any],
    *,
    progress: Callable[[], object] = lambda: None,
) -> Path:
    """Write a step folder again with its tensors shared out over other files; one file's tensors are held at a time.

    Args:
        ranks: what each process of the new layout owns.
        layout: recorded in the manifest.
        progress: called after each process's files.

    Raises:
        CheckpointError: the source cannot be read, the target exists, or it cannot be written: nothing is left behind.
    """
    manifest = read_manifest(source)
    reader = Reader(source, manifest)
    final, aside = directory / source.name, directory / f".{source.name}.writing"
    tensors = {name: {**entry, "pieces": []} for name, entry in manifest["tensors"].items()}
    for rank, parts in enumerate(ranks):
        for part in parts:
            tensors[part.name]["pieces"].append(part.entry(rank))
    files: dict[str, dict[str, Any]] = {}
    changed = {
        **manifest,
        "version": VERSION,
        "finite": True,
        "layout": dict(layout),
        "tensors": tensors,
        "files": files,
    }
    if final.exists():
        if (directory / "latest").exists() or read_manifest(final) | {"files": files} != changed:
            raise CheckpointError(f"{final} exists: name another output folder")
        write_text(directory / "latest", final.name + "\n")  # the same was killed between the name and this
        return final
    kinds = {"weights": ("weight",), "optimizer": () if manifest.get("optimizer") == "none" else OPTIMIZER_KEYS}
    try:
        shutil.rmtree(aside, ignore_errors=True)
        make_folder(aside)
        for rank, parts in enumerate(ranks):
            for stem, names in kinds.items():
                group = {
                    f"{kind}/{part.name}": reader.read(kind, part.name, part.shard, part.start, part.numel).clone()
                    for kind in names
                    for part in parts
                }
                if names:
                    files |= write_file(aside / f"{stem}-{rank:05d}.safetensors", group)
            progress()
        reader.require_finite()
        publish(aside, final, changed, (source / CONFIG).read_text(encoding="utf-8"))
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"could not write {final}: {error}") from error
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return final


def publish(aside: Path, final: Path, manifest: Mapping[str, Any], config_yaml: str) -> None:
    """Complete a folder of tensors, give it its name and let `latest` beside it name it. Raises OSError.

    A folder of that name, of the same step saved before, stays until the new one has its place.
    """
    write_text(aside / CONFIG, config_yaml)
    write_text(aside / MANIFEST, json.dumps(manifest, indent=1) + "\n")
    sums = {name: entry["sha256"] for name, entry in manifest.get("files", {}).items()}
    write_text(
        aside / FILE_NAME, checksums_text(sums | {name: file_sha256(aside / name) for name in (CONFIG, MANIFEST)})
    )
    former = final.with_name(f".{final.name}.former.writing")
    if final.exists():
        shutil.rmtree(former, ignore_errors=True)
        os.replace(final, former)
    os.replace(aside, final)
    sync(final.parent)
    write_text(final.parent / "latest", final.name + "\n")
    shutil.rmtree(former, ignore_errors=True)


def next_free_name(directory: Path) -> Path:
    """Return the first of `directory.1`, `directory.2`, ... that does not exist."""
    number = 1
    while directory.with_name(f"{directory.name}.{number}").exists():
        number += 1
    return directory.with_name(f"{directory.name}.{number}")


def rollback_to(folder: Path) -> Path | None:
    """Let `latest` name a step folder and archive the later ones. Call it on one process.

    Returns:
        the archive, a new folder; None if there were no later ones. A kill in between leaves some of them, which `latest`
        no longer counts.
    """
    directory = folder.parent
    later = [path for step, path in step_folders(directory).items() if step > _step(folder.name)]
    write_text(directory / "latest", folder.name + "\n")
    return _archive(directory, later)


def archive_all(directory: Path) -> Path | None:
    """Archive all checkpoints, for a run that starts over; return as `rollback_to`. The folder stays: a run has locked it."""
    return _archive(directory, [*step_folders(directory).values(), *directory.glob("latest")])


def _archive(directory: Path, paths: Sequence[Path]) -> Path | None:
    if not paths:
        return None
    archive = next_free_name(directory.resolve())  # on the disk that a link leads to
    archive.mkdir()
    for path in paths:
        path.rename(archive / path.name)
    sync(archive)
    sync(directory)
    return archive


def prune(directory: Path, *, keep_last: int, keep: set[int]) -> list[Path]:
    """Delete old checkpoints, never the one that `latest` names nor a later one. Call it on one process.

    There is a warning for one that cannot be deleted, which is tried again by the next call.

    Args:
        keep_last: how many of the newest stay, not counting `keep`; 0 keeps all.
        keep: steps that always stay (log-spaced and listed ones).

    Returns:
        the deleted folders.
    """
    steps = step_folders(directory)
    latest = directory / "latest"
    # A run that was killed between a folder's name and `latest` goes on from the one before, and one that goes back from any:
    # what is later than `latest` is not the newest, and is replaced when the run comes to it.
    end = _step(latest.read_text().strip()) if latest.is_file() else max(steps, default=0)
    counted = [step for step in sorted(steps) if step <= end and step not in keep]
    gone = []
    for folder in [steps[step] for step in counted[:-keep_last]]:  # [:-0] is none
        try:
            # Without it the rest is no checkpoint, should this be interrupted; the next call removes that rest.
            (folder / MANIFEST).unlink(missing_ok=True)
            shutil.rmtree(folder)
            gone.append(folder)
        except OSError as error:  # protected, or on a network disk and being read
            warnings.warn(f"the old checkpoint {folder} cannot be deleted, and stays: {error}", stacklevel=2)
    return gone


def _step(name: str) -> int:
    return int(name.removeprefix("step_"))


def write_file(path: Path, tensors: dict[str, Tensor]) -> dict[str, dict[str, Any]]:
    """Return the manifest's entry of the file. Raises OSError."""
    path.touch()  # for the rights that a new file has here: safetensors gives them to the owner alone
    rights = path.stat().st_mode
    try:
        save_file(tensors, path)
    except SafetensorError as error:  # a full disk's number stands in its words alone
        number = re.search(r"os error (\d+)", str(error))
        code = int(number[1]) if number else errno.EIO
        raise OSError(code, os.strerror(code) if number else str(error), str(path)) from error
    path.chmod(rights)
    sync(path)
    return {path.name: {"bytes": path.stat().st_size, "sha256": file_sha256(path)}}


def versions() -> dict[str, str]:
    """Versions of the interpreter and of the packages that decide the numbers."""
    import platform
    from importlib.metadata import PackageNotFoundError, version

    versions_by_name = {"python": platform.python_version()}
    for package in ("torch", "deepspeed", "flash-linear-attention", "triton", "transformers", "numpy"):
        try:
            versions_by_name[package] = version(package)
        except PackageNotFoundError:
            continue
    return versions_by_name
