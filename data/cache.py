"""What is built once and taken from disk afterwards: folders, and arrays that are mapped (sample orders, blends)."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from .atomic_io import naming


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
            with naming(aside / f"{key}.npy"):
                np.save(aside / f"{key}.npy", array)
        (aside / "made_from.json").write_text(description)

    folder = built_folder(directory, name, description, write)
    return {path.stem: np.load(path, mmap_mode="r") for path in folder.glob("*.npy")}


def built_folder(directory: str | Path, name: str, description: str, write: Callable[[Path], None]) -> Path:
    """The folder under ``directory`` that ``write`` fills, or has filled before with the same ``description``.

    Its name carries the hash of the description, so that a cache of another setting is never taken. It is written aside
    and renamed: several processes may ask at once.
    """
    folder = Path(directory) / f"{name}-{hashlib.sha256(description.encode()).hexdigest()[:24]}"
    if not folder.is_dir():
        aside = folder.with_name(f".{folder.name}.{os.getpid()}.aside")
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)
        try:
            write(aside)
            aside.rename(folder)
        except OSError:
            # Another process may have been first; what it built is the same.
            if not folder.is_dir():
                raise
        finally:
            shutil.rmtree(aside, ignore_errors=True)
    return folder
