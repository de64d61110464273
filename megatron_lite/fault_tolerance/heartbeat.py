"""Heartbeats: when a process dies, the run ends with a message that names it.

A process that dies leaves its peers inside a collective. gloo notices a closed connection, NCCL waits for its timeout, and
neither names the rank. A thread of each process writes a beat into the store of the process group: rank, step and location of
the main thread. It watches the next rank in a ring. The thread also runs while the main thread hangs in a collective. The traffic
is one write and one read per process and interval.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from megatron_lite.fault_tolerance.rank_consistency import rank_words
from megatron_lite.parallel.collectives import barrier, broadcast
from megatron_lite.parallel.grid import Grid
from megatron_lite.parallel.launcher import end_stranded_launcher

GONE_STATUS = 75  # EX_TEMPFAIL of sysexits.h: the same command may well succeed


@dataclass(frozen=True)
class Beat:
    """The report of one process.

    Attributes:
        number: counter of its beats.
        state: "running"; "waiting" (a collective failed because a peer is missing); "done"; or "failed: ..." with the error.
        at: location of its main thread, "file:line function".
    """

    number: int
    step: int
    host: str
    pid: int
    state: str
    at: str


class RunningClock:
    """Counts the seconds in which this process ran.

    A pause of the process or its machine (SIGSTOP, suspend) counts as at most two ticks, so that it is not blamed on a peer.

    Args:
        tick: seconds between two updates.
        at_tick: called at each update, in the thread of the clock.
    """

    def __init__(self, tick: float, at_tick: Callable[[], None] = lambda: None) -> None:
        self.seconds = 0.0
        self._tick, self._at_tick = tick, at_tick
        self._over = threading.Event()
        threading.Thread(target=self._run, name="running-clock", daemon=True).start()

    def stop(self) -> None:
        """End the thread that counts."""
        self._over.set()

    def _run(self) -> None:
        last = time.monotonic()
        while not self._over.wait(self._tick):
            now = time.monotonic()
            self.seconds += min(now - last, 2 * self._tick)
            last = now
            self._at_tick()


class Heartbeat:
    """Sends heartbeats while the loop runs, and names the missing processes when a collective fails. A context manager.

    Args:
        seconds: a process without a beat for this many seconds counts as dead, and the run ends; 0: off.
        step: completed steps; the loop updates it (`heartbeat.step = ...`).
    """

    def __init__(self, grid: Grid, seconds: float, step: int = 0) -> None:
        self.step = step
        self._grid, self._seconds = grid, seconds
        self._interval = min(5.0, seconds / 6)
        self._active = bool(seconds) and grid.world_size > 1
        self._over = threading.Event()
        self._state = "running"
        self._number = 0
        self._main = threading.get_ident()
        self._host = socket.gethostname()

    def __enter__(self) -> Heartbeat:
        if self._active:
            # A separate connection, because that of the process group may be busy for minutes. A new prefix, because the
            # launcher's store may outlive this attempt.
            self._prefix = f"heartbeat/{broadcast(time.time_ns(), self._grid)}"
            self._store = dist.TCPStore(
                os.environ["MASTER_ADDR"],
                int(os.environ["MASTER_PORT"]),
                is_master=False,
                timeout=timedelta(seconds=max(5.0, self._seconds)),
            )
            self._beat()
            barrier(self._grid)  # now every rank has a beat
            self._peers = self._table()
            self._reached = 0.0
            self._clock = RunningClock(self._interval / 4, self._expect_store)
            self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)
            self._thread.start()
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        if not self._active:
            return
        if error is None:
            self._state = "done"
        elif _is_of_a_collective(error):
            self._state = "waiting"
            self._explain()
        else:
            self._state = f"failed: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        self._over.set()
        self._thread.join(timeout=self._seconds)
        self._clock.stop()
        with contextlib.suppress(dist.DistError):  # the process with the store may have ended
            self._beat()

    def _run(self) -> None:
        """Send beats and watch the next rank until the loop or the run ends."""
        watched = self._next(self._grid.rank)
        number, since = -1, 0.0
        while not self._over.wait(self._interval):
            now = self._clock.seconds
            try:
                self._beat()
                beat = self._table([watched])[watched]
                ended = self._store.check([f"{self._prefix}/ended"])
                self._reached = now
            except dist.DistError:
                continue  # `_expect_store` limits the retries
            if beat.state == "done":
                watched, number, since = self._next(watched), -1, now
            elif beat.number != number:
                number, since, self._peers[watched] = beat.number, now, beat
            elif beat.state.startswith("failed") and now - since > self._interval:
                self._end(f"{self._name(watched)} {_why(beat)}")
            elif now - since > self._seconds:
                self._end(
                    f"{self._name(watched)} has been silent for {now - since:.0f} s: killed, frozen or disconnected"
                )
            if ended:
                self._end("")

    def _expect_store(self) -> None:
        """End the process when the store has not answered for too long.

        A disconnected machine closes no connection, so a call of the store may wait without end. Rank 0, or torchrun on its
        machine, holds the store.
        """
        if self._clock.seconds - self._reached > self._seconds:
            _print(f"the store at {os.environ['MASTER_ADDR']} does not answer, nor does {self._name(0)}")
            end_stranded_launcher()
            self._end("")

    def _end(self, reason: str) -> None:
        """Print the reason, let the main thread end, then end the process. The store tells the other processes to end."""
        if reason:
            with contextlib.suppress(dist.DistError):
                self._store.set(f"{self._prefix}/ended", reason)
            self._say(reason)
        if not self._over.wait(2 * self._interval + 1):
            os._exit(GONE_STATUS)

    def _explain(self) -> None:
        """Find the processes that missed a failed collective, and print them once for the run."""
        beats = dict(self._peers)
        culprits: dict[int, str] = {}
        try:
            self._beat()
            first = self._table()
            end = time.monotonic() + 4 * self._interval + 1
            while not culprits and time.monotonic() < end:
                time.sleep(min(0.5, self._interval))
                beats = self._table()
                culprits = {
                    rank: _KILLED if not beat.state.startswith("failed") else _why(beat)
                    for rank, beat in beats.items()
                    if beat.state.startswith("failed") or self._has_ended(beat)
                }
            for rank, beat in beats.items() if not culprits else ():
                if beat.state == "running":
                    culprits[rank] = _KILLED if beat.number == first[rank].number else _why(beat)
        except dist.DistError:
            culprits = {0: f"holds the store at {os.environ['MASTER_ADDR']}, which does not answer"}
        text = "; ".join(f"{self._name(rank, beats[rank])} {why}" for rank, why in culprits.items())
        waiting = [rank for rank, beat in beats.items() if beat.state == "waiting"] or [self._grid.rank]
        self._say(f"{rank_words(waiting)} waited in vain: {text or 'every process is alive and waiting'}")

    def _say(self, reason: str) -> None:
        """Print the reason unless another process of the run already did."""
        with contextlib.suppress(dist.DistError):
            if self._store.add(f"{self._prefix}/spoken", 1) > 1:
                return
        _print(reason)

    def _has_ended(self, beat: Beat) -> bool:
        """Return whether a process of this machine has ended; False for other machines, where it is unknown."""
        if beat.host != self._host or beat.state != "running":
            return False
        try:
            with open(f"/proc/{beat.pid}/stat") as file:
                return file.read().rpartition(")")[2].split()[0] in "ZX"
        except OSError:
            return True

    def _beat(self) -> None:
        self._number += 1
        beat = Beat(self._number, self.step, self._host, os.getpid(), self._state, _where(self._main))
        self._store.set(f"{self._prefix}/{self._grid.rank}", json.dumps(asdict(beat)))

    def _table(self, ranks: list[int] | None = None) -> dict[int, Beat]:
        ranks = list(range(self._grid.world_size)) if ranks is None else ranks
        values = self._store.multi_get([f"{self._prefix}/{rank}" for rank in ranks])
        return {rank: Beat(**json.loads(value)) for rank, value in zip(ranks, values, strict=True)}

    def _next(self, rank: int) -> int:
        return (rank + 1) % self._grid.world_size

    def _name(self, rank: int, beat: Beat | None = None) -> str:
        beat = beat or self._peers[rank]
        return f"rank {rank} ({beat.host}, process {beat.pid}, after step {beat.step})"


_KILLED = "was killed, is frozen or is disconnected"
_ADVICE = (
    "The run ends; its last checkpoint is complete: run the same command again "
    "(torchrun --max-restarts and tools/slurm/train.sbatch do so automatically)"
)


def _print(reason: str) -> None:
    stream = sys.__stderr__ or sys.stderr
    stream.write(f"\nerror: {reason}. {_ADVICE}\n")
    stream.flush()


def _is_of_a_collective(error: BaseException) -> bool:
    text = str(error).lower()
    return isinstance(error, dist.DistError) or (
        isinstance(error, RuntimeError) and any(word in text for word in ("gloo", "nccl", "connection", "timed out"))
    )


def _where(thread: int) -> str:
    frame: Any = sys._current_frames().get(thread)
    if frame is None:
        return "no longer running"
    return f"{frame.f_code.co_filename}:{frame.f_lineno} {frame.f_code.co_name}"


def _why(beat: Beat) -> str:
    if beat.state.startswith("failed"):
        return f"ended with an error ({beat.state.removeprefix('failed: ')})"
    return f"is alive and did not join: {beat.at}"
