"""Verify checkpoints by reading every byte."""

from __future__ import annotations

from pathlib import Path

from megatron_lite.checkpoint.checksums import CheckpointError, check_files
from megatron_lite.checkpoint.reader import (
    CONFIG,
    MANIFEST,
    REMEDY,
    NotFiniteError,
    check_hash,
    named_by,
    read_config_yaml,
    read_manifest,
    step_folders,
    step_of,
    tensors_not_finite,
)


def verify(path: Path) -> int:
    """Read every byte of a step folder; return the number of files compared with their hashes.

    Raises:
        CheckpointError: as `read_manifest`, or a file with another content. Names it.
        NotFiniteError: a weight or moment is not finite. Names them.
    """
    files = read_manifest(path)["files"]
    read_config_yaml(path)
    for name, entry in files.items():
        check_hash(path, name, entry)
    if names := tensors_not_finite(path):
        raise NotFiniteError(f"{path} is not finite: {', '.join(names[:8])}")
    return len(files) + check_files(path, REMEDY, (MANIFEST, CONFIG))


def newest_verified(directory: Path) -> tuple[Path | None, list[str]]:
    """Return the newest step folder that verifies, and the problems of newer ones; None for a folder without checkpoints.

    Folders later than `latest` count only if `latest` is damaged or missing.

    Raises:
        CheckpointError: none of the checkpoints is complete.
    """
    problems = []
    try:
        end = step_of(named_by(directory / "latest"))
    except FileNotFoundError:
        end = None
    except CheckpointError as error:
        problems.append(str(error))
        end = None
    for step, path in reversed(step_folders(directory).items()):
        if end is not None and step > end:
            continue
        try:
            verify(path)
            return path, problems
        except CheckpointError as error:
            problems.append(str(error))
    if problems:
        raise CheckpointError(
            f"no checkpoint in {directory} is complete; checkpoint.resume=never starts over. " + " ".join(problems)
        )
    return None, []
