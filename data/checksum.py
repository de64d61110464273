"""Compute and compare file checksums, and locate the damage in a file that differs.

The record of a file is ``{"bytes", "sha256", "block", "codes"}``. ``codes`` holds one CRC-32 per ``block`` bytes, 8 hex digits
each, and only locates the damage. Files up to ``ALWAYS_CHECKED`` bytes are compared with their record at every start. Larger
files are compared by size, and in full by ``python -m tools.inspect_data --verify``.
"""

from __future__ import annotations

import errno
import functools
import hashlib
import json
import zlib
from array import array
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from .atomic_io import read_json, write_text

ALWAYS_CHECKED = 64 * 2**20
UNIT = 2**16
SEAL = "sha256_of_other_keys"

Record = dict[str, Any]


class DamagedDataError(ValueError):
    """Report a file whose content is not what was written. The message names the file, the position and the remedy."""


class Checksum:
    """Compute the record of a file from its bytes in order, in memory bounded by `max_blocks`."""

    def __init__(self, max_blocks: int = 1024) -> None:
        self.bytes = 0
        self._sha256 = hashlib.sha256()
        self._max_blocks = max_blocks
        self._units_per_block = 1
        self._codes = array("L")  # the XOR of the CRC-32 of the units of each block
        self._units = self._unit_bytes = self._unit_code = 0

    def update(self, data: bytes) -> None:
        """Add the next bytes."""
        self._sha256.update(data)
        self.bytes += len(data)
        view = memoryview(data)
        while view:
            piece = view[: UNIT - self._unit_bytes]
            self._unit_code = zlib.crc32(piece, self._unit_code)
            self._unit_bytes += len(piece)
            if self._unit_bytes == UNIT:
                self._end_unit()
            view = view[len(piece) :]

    def record(self) -> Record:
        """Return the record of all bytes added. Call it once, after the last update."""
        if self._unit_bytes:
            self._end_unit()
        return {
            "bytes": self.bytes,
            "sha256": self._sha256.hexdigest(),
            "block": self._units_per_block * UNIT,
            "codes": "".join(f"{code:08x}" for code in self._codes),
        }

    def _end_unit(self) -> None:
        if self._units % self._units_per_block == 0:
            if len(self._codes) == self._max_blocks:
                self._codes = array("L", (a ^ b for a, b in zip(self._codes[::2], self._codes[1::2], strict=True)))
                self._units_per_block *= 2
            self._codes.append(0)
        self._codes[-1] ^= self._unit_code
        self._units += 1
        self._unit_bytes = self._unit_code = 0


def record_of(path: Path) -> Record:
    """Return the record of the current content of a file."""
    checksum = Checksum()
    with open(path, "rb") as file:
        while piece := file.read(1 << 22):
            checksum.update(piece)
    return checksum.record()


def difference(path: Path, record: Mapping[str, Any], *, whole: bool = False) -> str | None:
    """Return how a file differs from its record, with file and position; None if it does not differ.

    whole: compare the content of files of any size, not only of those up to ``ALWAYS_CHECKED`` bytes.
    """
    if not path.is_file():
        return f"{path} does not exist"
    size, expected = path.stat().st_size, record["bytes"]
    if size != expected:
        length = (
            "empty" if size == 0 else f"{abs(expected - size):,} bytes too {'short' if size < expected else 'long'}"
        )
        return f"{path} is {length}: {size:,} bytes of {expected:,}"
    if not whole and size > ALWAYS_CHECKED:
        return None
    try:
        if _sha256(path) == record["sha256"]:
            return None
        position = _first_difference(path, record)
    except OSError as error:
        if error.errno != errno.EIO:
            raise
        return f"{path} cannot be read: {error.strerror} (a failing disk?)"
    return f"{path} is damaged {position}: its SHA-256 is not the one that was recorded when it was written"


def load_array(path: Path, remedy: str, mmap_mode: Literal["r"] | None = None) -> NDArray:
    """Return the array of an ``.npy`` file. Raises DamagedDataError that ends with ``remedy`` for other content."""
    try:
        return np.load(path, mmap_mode=mmap_mode)
    except OSError:
        raise
    except Exception as error:  # numpy raises many error types for a damaged header
        raise DamagedDataError(f"{path} is damaged ({error}). {remedy}") from error


def write_sealed(path: Path, content: Mapping[str, Any]) -> None:
    """Write a JSON object with the SHA-256 of its content, atomically."""
    write_text(path, json.dumps({**content, SEAL: _content_hash(content)}, indent=2) + "\n")


def read_sealed(path: Path, remedy: str, *keys: str) -> dict[str, Any]:
    """Return the object that `write_sealed` wrote, without the checksum.

    Raises OSError, and DamagedDataError that ends with ``remedy`` if the file was changed, lacks its checksum or lacks a key.
    """
    content, has_seal = read_json_with_seal(path, remedy)
    if not has_seal:
        raise DamagedDataError(f"{path} has no key {SEAL!r}: {remedy}")
    if missing := [key for key in keys if key not in content]:
        raise DamagedDataError(f"{path} has no key {missing[0]!r}: {remedy}")
    return content


def read_json_with_seal(path: Path, remedy: str) -> tuple[dict[str, Any], bool]:
    """Return a JSON object without its checksum, and whether it had one. Raises as `read_sealed`."""
    try:
        content = read_json(path, remedy)
    except ValueError as error:
        raise DamagedDataError(str(error)) from error
    seal = content.pop(SEAL, None)
    if seal is not None and seal != _content_hash(content):
        raise DamagedDataError(
            f"{path} was changed after it was written: its content does not match its {SEAL!r}: {remedy}"
        )
    return content, seal is not None


def _content_hash(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _sha256(path: Path) -> str:
    state = path.stat()
    return _sha256_of_state(path, state.st_ino, state.st_size, state.st_mtime_ns)


@functools.lru_cache(maxsize=4096)
def _sha256_of_state(path: Path, *state: int) -> str:
    """Return the SHA-256 of a file, cached because one process opens the same files several times."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _first_difference(path: Path, record: Mapping[str, Any]) -> str:
    """Return the byte range of the first block that differs. The file must have the recorded size."""
    block, codes = record["block"], record["codes"]
    with open(path, "rb") as file:
        for first in range(0, record["bytes"], block):
            code = 0
            end = min(first + block, record["bytes"])
            for _ in range(first, end, UNIT):
                code ^= zlib.crc32(file.read(UNIT))
            at = first // block * 8
            if f"{code:08x}" != codes[at : at + 8]:
                return f"between bytes {first:,} and {end:,}"
    return "at an unknown place"
