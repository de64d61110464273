"""Read and write the source of each document of a token file, such as the sets of the Pile.

``{prefix}.sources.npy`` holds int16 [documents]; the manifest holds the names under "sources".
"""

from __future__ import annotations

from array import array
from collections.abc import Collection, Sequence
from difflib import get_close_matches
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ..atomic_io import atomic_write, write_array
from ..checksum import DamagedDataError, Record, difference, load_array, record_of
from ..manifest import read_manifest

UNKNOWN = "other"
_REMEDY = "Copy it again, or write the token files again."
MAX_SOURCES = np.iinfo(np.int16).max + 1
_SHOWN = 30  # names in a message


class SourceTable:
    """Collect the source of each document in order. Names are numbered by first occurrence."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}
        self._ids = array("h")

    def add(self, source: str | None) -> None:
        """Add the source of the next document; None if its record names none. Raises ValueError for too many sources."""
        self._ids.append(self._number_of(source or UNKNOWN))

    def extend(self, names: list[str], ids: NDArray[np.int16]) -> None:
        """Add the sources of further documents. ids: int16 [documents], indices into ``names``."""
        numbers = np.array([self._number_of(name) for name in names], np.int16)
        self._ids.frombytes(numbers[ids].tobytes())

    def _number_of(self, name: str) -> int:
        number = self._numbers.setdefault(name, len(self._numbers))
        if number >= MAX_SOURCES:
            raise ValueError(
                f"more than {MAX_SOURCES:,} sources, such as {name!r}: set the source key (data.source_key, --source-key) to a "
                "key that many documents share, such as the name of their collection"
            )
        return number

    @property
    def all_names(self) -> list[str]:
        """Return the names in the order of their numbers."""
        return list(self._numbers)

    @property
    def names(self) -> list[str]:
        """Return `all_names`, or an empty list if no document names a source."""
        return [] if set(self._numbers) <= {UNKNOWN} else self.all_names

    @property
    def ids(self) -> NDArray[np.int16]:
        """Return the source number of each document: int16 [documents]."""
        return np.array(self._ids, np.int16)


def sources_path(prefix: str | Path) -> Path:
    """Return the path of the sources of a prefix."""
    return Path(f"{prefix}.sources.npy")


def allowed_sources(unknown: Sequence[str], known: Collection[str]) -> str:
    """Return "allowed are ..." with up to 30 known names; of more names their number and those most similar to unknown ones."""
    if len(known) <= _SHOWN:
        names = ", ".join(map(repr, sorted(known))) or "none: the records name no source (--source-key)"
        return f"allowed are {names}"
    nearest = dict.fromkeys(match for name in unknown[:3] for match in get_close_matches(name, known))
    hint = f"; the nearest are {', '.join(map(repr, nearest))}" if nearest else "; none of them is similar"
    return f"they have {len(known):,} sources{hint}"


def write_sources(prefix: str | Path, ids: NDArray[np.int16]) -> Record:
    """Write the source number of each sequence, int16 [sequences], atomically. Return the record of the file."""
    with atomic_write(sources_path(prefix)) as file:
        write_array(file, ids)
    return record_of(sources_path(prefix))


def read_sources(prefix: str | Path, num_sequences: int) -> tuple[list[str], NDArray[np.int16]]:
    """Return the source names, and the source number of each sequence as int16 [num_sequences].

    If no document names a source, the file is one source with its own name. Raises ValueError if the files are damaged or do
    not belong together.
    """
    manifest = read_manifest(prefix) or {}
    names = manifest.get("sources", [])
    if not names:
        return [Path(prefix).name.removesuffix("_document").removesuffix("_text")], np.zeros(num_sequences, np.int16)
    path = sources_path(prefix)
    if not path.is_file():
        raise ValueError(f"{path} does not exist, but the manifest names sources: copy this file with the token files")
    record = manifest.get("checksums", {}).get("sources.npy")
    if record is not None and (problem := difference(path, record)):
        raise DamagedDataError(f"{problem}. {_REMEDY}")
    ids = read_sources_file(path)
    if len(ids) != num_sequences or ids.min(initial=0) < 0 or ids.max(initial=0) >= len(names):
        raise ValueError(
            f"{path} numbers {len(ids):,} documents from {ids.min(initial=0)} to {ids.max(initial=0)}; the token file has"
            f" {num_sequences:,} and its manifest names {len(names)} sources. The files do not belong together. {_REMEDY}"
        )
    return names, ids


def read_sources_file(path: Path) -> NDArray[np.int16]:
    """Return the array that `write_sources` wrote: int16 [sequences]. Raises DamagedDataError for any other content."""
    ids = load_array(path, _REMEDY)
    if not isinstance(ids, np.ndarray) or ids.dtype != np.int16 or ids.ndim != 1:
        raise DamagedDataError(f"{path} does not hold one int16 per document. {_REMEDY}")
    return ids
