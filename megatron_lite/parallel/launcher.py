"""End a rank with its launcher, and refuse ranks of another start."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # `end_with_launcher` is called before the slow imports
    import torch.distributed as dist

_PR_SET_PDEATHSIG = 1  # of linux/prctl.h


class RankRefused(RuntimeError):  # noqa: N818
    """This process belongs to a run that has ended, or its rank is taken; the message names the holder."""


def end_with_launcher() -> None:
    """Let the kernel kill this process when its launcher (torchrun, deepspeed) dies. Does nothing without a launcher or Linux.

    An orphan would keep its GPU, and could join the next run on the same port.
    """
    if not _has_launcher():
        return
    parent = os.getppid()
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # the launcher died before prctl
        os.kill(os.getpid(), signal.SIGKILL)


def end_stranded_launcher() -> None:
    """Kill torchrun if the store of its rendezvous is unreachable, because it would wait without end.

    The environment variable METALION_RENDEZVOUS (host:port) has its address. Does nothing without it.
    """
    host, _, port = os.environ.get("METALION_RENDEZVOUS", "").rpartition(":")
    if host and _has_launcher():
        try:
            socket.create_connection((host, int(port)), timeout=5.0).close()
        except OSError:
            os.kill(os.getppid(), signal.SIGKILL)


def _has_launcher() -> bool:
    return bool({"TORCHELASTIC_RUN_ID", "CROSS_SIZE"} & os.environ.keys())


def claim_rank(store: dist.Store, rank: int) -> None:
    """Claim a rank of this attempt in the store of the run. Raises RankRefused if another process holds it."""
    claim = f"{socket.gethostname()}, process {os.getpid()}"
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)
    holder = store.compare_set(f"attempt_{attempt}/rank_{rank}", "", claim).decode()
    if holder != claim:
        raise RankRefused(
            f"rank {rank} is taken by a process that is alive ({holder}): end it, or give this run another --master-port"
        )


def join_launcher(store: dist.Store, world_size: int, seconds: float) -> dist.Store:
    """Wait for all ranks of this launcher, at most `seconds`, and return a store that only they use.

    torchrun on one machine keeps its store over a restart, with the addresses of processes that died. Processes of an earlier
    torchrun may reach it on the same port. The launcher's start time and process id distinguish them.

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
                f"process {os.getpid()} belongs to a launcher that has ended; a later one uses its port, so this process ends"
            )
        if newest < started:
            store.set("newest_launcher", str(started))
        if attempt_store.add("joined", 0) >= world_size or time.monotonic() > end:
            return attempt_store
        time.sleep(0.05)


def _start_time(pid: int) -> int:
    """Return the start time of a process in clock ticks since boot; 0 if it is unknown."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    except OSError:
        return 0
