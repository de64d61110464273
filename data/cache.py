"""Cache folders and memory-mapped arrays (sample orders, blends) under the hash of everything they depend on."""

from __future__ import annotations

import contextlib
import hashlib
import json
import shutil
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from numpy.typing import NDArray

from .atomic_io import (
    naming_file_in_errors,
    put_in_place,
    remove_leftovers,
    sync_tree,
    temporary_path,
    write_array,
    write_text,
)
from .checksum import DamagedDataError, difference, load_array, read_sealed, record_of, write_sealed

# Part of the hash: caches of other versions are not used.
CACHE_VERSION = 2
CONTENTS = "contents.json"
_ATTEMPTS = 3


def cached_arrays(
    directory: str | Path | None,
    name: str,
    made_from: Mapping[str, object],
    build: Callable[[], Mapping[str, NDArray]],
) -> dict[str, NDArray]:
    """Return the arrays of ``build``, memory-mapped from a `built_folder` with the description ``made_from``.

    directory: folder of the caches; None builds the arrays in memory each time.
    """
    if directory is None:
        return dict(build())
    description = json.dumps(made_from, indent=1)

    def write(temporary: Path) -> None:
        for key, array in build().items():
            with naming_file_in_errors(temporary / f"{key}.npy"), open(temporary / f"{key}.npy", "wb") as file:
                write_array(file, array)
        write_text(temporary / "made_from.json", description)

    for _ in range(_ATTEMPTS - 1):
        # Another process may rebuild a damaged folder between the check and the opening.
        with contextlib.suppress(FileNotFoundError):
            return _arrays(built_folder(directory, name, description, write))
    return _arrays(built_folder(directory, name, description, write))


def built_folder(directory: str | Path, name: str, description: str, write: Callable[[Path], None]) -> Path:
    """Return the folder that ``write`` fills for this ``description``. Reuse it if it exists and is intact.

    The folder name holds the hash of the description, so each setting has its own cache. The folder is written under a
    temporary name and renamed, so several processes may call this at once. A damaged folder is rebuilt, with a line on
    stderr.
    """
    version = f"{CACHE_VERSION} {description}"
    folder = Path(directory) / f"{name}-{hashlib.sha256(version.encode()).hexdigest()[:24]}"
    remove_leftovers(folder.parent)
    if folder.is_dir():
        state = folder.stat()
        problems = damage(folder)
        if not problems:
            return folder
        print(f"the cache {folder} is rebuilt: {problems[0]}", file=sys.stderr)
        temporary = temporary_path(folder.with_name(f"{folder.name}.damaged"))
        try:
            if folder.stat().st_ino == state.st_ino:  # otherwise another process has rebuilt it
                folder.rename(temporary)
        except FileNotFoundError:
            pass
        shutil.rmtree(temporary, ignore_errors=True)
    temporary = temporary_path(folder)
    shutil.rmtree(temporary, ignore_errors=True)
    if not folder.is_dir():
        temporary.mkdir(parents=True)
        try:
            write(temporary)
            files = sorted(path for path in temporary.rglob("*") if path.is_file())
            records = {path.relative_to(temporary).as_posix(): record_of(path) for path in files}
            write_sealed(temporary / CONTENTS, {"files": records})
            sync_tree(temporary)
            put_in_place(temporary, folder)
        except OSError:
            # Another process may have renamed its identical folder first.
            if not folder.is_dir():
                raise
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    return folder


def damage(folder: Path, *, whole: bool = False) -> list[str]:
    """Return the problems of a `built_folder`, one sentence each; an empty list if it is intact.

    whole: read files of any size, not only the small ones.
    """
    try:
        records = read_sealed(folder / CONTENTS, "remove the folder; it is rebuilt at the next start", "files")["files"]
    except FileNotFoundError:
        return [f"{folder / CONTENTS} does not exist"]
    except DamagedDataError as error:
        return [str(error)]
    differences = (difference(folder / name, record, whole=whole) for name, record in records.items())
    return [problem for problem in differences if problem is not None]


def damaged_order(array: NDArray, error: Exception) -> DamagedDataError:
    """Return the error for a sample order that points outside of the data. It names the file of the array."""
    path = Path(getattr(array, "filename", None) or "the order of the samples")
    return DamagedDataError(
        f"{path} is damaged: it names a sample that the token files do not hold ({error}). Remove {path.parent}; it is"
        " rebuilt at the next start. python -m tools.inspect_data --verify reads every file."
    )


def _arrays(folder: Path) -> dict[str, NDArray]:
    names = read_sealed(folder / CONTENTS, f"remove {folder}; it is rebuilt at the next start", "files")["files"]
    remedy = f"Remove {folder}; it is rebuilt at the next start."
    return {Path(name).stem: load_array(folder / name, remedy, "r") for name in names if name.endswith(".npy")}
