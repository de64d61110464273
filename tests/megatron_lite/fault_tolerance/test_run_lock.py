"""One run at a time in a folder."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import socket
import subprocess
import sys
from contextlib import ExitStack

import pytest

from megatron_lite.fault_tolerance.run_lock import FILE_NAME, RunInUse, RunLock, hold_folders
from tests.cli.conftest import ROOT


def test_second_holder_is_refused_with_the_first_ones_name(tmp_path):
    first, second = RunLock(tmp_path), RunLock(tmp_path)
    first.acquire()
    with pytest.raises(
        RunInUse, match=rf"{tmp_path} is in use .*{socket.gethostname()}, process {os.getpid()}\).*run\.name"
    ):
        second.acquire()
    second.close()  # which it does not hold
    assert (tmp_path / FILE_NAME).exists()
    first.close()
    assert not list(tmp_path.iterdir())
    second.acquire()
    second.close()


def test_the_key_of_the_folder_is_named(tmp_path):
    first, second = (RunLock(tmp_path, "checkpoint.directory") for _ in range(2))
    first.acquire()
    with pytest.raises(
        RunInUse, match=rf"^checkpoint\.directory = {tmp_path} .* set another checkpoint\.directory for this run$"
    ):
        second.acquire()
    first.close()


def test_two_keys_may_name_one_folder_and_new_empty_folders_are_removed(tmp_path):
    used, empty = tmp_path / "used", tmp_path / "empty"
    folders = {"run.directory": used, "checkpoint.directory": tmp_path / "." / "used", "data.cache_directory": empty}
    with ExitStack() as locks:
        assert hold_folders(folders, locks) == [used, empty]
        (used / "metrics.jsonl").touch()
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["metrics.jsonl", "used"]


def test_killed_holder_releases_the_lock(tmp_path):
    code = (
        "import sys, time; from pathlib import Path; from megatron_lite.fault_tolerance.run_lock import RunLock\n"
        "lock = RunLock(Path(sys.argv[1])); lock.acquire(); print('has it', flush=True); time.sleep(60)"
    )
    holder = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], cwd=ROOT, stdout=subprocess.PIPE)
    assert holder.stdout.readline() == b"has it\n"
    lock = RunLock(tmp_path)
    with pytest.raises(RunInUse, match=f"process {holder.pid}"):
        lock.acquire()
    holder.send_signal(signal.SIGKILL)
    holder.communicate()
    lock.acquire()
    assert (tmp_path / FILE_NAME).read_text().endswith(f"process {os.getpid()}\n")
    lock.close()


def test_removed_lock_file_is_not_locked(tmp_path, monkeypatch):
    first, second, third = (RunLock(tmp_path) for _ in range(3))
    first.acquire()
    flock = fcntl.flock

    def late(descriptor, operation):
        monkeypatch.undo()
        first.close()  # between the second's open and its lock
        flock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", late)
    second.acquire()
    with pytest.raises(RunInUse):
        third.acquire()
    second.close()


def test_without_locks_there_is_a_warning(tmp_path, monkeypatch):
    def none(*_):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", none)
    lock = RunLock(tmp_path)
    with pytest.warns(UserWarning, match=r"cannot be locked \(No locks available\)"):
        lock.acquire()
    lock.close()
