"""Guards of a run against signals, hangs, loss spikes and non-finite steps."""

from __future__ import annotations

import contextlib
import faulthandler
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any, TextIO

from megatron_lite.fault_tolerance import stack_monitor
from megatron_lite.plural import counted


class StopSignal:
    """Records SIGTERM, SIGUSR1 (SLURM's pre-timeout signal) and the first Ctrl-C, which stop the run after the step.

    A second Ctrl-C interrupts at once. A context manager; the previous handlers are restored at the end.

    Args:
        signals: the signals to handle.
        early: a previous handler; a signal that it received counts.
    """

    SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)

    def __init__(self, signals: Sequence[signal.Signals] = SIGNALS, *, early: StopSignal | None = None) -> None:
        self.received: str | None = None
        self._signals, self._early = signals, early
        self._previous: dict[signal.Signals, Any] = {}

    def __enter__(self) -> StopSignal:
        for number in self._signals:
            self._previous[number] = signal.signal(number, self._handle)
        if self._early is not None:
            self.received = self.received or self._early.received
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        if number == signal.SIGINT and self.received is not None:
            raise KeyboardInterrupt
        self.received = signal.Signals(number).name


class Watchdog:
    """Prints the stacks of all threads when no step ends for `minutes`, and repeats that every `minutes`.

    A Python thread prints them under a headline that names the process. A call may hold the interpreter lock, so that no Python
    thread runs. Then a second process prints the headline and sends SIGUSR2, and faulthandler prints the stacks.

    Args:
        who: the process, for the headline.
        delay: additional seconds, so that the processes of one machine print in turn.
        stuck_seconds: the second process acts when no Python thread ran for this many seconds; None: `minutes`. Use less than
            the heartbeat, after which other processes end the run.
    """

    def __init__(
        self, minutes: float, who: str = "this process", *, delay: float = 0.0, stuck_seconds: float | None = None
    ) -> None:
        self._seconds = minutes * 60
        self._stuck = min(self._seconds, stuck_seconds or math.inf)
        self._delay, self._who = delay, who
        self._over = threading.Event()
        self._due = math.inf
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)

    def __enter__(self) -> Watchdog:
        if self._seconds:
            print_stacks_on_signal()
            words = (str(os.getpid()), self._who, str(self._stuck + self._delay))
            command = [sys.executable, "-I", "-S", stack_monitor.__file__, *words]
            self._monitor = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, bufsize=0)
            assert self._monitor.stdin is not None
            os.set_blocking(self._monitor.stdin.fileno(), False)  # a stopped monitor reads nothing
            self.kick()
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._seconds:
            self._over.set()
            self._thread.join()
            self._monitor.kill()  # it does not see the end of its input while a forked process holds the pipe
            self._monitor.communicate()

    def kick(self, times: float = 1.0) -> None:
        """Restart the timer after a step. The next step may take `times` as long."""
        self._kicked = time.monotonic()
        self._due = self._kicked + times * self._seconds + self._delay

    def _run(self) -> None:
        assert self._monitor.stdin is not None
        while not self._over.wait(max(0.01, min(self._due - time.monotonic(), self._stuck / 4))):
            with contextlib.suppress(BrokenPipeError):  # somebody killed the monitor
                self._monitor.stdin.write(b".")
            if time.monotonic() >= self._due:
                self._print()
                self.kick()

    def _print(self) -> None:
        with tempfile.TemporaryFile("w+") as file:
            faulthandler.dump_traceback(file, all_threads=True)
            file.seek(0)
            stacks = file.read()
        stream = _stderr()
        stream.write(
            f"\nTimeout: {self._who}: no step ended for {time.monotonic() - self._kicked:.1f} s; its threads:\n{stacks}\n"
        )
        stream.flush()


def print_stacks_on_signal() -> None:
    """Print the stacks of all threads on SIGUSR2, even if a call holds the interpreter lock. The process continues."""
    faulthandler.register(signal.SIGUSR2, file=_stderr(), all_threads=True)


def _stderr() -> TextIO:
    return sys.__stderr__ or sys.stderr


class SpikeGuard:
    """Skips the update of a step whose loss is far above the running mean (as OLMo's skip-step optimizer).

    Args:
        factor: skip a loss above factor * running mean; 0 never skips.
        mean: running mean of the previous losses; None at the start.
        seen: number of previous losses.
        warmup: number of losses before the first skip.
    """

    DECAY = 0.98

    def __init__(self, factor: float, mean: float | None = None, seen: int = 0, *, warmup: int = 50) -> None:
        self._factor, self.mean, self.seen, self._warmup = factor, mean, seen, warmup

    def should_skip(self, loss: float) -> bool:
        """Return whether to skip this step. Any other loss updates the mean."""
        if not math.isfinite(loss):
            return True
        if self._factor and self.mean is not None and self.seen >= self._warmup and loss > self._factor * self.mean:
            return True
        self.mean = loss if self.mean is None else self.DECAY * self.mean + (1 - self.DECAY) * loss
        self.seen += 1
        return False


class TooManySkippedSteps(RuntimeError):  # noqa: N818
    """The run stopped because several consecutive steps were skipped; the message names the dump."""


class SkipCounter:
    """Stops the run after `limit` consecutive skipped steps, with a dump of the steps and their samples.

    Args:
        limit: 1 or more.
        directory: folder of the dump.
        writes: whether this process writes the dump; all processes count.
        in_a_row: consecutive skipped steps at the end of an earlier start of the run.
    """

    def __init__(self, limit: int, directory: Path, *, writes: bool = True, in_a_row: int = 0) -> None:
        self.in_a_row = in_a_row
        self._limit, self._directory, self._writes = limit, directory, writes
        self._history: deque[dict[str, Any]] = deque(maxlen=max(100, limit))

    def record(self, *, step: int, skipped: bool, samples: tuple[int, int], loss: float, gradient_norm: float) -> None:
        """Record one step. Raises TooManySkippedSteps at the `limit`-th consecutive skipped one.

        samples: first and one past the last sample of the step, in the order of the sampler.
        """
        self._history.append(
            {
                "step": step,
                "skipped": skipped,
                "first_sample": samples[0],
                "last_sample": samples[1] - 1,
                "loss": repr(loss),
                "gradient_norm": repr(gradient_norm),
            }
        )
        self.in_a_row = self.in_a_row + 1 if skipped else 0
        if self.in_a_row >= self._limit:
            path = self._directory / f"skipped_step_{step:08d}.json"
            if self._writes:
                path.write_text(json.dumps(list(self._history), indent=1) + "\n")
            first = self._history[-min(self.in_a_row, len(self._history))]  # since this start of the run
            steps = f"{counted(self.in_a_row, 'consecutive step')} {'was' if self.in_a_row == 1 else 'were'}"
            raise TooManySkippedSteps(
                f"{steps} skipped because loss or gradient was not finite (or a loss spike): "
                f"steps {first['step']} to {step}, samples {first['first_sample']} to {samples[1] - 1}. {path} holds the last "
                f"{counted(len(self._history), 'step')}. Lower optimizer.lr, raise schedule.warmup_steps, or roll back to an "
                f"earlier checkpoint (checkpoint.resume=STEP_FOLDER); run.max_skipped_steps sets the limit"
            )
