"""Atomic writes: files and folders that are complete on the disk, with their names."""

from __future__ import annotations

import errno
import os
from pathlib import Path


def temporary_path(path: Path) -> Path:
    """Return the temporary path of a file or folder, beside it. A complete one is renamed to `path`."""
    return path.with_name(f".{path.name}.writing")


def write_text(path: Path, text: str) -> None:
    """Write a text file under a temporary name, flush it to the disk and rename it."""
    temporary = temporary_path(path)
    with open(temporary, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    sync(path.parent)


def make_folder(path: Path) -> None:
    """Make a folder and those above it that are missing; flush their names to the disk. Raises OSError."""
    if not path.is_dir():
        make_folder(path.parent)
        path.mkdir(exist_ok=True)
        sync(path.parent)


def sync(path: Path) -> None:
    """Flush a file, or the names in a folder, to the disk."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        # Some network disks cannot flush a folder, and some parent folders cannot be opened.
        if not (path.is_dir() and error.errno in (errno.EINVAL, errno.ENOTSUP, errno.EBADF, errno.EACCES)):
            raise
