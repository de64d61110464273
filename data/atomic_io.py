"""Write files and folders atomically: a reader finds the old content or the new content, never a part of it."""

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
    """Name the file in any OSError of the block that has no name, as of a full disk, or that names the temporary file."""
    try:
        yield
    except OSError as error:
        if error.filename is not None and str(error.filename) != str(temporary_path(path)):
            raise
        raise OSError(error.errno or errno.EIO, error.strerror or str(error), str(path)) from error


def read_json(path: Path, remedy: str, *keys: str) -> dict[str, Any]:
    """Return the JSON object in a file, which must have these keys.

    Raises OSError, and ValueError that names the file and the problem and ends with `remedy`.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is no JSON ({error}): {remedy}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds no keys but a {type(content).__name__}: {remedy}")
    if missing := [key for key in keys if key not in content]:
        raise ValueError(f"{path} has no key {missing[0]!r}: {remedy}")
    return content


def write_text(path: Path, text: str) -> None:
    """Write a text file atomically. Create its folder if it is missing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(path) as file:
        file.write(text.encode())


def write_json(path: Path, content: Any, default: Callable[[Any], Any] | None = None) -> None:
    """Write indented JSON atomically. NaN and infinities become null, because JSON has no number for them.

    default: converts values that JSON cannot hold, as in `json.dumps`.
    """
    write_text(path, json.dumps(of_json(content, default), indent=1, ensure_ascii=False) + "\n")


def of_json(content: Any, default: Callable[[Any], Any] | None = None) -> Any:
    """Return the content after a JSON round trip, with None for NaN and infinities. default: as in `json.dumps`."""
    return json.loads(json.dumps(content, default=default), parse_constant=lambda _: None)


def write_array(file: IO[bytes], array: NDArray) -> None:
    """Write the bytes that `numpy.save` would write. Unlike `numpy.save`, a full disk gives an OSError with its number."""
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, np.lib.format.header_data_from_array_1_0(array))
    file.write(header.getvalue())
    file.write(np.ascontiguousarray(array).data)


@contextlib.contextmanager
def atomic_write(path: Path) -> Iterator[IO[bytes]]:
    """Yield a temporary file that replaces `path` if the block succeeds. After an exception it is removed.

    When the block has ended, content and name are flushed to disk and survive a power cut.
    """
    temporary = temporary_path(path)
    try:
        with naming_file_in_errors(path):
            with open(temporary, "wb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            put_in_place(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def temporary_path(path: Path) -> Path:
    """Return the temporary path of a file or folder. The name holds the process id and the host."""
    return path.with_name(f".{path.name}.{os.getpid()}@{socket.gethostname()}.aside")


def put_in_place(temporary: Path, path: Path) -> None:
    """Rename a file or folder whose content is already on disk, and flush the new name to disk."""
    os.replace(temporary, path)
    sync(path.parent)


def sync(path: Path) -> None:
    """Flush the content of a file, or the names in a folder, to disk."""
    try:
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
    except OSError as error:
        # Some network file systems do not support fsync on a folder.
        if not (path.is_dir() and error.errno in (errno.EINVAL, errno.ENOTSUP, errno.EBADF, errno.EACCES)):
            raise


def sync_tree(folder: Path) -> None:
    """Flush a folder and everything in it to disk. Eight threads, since eight flushes take about as long as one."""
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(sync, [folder, *(path for path in folder.rglob("*") if not path.is_symlink())]))


def remove_leftovers(folder: Path) -> None:
    """Remove the temporary files and folders in ``folder`` that dead processes of this host left."""
    for path in folder.glob(".*.aside"):
        owner = re.search(r"\.(\d+)@([^@/]*)\.aside$", path.name)
        if owner is not None and is_dead(int(owner[1]), owner[2]):
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)


def is_dead(process: int, host: str) -> bool:
    """Return whether a process has ended. Return False for processes of other hosts, which are not visible."""
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
    """Yield a temporary folder that replaces `folder` if the block succeeds. It is removed if the block fails.

    A symbolic link stays, and its target is replaced. A folder is replaced by two renames: after a kill between them the old
    content is in `.NAME.old`, which the next call restores or replaces.

    Args:
        overwrite: replace a folder that is not empty. Without it, such a folder is an OSError.

    Raises:
        OSError: before the block, if `folder` is a mount point, which a rename cannot replace.
    """
    folder = folder.resolve()
    if folder.is_mount():
        raise OSError(
            errno.EBUSY,
            "a disk is mounted there, so the folder cannot be replaced; name a folder inside it",
            str(folder),
        )
    temporary, old = (folder.with_name(f".{folder.name}.{word}") for word in ("writing", "old"))
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        with naming_file_in_errors(folder):
            yield temporary
            sync_tree(temporary)
        if overwrite and folder.exists():
            shutil.rmtree(old, ignore_errors=True)
            os.replace(folder, old)
        put_in_place(temporary, folder)
    except BaseException:
        if old.exists() and not folder.exists():  # interrupted between the two renames, in this call or an earlier one
            os.replace(old, folder)
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    shutil.rmtree(old, ignore_errors=True)
