"""Start a command and find every process that it started, orphans included."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from pathlib import Path

from tests.cli.conftest import ROOT, environment, torchrun

_MARK = "METALION_FAULT_TEST"
_MONITOR = b"stack_monitor"


def training_command(words: list[str], *, ranks: int = 1, slow: bool = True) -> list[str]:
    """Return the command of a run, by torchrun if `ranks` > 1. `slow`: each forward pass takes 20 ms more."""
    program = ["-m", "tests.faults.inject", "crawl", "-1", "1"] if slow else ["train.py"]
    return [*(torchrun(ranks) if ranks > 1 else [sys.executable]), *program, *words]


def last_step(folder: Path) -> int:
    """Return the last logged step of a run, 0 before the first one. An incomplete last line is skipped."""
    try:
        lines = (folder / "metrics.jsonl").read_bytes().splitlines()[-3:]
    except OSError:
        return 0
    return max((json.loads(line)["step"] for line in lines if line.endswith(b"}")), default=0)


class StartedCommand:
    """Start a command whose processes carry a mark in their environment. The end of the context kills them all.

    Args:
        log: file for the output of all processes.
        variables: additional environment variables.

    Attributes:
        agent: the started process, which is the launcher if there is one.
    """

    def __init__(self, command: list[str], log: Path, **variables: str) -> None:
        self._mark = f"{_MARK}={uuid.uuid4().hex}"
        name, value = self._mark.split("=")
        self.log = log
        variables = {**environment(), **variables, name: value, "PYTHONUNBUFFERED": "1"}
        with open(log, "w") as file:
            self.agent = subprocess.Popen(command, cwd=ROOT, stdout=file, stderr=file, env=variables)

    def __enter__(self) -> StartedCommand:
        return self

    def __exit__(self, *_: object) -> None:
        self.signal(signal.SIGKILL, self.processes())
        self.agent.wait()

    @property
    def has_ended(self) -> bool:
        """Return whether the started process has ended."""
        return self.agent.poll() is not None

    def processes(self) -> list[int]:
        """Return the ids of the live processes of the command, in ascending order."""
        # `has_ended` also removes an ended agent, which would stay a zombie. The environment of an agent that has just started is
        # empty for a moment.
        agent = set() if self.has_ended else {self.agent.pid}
        pids = map(int, filter(str.isdigit, os.listdir("/proc")))
        return sorted(agent | {pid for pid in pids if self._is_ours(pid)})

    def victims(self) -> list[int]:
        """Return the live processes without which the run ends: all but the stack monitors."""
        commands = {pid: _read(pid, "cmdline") for pid in self.processes()}
        return [pid for pid, command in commands.items() if command and _MONITOR not in command]

    def ranks(self) -> list[int]:
        """Return the process ids of the ranks in rank order; the agent's id without a launcher."""
        by_rank = {}
        for pid in self.victims():
            variables = dict(word.partition(b"=")[::2] for word in _read(pid, "environ").split(b"\0"))
            if b"RANK" in variables and b"multiprocessing" not in _read(pid, "cmdline"):
                by_rank[int(variables[b"RANK"])] = pid
        return [by_rank[rank] for rank in sorted(by_rank)] or [self.agent.pid]

    def signal(self, number: signal.Signals, processes: list[int]) -> None:
        """Send a signal to these processes. Ended processes are ignored."""
        for pid in processes:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def wait_until(self, condition: Callable[[], object], seconds: float) -> bool:
        """Poll until the condition holds or the started process ends. Return whether the condition held.

        Raises TimeoutError with the end of the output after `seconds`.
        """
        end = time.monotonic() + seconds
        while not condition():
            if self.has_ended:
                return bool(condition())
            if time.monotonic() > end:
                raise TimeoutError(f"nothing happened in {seconds:g} s: {self.log.read_text()[-3000:]}")
            time.sleep(0.001)
        return True

    def wait_for_all(self, seconds: float) -> list[int]:
        """Wait for the end of every process. Return the ids of those that are alive after `seconds`."""
        end = time.monotonic() + seconds
        while (alive := self.processes()) and time.monotonic() < end:
            time.sleep(0.02)
        return alive

    def _is_ours(self, pid: int) -> bool:
        return self._mark.encode() in _read(pid, "environ").split(b"\0")


def _read(pid: int, name: str) -> bytes:
    """Return a file of a process in /proc; empty if the process has ended."""
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes()
    except OSError:
        return b""
