"""Lock a folder for one run at a time."""

from __future__ import annotations

import fcntl
import os
import socket
import warnings
from collections.abc import Mapping
from contextlib import ExitStack, closing, suppress
from pathlib import Path

FILE_NAME = ".running"


class RunInUse(RuntimeError):  # noqa: N818
    """Another run uses the folder; the message names its machine and process."""


class RunLock:
    """Lock of a run's folder from `acquire` to `close`. The main process holds it; the system releases it when that ends.

    Args:
        folder: `.running` in it names the holder, or the last holder that was killed.
        key: the configuration key of the folder.
    """

    def __init__(self, folder: Path, key: str = "run.directory") -> None:
        self._path, self._key = folder / FILE_NAME, key
        self._descriptor: int | None = None

    def acquire(self) -> None:
        """Lock the folder without waiting; warn if the file system has no locks.

        Raises:
            RunInUse: another process holds the lock.
            OSError: the folder cannot be written.
        """
        while self._descriptor is None:
            descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o666)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if self._is_current(descriptor):
                    self._descriptor, descriptor = descriptor, -1
            except BlockingIOError:
                holder = (
                    os.pread(descriptor, 1000, 0).decode(errors="replace").strip() or "a process that has just started"
                )
                other = "run.name or run.directory" if self._key == "run.directory" else self._key
                raise RunInUse(
                    f"{self._key} = {self._path.parent} is in use by a run that is alive ({holder}): wait for its end, stop it, "
                    f"or set another {other} for this run"
                ) from None
            except OSError as error:
                warnings.warn(
                    f"{self._key} = {self._path.parent} cannot be locked ({error.strerror}): make sure that no other run uses it",
                    stacklevel=2,
                )
                return
            finally:
                if descriptor >= 0:
                    os.close(descriptor)
        os.truncate(self._descriptor, 0)
        os.pwrite(self._descriptor, f"{socket.gethostname()}, process {os.getpid()}\n".encode(), 0)

    def close(self) -> None:
        """Release the lock if it is held."""
        if self._descriptor is not None:
            self._path.unlink(missing_ok=True)  # before another process can lock it
            os.close(self._descriptor)
            self._descriptor = None

    def _is_current(self, descriptor: int) -> bool:
        """Return whether the locked file still has its name: a run that ended in between has removed it."""
        try:
            return os.path.samestat(os.fstat(descriptor), os.stat(self._path))
        except FileNotFoundError:
            return False


def hold_folders(folders: Mapping[str, Path], locks: ExitStack) -> list[Path]:
    """Make and lock folders until `locks` is closed, which removes the new folders that are still empty.

    Args:
        folders: configuration key -> folder. Two keys may name one folder.

    Returns:
        the locked folders, each once.

    Raises:
        RunInUse: another process holds one of them.
        OSError: a folder cannot be made or written.
    """
    locked: list[Path] = []
    for key, folder in folders.items():
        if not folder.is_dir():
            folder.mkdir(parents=True, exist_ok=True)
            locks.callback(_remove_empty, folder)
        if not any(folder.samefile(other) for other in locked):
            locks.enter_context(closing(RunLock(folder, key))).acquire()
            locked.append(folder)
    return locked


def _remove_empty(folder: Path) -> None:
    with suppress(OSError):  # it is not empty
        folder.rmdir()
