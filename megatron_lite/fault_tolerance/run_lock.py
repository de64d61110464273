"""One run at a time in a folder."""

from __future__ import annotations

import fcntl
import os
import socket
import warnings
from collections.abc import Mapping
from contextlib import ExitStack, closing, suppress
from pathlib import Path

FILE_NAME = ".running"


class RunInUse(RuntimeError):  # noqa: N818 - what is so, said as it is
    """Another run is alive in the folder; the message names its machine and process."""


class RunLock:
    """Holds a folder of a run from `acquire` to `close`, or to the end of the process: the system lets go of it then,
    however the process ends, so that a run that was killed hinders no other one. The main process alone takes it.

    Args:
        folder: where the run writes; `.running` in it names the holder while there is one, or the last one that was killed.
        key: of the configuration, that names the folder.
    """

    def __init__(self, folder: Path, key: str = "run.directory") -> None:
        self._path, self._key = folder / FILE_NAME, key
        self._descriptor: int | None = None

    def acquire(self) -> None:
        """Take the folder, without waiting. Where the file system has no locks there is a warning instead.

        Raises:
            RunInUse: another process has it.
            OSError: the folder cannot be written.
        """
        while self._descriptor is None:
            descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o666)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if self._is_at_its_place(descriptor):
                    self._descriptor, descriptor = descriptor, -1
            except BlockingIOError:
                holder = os.pread(descriptor, 1000, 0).decode(errors="replace").strip() or "a process that just began"
                other = "run.name or run.directory" if self._key == "run.directory" else self._key
                raise RunInUse(
                    f"{self._key} = {self._path.parent} is in use by a run that is alive ({holder}): wait for its end or stop "
                    f"it, or give this one another {other}"
                ) from None
            except OSError as error:
                warnings.warn(
                    f"{self._key} = {self._path.parent} cannot be locked ({error.strerror}): see to it that no other run is "
                    f"alive in it",
                    stacklevel=2,
                )
                return
            finally:
                if descriptor >= 0:
                    os.close(descriptor)
        os.truncate(self._descriptor, 0)
        os.pwrite(self._descriptor, f"{socket.gethostname()}, process {os.getpid()}\n".encode(), 0)

    def close(self) -> None:
        """Let go of the folder; nothing where it is not held."""
        if self._descriptor is not None:
            self._path.unlink(missing_ok=True)  # before others can have it
            os.close(self._descriptor)
            self._descriptor = None

    def _is_at_its_place(self, descriptor: int) -> bool:
        """Return whether the locked file is still the one of that name: a run that ended in between has removed it."""
        try:
            return os.path.samestat(os.fstat(descriptor), os.stat(self._path))
        except FileNotFoundError:
            return False


def hold_folders(folders: Mapping[str, Path], locks: ExitStack) -> list[Path]:
    """Make and lock folders until `locks` is closed; a folder that is made here and stays empty is then removed.

    Args:
        folders: configuration key -> folder. Two keys may name one folder.

    Returns:
        the locked folders, each once.

    Raises:
        RunInUse: another process has one of them.
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
