"""Start runs of two real processes, into which tests inject faults."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.cli.conftest import ROOT, arguments, corpus, environment, torchrun, train_lines, wait_for

__all__ = ["arguments", "corpus", "launch", "pid_of_rank", "wait_for_step"]

Launch = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def launch() -> Iterator[Launch]:
    """Return a function that starts torchrun with two processes. The end of the test kills them."""
    started: list[subprocess.Popen[str]] = []

    def start(words: list[str], *program: str, options: tuple[str, ...] = ()) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [*torchrun(2, *options), *(program or ("train.py",)), *words],
            cwd=ROOT,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=environment(),
        )
        started.append(process)
        return process

    yield start
    for process in started:
        if process.poll() is None:
            for pid in (*_children(process.pid), process.pid):
                os.kill(pid, signal.SIGKILL)
            process.communicate()


def pid_of_rank(agent: subprocess.Popen[str], rank: int) -> int:
    """Return the process id of a rank."""
    for pid in _children(agent.pid):
        if f"RANK={rank}".encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
            return pid
    pytest.fail(f"torchrun {agent.pid} has no rank {rank}")


def wait_for_step(agent: subprocess.Popen[str], run: Path, step: int) -> None:
    """Wait until the run has logged the step."""
    file = run / "metrics.jsonl"
    wait_for(lambda: file.exists() and file.read_bytes().endswith(b"\n") and len(train_lines(run)) >= step, agent)


def _children(pid: int) -> list[int]:
    return [
        int(child) for task in Path(f"/proc/{pid}/task").iterdir() for child in (task / "children").read_text().split()
    ]
