"""Start the processes of one machine as torchrun does, without its agent."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).parents[2]


def leave() -> None:
    """End a process of `launch` when all are done.

    The interpreter's shutdown is skipped, since a thread of the process group may still talk to an ended peer.
    """
    import torch.distributed as dist

    dist.barrier()
    sys.stderr.flush()
    os._exit(0)


def launch(module: str, processes: int, *arguments: str, timeout: float = 600.0, device: str = "cpu") -> str:
    """Run `python -m module *arguments` in several processes and return their standard error.

    Each process has its own interpreter, hence its own order of sets. `launch_forked` is faster.

    Raises:
        RuntimeError: a process failed; with the end of every process's output.
    """
    ranks = [{"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(processes)]
    return _outputs([module, *arguments], processes, ranks, timeout, device)


def launch_forked(module: str, processes: int, *arguments: str, timeout: float = 600.0) -> str:
    """Do the same as `launch` on the CPU, with processes that are forked after common imports.

    Return their standard output, too. Raises as `launch`.
    """
    return _outputs(["tests.parity.forked", module, *arguments], processes, [{}], timeout, "cpu")


def _outputs(words: list[str], processes: int, variables: list[dict[str, str]], timeout: float, device: str) -> str:
    """Run `python -m *words` once per set of variables and return the standard error."""
    common = {
        **os.environ,
        "WORLD_SIZE": str(processes),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "OMP_NUM_THREADS": "1",
        "MATRIX_DEVICE": device,
    }
    running = [
        subprocess.Popen(
            [sys.executable, "-m", *words],
            cwd=ROOT,
            env={**common, **of_process},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            process_group=0,
        )
        for of_process in variables
    ]
    try:
        errors = [process.communicate(timeout=timeout)[1] for process in running]
    finally:
        for process in running:
            with contextlib.suppress(ProcessLookupError):  # every process has ended
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    if any(process.returncode for process in running):
        ends = "\n".join(f"process {rank}: {text[-3000:]}" for rank, text in enumerate(errors))
        raise RuntimeError(ends)
    return "".join(errors)


def train_in_turn(runs: Iterable[list[str]], processes: int = 2) -> None:
    """Run `train.py` with the arguments of each run, consecutively in the same processes. Raises as `launch`."""
    launch_forked("tests.parity.trains", processes, json.dumps(list(runs)))


def free_port() -> int:
    """Return a free port that the system gives to no connection of another process: one below its ephemeral range.

    A launcher binds its port seconds after this call. In the ephemeral range, another test may have it by then.
    """
    ports = random.SystemRandom()
    while True:
        with socket.socket() as probe, contextlib.suppress(OSError):
            port = ports.randrange(15000, 32768)  # Linux's ephemeral range begins at 32768
            probe.bind(("127.0.0.1", port))
            return port
