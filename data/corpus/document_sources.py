"""Which source each document of a token file comes from, such as the Pile's sets: ``{prefix}.sources.npy``, int16
[documents], beside the token files, and the names in the manifest under "sources"."""

from __future__ import annotations

from array import array
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ..atomic_io import atomic_write, write_array
from ..checksum import DamagedDataError, Record, difference, record_of
from ..manifest import read_manifest

UNKNOWN = "other"
MOST = np.iinfo(np.int16).max + 1


class SourceTable:
    """Collects the source of each document, in order. Names are numbered as they come."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}
        self._ids = array("h")

    def add(self, source: str | None) -> None:
        """The source of the next document; None where its record names none. ValueError for too many sources."""
        self._ids.append(self._number_of(source or UNKNOWN))

    def extend(self, names: list[str], ids: NDArray[np.int16]) -> None:
        """The sources of further documents, numbered by ``names``."""
        numbers = np.array([self._number_of(name) for name in names], np.int16)
        self._ids.frombytes(numbers[ids].tobytes())

    def _number_of(self, name: str) -> int:
        number = self._numbers.setdefault(name, len(self._numbers))
        if number >= MOST:
            raise ValueError(
                f"more than {MOST:,} sources, such as {name!r}: the key that names a document's source "
                "(data.source_key, --source-key) is to name a collection that many documents share"
            )
        return number

    @property
    def all_names(self) -> list[str]:
        """Name of each number."""
        return list(self._numbers)

    @property
    def names(self) -> list[str]:
        """The same; empty where no document named a source."""
        return [] if set(self._numbers) <= {UNKNOWN} else self.all_names

    @property
    def ids(self) -> NDArray[np.int16]:
        """[documents]"""
        return np.array(self._ids, np.int16)


def sources_path(prefix: str | Path) -> Path:
    """The sources of a prefix's sequences."""
    return Path(f"{prefix}.sources.npy")


def write_sources(prefix: str | Path, ids: NDArray[np.int16]) -> Record:
    """Write the number of each sequence's source, int16 [sequences], whole or not at all. Returns the file's record."""
    with atomic_write(sources_path(prefix)) as file:
        write_array(file, ids)
    return record_of(sources_path(prefix))


def read_sources(prefix: str | Path, num_sequences: int) -> tuple[list[str], NDArray[np.int16]]:
    """(names, number of each sequence's source int16 [num_sequences]) of a token file; one source, named after the
    file, where its documents name none. Raises ValueError where the files do not belong together or are damaged."""
    manifest = read_manifest(prefix) or {}
    names = manifest.get("sources", [])
    if not names:
        return [Path(prefix).name.removesuffix("_document").removesuffix("_text")], np.zeros(num_sequences, np.int16)
    path = sources_path(prefix)
    if not path.is_file():
        raise ValueError(
            f"{path} does not exist, and the manifest beside it names sources: copy it with the token files"
        )
    record = manifest.get("checksums", {}).get("sources.npy")
    if record is not None and (problem := difference(path, record)):
        raise DamagedDataError(f"{problem}. Copy it again, or write the token files again.")
    ids = read_sources_file(path)
    if len(ids) != num_sequences or ids.min(initial=0) < 0 or ids.max(initial=0) >= len(names):
        raise ValueError(
            f"{path} numbers {len(ids):,} documents from {ids.min(initial=0)} to {ids.max(initial=0)}; the token file has"
            f" {num_sequences:,} and its manifest names {len(names)} sources. The files do not belong together."
        )
    return names, ids


def read_sources_file(path: Path) -> NDArray[np.int16]:
    """The array of a file that `write_sources` wrote. Raises DamagedDataError for anything else."""
    try:
        ids = np.load(path)
    except OSError:
        raise
    except Exception as error:  # numpy raises errors of many kinds for a damaged header
        raise DamagedDataError(
            f"{path} is damaged ({error}). Copy it again, or write the token files again."
        ) from error
    if not isinstance(ids, np.ndarray) or ids.dtype != np.int16 or ids.ndim != 1:
        raise DamagedDataError(f"{path} does not hold one int16 for each document. Copy it again, or write it again.")
    return ids
