"""What is built once and taken from disk afterwards: folders, and arrays that are mapped (sample orders, blends)."""

from __future__ import annotations

import contextlib
import hashlib
import json
import shutil
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from .atomic_io import (
    naming_file_in_errors,
    put_in_place,
    remove_leftovers,
    sync_tree,
    temporary_path,
    write_array,
    write_whole,
)
from .checksum import DamagedDataError, difference, read_sealed, record_of, write_sealed

# Caches without checksums, of earlier versions, have other names and are not taken.
CACHE_VERSION = 2
CONTENTS = "contents.json"
_ATTEMPTS = 3


def cached_arrays(
    directory: str | Path | None,
    name: str,
    made_from: Mapping[str, object],
    build: Callable[[], Mapping[str, NDArray]],
) -> dict[str, NDArray]:
    """What ``build`` returns, kept in a `built_folder` of ``made_from`` and mapped from there, or built each time without
    a directory."""
    if directory is None:
        return dict(build())
    description = json.dumps(made_from, indent=1)

    def write(aside: Path) -> None:
        for key, array in build().items():
            with naming_file_in_errors(aside / f"{key}.npy"), open(aside / f"{key}.npy", "wb") as file:
                write_array(file, array)
        write_whole(aside / "made_from.json", description)

    for _ in range(_ATTEMPTS - 1):
        # Another process may build a damaged folder anew between the check and the opening.
        with contextlib.suppress(FileNotFoundError):
            return _arrays(built_folder(directory, name, description, write))
    return _arrays(built_folder(directory, name, description, write))


def built_folder(directory: str | Path, name: str, description: str, write: Callable[[Path], None]) -> Path:
    """The folder under ``directory`` that ``write`` fills, or has filled before with the same ``description``.

    Its name carries the hash of the description, so that a cache of another setting is never taken. It is written aside
    and renamed: several processes may ask at once. A folder that is not what was written, after a power cut for example,
    is built again, with a line on stderr.
    """
    version = f"{CACHE_VERSION} {description}"
    folder = Path(directory) / f"{name}-{hashlib.sha256(version.encode()).hexdigest()[:24]}"
    remove_leftovers(folder.parent)
    if folder.is_dir():
        state = folder.stat()
        problems = damage(folder)
        if not problems:
            return folder
        print(f"the cache {folder} is built again: {problems[0]}", file=sys.stderr)
        aside = temporary_path(folder.with_name(f"{folder.name}.damaged"))
        try:
            if folder.stat().st_ino == state.st_ino:  # else another process has built it anew meanwhile
                folder.rename(aside)
        except FileNotFoundError:
            pass
        shutil.rmtree(aside, ignore_errors=True)
    aside = temporary_path(folder)
    shutil.rmtree(aside, ignore_errors=True)
    if not folder.is_dir():
        aside.mkdir(parents=True)
        try:
            write(aside)
            files = sorted(path for path in aside.rglob("*") if path.is_file())
            records = {path.relative_to(aside).as_posix(): record_of(path) for path in files}
            write_sealed(aside / CONTENTS, {"files": records})
            sync_tree(aside)
            put_in_place(aside, folder)
        except OSError:
            # Another process may have been first; what it built is the same.
            if not folder.is_dir():
                raise
        finally:
            shutil.rmtree(aside, ignore_errors=True)
    return folder


def damage(folder: Path, *, whole: bool = False) -> list[str]:
    """What is wrong with the files of a `built_folder`, a sentence each; empty where nothing is.

    whole: read files of any size, not only the small ones.
    """
    try:
        records = read_sealed(folder / CONTENTS, "remove the folder, it is built again", "files")["files"]
    except FileNotFoundError:
        return [f"{folder / CONTENTS} does not exist"]
    except DamagedDataError as error:
        return [str(error)]
    found = (difference(folder / name, record, whole=whole) for name, record in records.items())
    return [problem for problem in found if problem is not None]


def damaged_order(array: NDArray, error: Exception) -> DamagedDataError:
    """The error for an order of samples that leads outside of the data. It names the file behind the array."""
    path = Path(getattr(array, "filename", None) or "the order of the samples")
    return DamagedDataError(
        f"{path} is damaged: it names a sample that the token files do not hold ({error}). Remove {path.parent}, it is"
        " built again; python -m tools.inspect_data --verify reads every file."
    )


def _arrays(folder: Path) -> dict[str, NDArray]:
    names = read_sealed(folder / CONTENTS, f"remove {folder}, it is built again", "files")["files"]
    return {Path(name).stem: _mapped(folder / name) for name in names if name.endswith(".npy")}


def _mapped(path: Path) -> NDArray:
    try:
        return np.load(path, mmap_mode="r")
    except OSError:
        raise
    except Exception as error:  # numpy raises errors of many kinds for a damaged header
        raise DamagedDataError(f"{path} is damaged ({error}). Remove {path.parent}, it is built again.") from error
