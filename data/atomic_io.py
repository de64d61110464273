"""Files that are there whole or not at all."""

from __future__ import annotations

import contextlib
import errno
import io
import json
import os
import re
import shutil
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray


@contextlib.contextmanager
def naming_file_in_errors(path: Path) -> Iterator[None]:
    """An OSError of the block says which file it was about, which that of a full disk does not."""
    try:
        yield
    except OSError as error:
        if error.filename is not None:
            raise
        raise OSError(error.errno or errno.EIO, error.strerror or str(error), str(path)) from error


def read_json(path: Path, remedy: str, *keys: str) -> dict[str, Any]:
    """A JSON object that has these keys. Raises OSError, or ValueError naming_file_in_errors the file, what is wrong, and `remedy`: what to do."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is no JSON ({error}): {remedy}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds no keys but a {type(content).__name__}: {remedy}")
    if missing := [key for key in keys if key not in content]:
        raise ValueError(f"{path} has no key {missing[0]!r}: {remedy}")
    return content


def write_whole(path: Path, text: str) -> None:
    """A text file that a reader finds as it was before or as it is now, and never in between. Makes its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(path) as file:
        file.write(text.encode())


def write_json(path: Path, content: Any, default: Callable[[Any], Any] | None = None) -> None:
    """As `write_whole`, indented JSON, with null for NaN and infinities, for which JSON has no number.

    default: as of `json.dumps`, for values that are none of JSON's.
    """
    write_whole(path, json.dumps(of_json(content, default), indent=1, ensure_ascii=False) + "\n")


def of_json(content: Any, default: Callable[[Any], Any] | None = None) -> Any:
    """The content as JSON gives it back, with None for NaN and infinities; default: as of `json.dumps`."""
    return json.loads(json.dumps(content, default=default), parse_constant=lambda _: None)


def write_array(file: IO[bytes], array: NDArray) -> None:
    """Write the bytes of `numpy.save`, which has no error number for a full disk."""
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, np.lib.format.header_data_from_array_1_0(array))
    file.write(header.getvalue())
    file.write(np.ascontiguousarray(array).data)


@contextlib.contextmanager
def atomic_write(path: Path) -> Iterator[IO[bytes]]:
    """A temporary file that takes its place when the block ends well; after an exception nothing is left.

    Content and name are on the disk when the block has ended, also after a power cut.
    """
    aside = temporary_path(path)
    try:
        with naming_file_in_errors(path), open(aside, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        put_in_place(aside, path)
    finally:
        aside.unlink(missing_ok=True)


def temporary_path(path: Path) -> Path:
    """Where this process writes a file or folder before it takes its place. Its name tells which process on which host."""
    return path.with_name(f".{path.name}.{os.getpid()}@{socket.gethostname()}.aside")


def put_in_place(temporary: Path, path: Path) -> None:
    """Rename a file or folder that is on the disk already, and wait until the name is on the disk too."""
    os.replace(temporary, path)
    sync(path.parent)


def sync(path: Path) -> None:
    """Wait until a file's content, or the names in a folder, are on the disk."""
    try:
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
    except OSError as error:
        # Some network disks know no sync of a folder.
        if not (path.is_dir() and error.errno in (errno.EINVAL, errno.ENOTSUP, errno.EBADF, errno.EACCES)):
            raise


def sync_tree(folder: Path) -> None:
    """`sync` for a folder and everything in it, several at a time: a disk takes about as long for one as for eight."""
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(sync, [folder, *(path for path in folder.rglob("*") if not path.is_symlink())]))


def remove_leftovers(folder: Path) -> None:
    """Remove the temporary files and folders in ``folder`` whose process on this host is dead, after a kill for example."""
    for path in folder.glob(".*.aside"):
        owner = re.search(r"\.(\d+)@([^@/]*)\.aside$", path.name)
        if owner is not None and is_dead(int(owner[1]), owner[2]):
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)


def is_dead(process: int, host: str) -> bool:
    """Whether a process has ended. False for processes of other hosts, which cannot be seen from here."""
    if host != socket.gethostname():
        return False
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return True
    except (PermissionError, OverflowError):
        pass
    return False


@contextlib.contextmanager
def atomic_folder(folder: Path, *, overwrite: bool = False) -> Iterator[Path]:
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
        with naming_file_in_errors(folder):
            yield aside
            sync_tree(aside)
        if overwrite and folder.exists():
            shutil.rmtree(old, ignore_errors=True)
            os.replace(folder, old)
        put_in_place(aside, folder)
    except BaseException:
        if old.exists() and not folder.exists():  # stopped between the two renames, now or by a kill before
            os.replace(old, folder)
        shutil.rmtree(aside, ignore_errors=True)
        raise
    shutil.rmtree(old, ignore_errors=True)
