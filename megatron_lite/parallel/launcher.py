"""A rank ends with its launcher, and never joins the ranks of another start."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # a process asks for `end_with_launcher` before it spends seconds on imports
    import torch.distributed as dist

_PR_SET_PDEATHSIG = 1  # of linux/prctl.h


class RankRefused(RuntimeError):  # noqa: N818 - what happened, said as it is
    """This process belongs to no run that is alive, or its place is taken; the message names who has it."""


def end_with_launcher() -> None:
    """Let the kernel kill this process when its launcher (torchrun, deepspeed) dies.

    An orphan would keep its GPU, and could join the next run on the same port. Nothing where there is no launcher, or no
    Linux.
    """
    if not _has_launcher():
        return
    parent = os.getppid()
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before the kernel was asked
        os.kill(os.getpid(), signal.SIGKILL)


def end_stranded_launcher(seconds: float = 5.0) -> None:
    """Kill torchrun where the store of its rendezvous cannot be reached: it would wait for it without end.

    Args:
        seconds: how long the address in the environment variable METALION_RENDEZVOUS (host:port) has to answer. Without the
            variable nothing happens.
    """
    host, _, port = os.environ.get("METALION_RENDEZVOUS", "").rpartition(":")
    if host and _has_launcher():
        try:
            socket.create_connection((host, int(port)), timeout=seconds).close()
        except OSError:
            os.kill(os.getppid(), signal.SIGKILL)


def _has_launcher() -> bool:
    return bool({"TORCHELASTIC_RUN_ID", "CROSS_SIZE"} & os.environ.keys())


def claim_rank(store: dist.Store, rank: int) -> None:
    """Claim a rank of this attempt in the store of the run. Raises RankRefused where another process has it."""
    claim = f"{socket.gethostname()}, process {os.getpid()}"
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)
    holder = store.compare_set(f"attempt_{attempt}/rank_{rank}", "", claim).decode()
    if holder != claim:
        raise RankRefused(
            f"rank {rank} is taken by a process that is alive ({holder}): end it, or give this run another --master-port"
        )


def join_launcher(store: dist.Store, world_size: int, seconds: float) -> dist.Store:
    """Wait for all ranks of this launcher and return a store that they alone use.

    torchrun on one machine keeps its store over a restart, with the addresses of processes that died, and processes of an
    earlier torchrun may reach it on the same port. The launcher's start time and process id tell them apart.

    Args:
        seconds: longest time to wait.

    Raises:
        RankRefused: a launcher that started later uses the store.
    """
    import torch.distributed as dist

    started, attempt = _start_time(os.getppid()), os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)
    attempt_store = dist.PrefixStore(f"launcher_{started}_{os.getppid()}/attempt_{attempt}", store)
    end = time.monotonic() + seconds
    attempt_store.add("joined", 1)
    while True:
        newest = int(store.get("newest_launcher")) if store.check(["newest_launcher"]) else -1
        if newest > started:
            raise RankRefused(
                f"process {os.getpid()} belongs to a launcher that has ended; the one at this port started later. It ends"
            )
        if newest < started:
            store.set("newest_launcher", str(started))
        if attempt_store.add("joined", 0) >= world_size or time.monotonic() > end:
            return attempt_store
        time.sleep(0.05)


def _start_time(pid: int) -> int:
    """Return when a process started, in clock ticks since boot; 0 where that is not known."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    except OSError:
        return 0
