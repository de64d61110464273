"""Files that are there whole or not at all."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """An OSError of the block says which file it was about, which that of a full disk does not."""
    try:
        yield
    except OSError as error:
        if error.filename is not None:
            raise
        raise OSError(error.errno or errno.EIO, error.strerror or str(error), str(path)) from error


def read_json(path: Path, mend: str, *keys: str) -> dict[str, Any]:
    """A JSON object that has these keys. Raises OSError, or ValueError naming the file, what is wrong, and `mend`: what to do."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is no JSON ({error}): {mend}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds no keys but a {type(content).__name__}: {mend}")
    if missing := [key for key in keys if key not in content]:
        raise ValueError(f"{path} has no key {missing[0]!r}: {mend}")
    return content


def write_whole(path: Path, text: str) -> None:
    """A text file that a reader finds as it was before or as it is now, and never in between. Makes its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with written_aside(path) as file:
        file.write(text.encode())


def write_json(path: Path, content: Any, default: Callable[[Any], Any] | None = None) -> None:
    """As `write_whole`, indented JSON, with null for NaN and infinities, for which JSON has no number.

    default: as of `json.dumps`, for values that are none of JSON's.
    """
    write_whole(path, json.dumps(of_json(content, default), indent=1, ensure_ascii=False) + "\n")


def of_json(content: Any, default: Callable[[Any], Any] | None = None) -> Any:
    """The content as JSON gives it back, with None for NaN and infinities; default: as of `json.dumps`."""
    return json.loads(json.dumps(content, default=default), parse_constant=lambda _: None)


@contextlib.contextmanager
def written_aside(path: Path) -> Iterator[IO[bytes]]:
    """A file to write that takes its place when the block ends well; after an exception nothing is left."""
    aside = path.with_name(f".{path.name}.{os.getpid()}.aside")
    try:
        with naming(path), open(aside, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, path)
    finally:
        aside.unlink(missing_ok=True)


@contextlib.contextmanager
def folder_aside(folder: Path, *, overwrite: bool = False) -> Iterator[Path]:
    """A new folder beside `folder` that takes its place when the block ends, and is removed when the block fails.

    A link to a folder stays: what it leads to is replaced, on the disk where that lies.

    Args:
        overwrite: replace a folder that holds something; else that is an OSError.

    Raises:
        OSError: before the block, for the root of a mounted disk, which nothing can be renamed to.
    """
    folder = folder.resolve()
    if folder.is_mount():
        raise OSError(
            errno.EBUSY,
            "a disk is mounted there, so that no folder can be put in its place; name one in it",
            str(folder),
        )
    aside, old = (folder.with_name(f".{folder.name}.{word}") for word in ("writing", "old"))
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    try:
        with naming(folder):
            yield aside
        if overwrite and folder.exists():
            shutil.rmtree(old, ignore_errors=True)
            os.replace(folder, old)
        os.replace(aside, folder)
    except BaseException:
        if old.exists() and not folder.exists():  # stopped between the two renames, now or by a kill before
            os.replace(old, folder)
        shutil.rmtree(aside, ignore_errors=True)
        raise
    shutil.rmtree(old, ignore_errors=True)
