"""SHA-256 of the files of a checkpoint or an export, in the format of the command `sha256sum`.

`sha256sum -c SHA256SUMS` checks a folder too. Folders of earlier versions have no such file and are not checked.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping
from pathlib import Path, PurePosixPath

FILE_NAME = "SHA256SUMS"
_LINE = re.compile(r"([0-9a-f]{64})  (\S.*)")


class CheckpointError(ValueError):
    """A checkpoint or an export that cannot be written or read."""


def file_sha256(path: Path) -> str:
    """Return the SHA-256 of a file in hexadecimal. Raises OSError."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def checksums_text(sums: Mapping[str, str]) -> str:
    """Return the content of a `SHA256SUMS` file for hashes by file name."""
    return "".join(f"{digest}  {name}\n" for name, digest in sorted(sums.items()))


def check_files(folder: Path, remedy: str, names: Iterable[str] | None = None) -> int:
    """Compare files with the hashes in their folder; return the number of compared files, 0 without `SHA256SUMS`.

    Args:
        remedy: what to do about a damaged file; the message ends with it.
        names: the files to compare; None for all that have a hash.

    Raises:
        CheckpointError: a file is missing, damaged, or has no hash. Names it.
    """
    file = folder / FILE_NAME
    if not file.is_file():
        return 0
    try:
        lines = [_LINE.fullmatch(line) for line in file.read_text(encoding="utf-8").splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{file} is damaged ({error}); {remedy}") from error
    sums = {match[2]: match[1] for match in lines if match}
    if not sums or len(sums) < len(lines):
        raise CheckpointError(f"{file} is damaged (a line is not a hash and a name); {remedy}")
    names = list(sums if names is None else names)
    for name in names:
        path = inside(folder, name, file)
        if name not in sums:
            raise CheckpointError(f"{file} is damaged (it has no hash of {name}); {remedy}")
        digest = file_sha256(path) if path.is_file() else None
        if digest != sums[name]:
            problem = (
                f"missing: {file} names it" if digest is None else f"damaged: its SHA-256 is not the one in {file}"
            )
            raise CheckpointError(f"{path} is {problem}; {remedy}")
    return len(names)


def inside(folder: Path, name: object, source: Path) -> Path:
    """Return the path of the file in `folder` that `source` names. Raises CheckpointError if the name leads outside."""
    parts = PurePosixPath(name).parts if isinstance(name, str) and "\0" not in name else ()
    if parts and parts[0] != "/" and ".." not in parts:
        return folder.joinpath(*parts)
    raise CheckpointError(f"{source} names {name!r}: only names of files inside {folder} are allowed")
