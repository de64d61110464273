"""Process that lets its parent print its stacks when no Python thread of the parent runs.

`Watchdog` starts it as `python stack_monitor.py PARENT WHO SECONDS` and writes bytes to its standard input from a thread. The
monitor counts its own ticks, not time: a pause of both processes (SIGSTOP, suspend) is at most one tick. A tick in which only the
parent is stopped does not count. faulthandler may read stacks only while no thread runs: otherwise the process can end with a
segmentation fault.
"""

from __future__ import annotations

import os
import select
import signal
import sys

TICKS = 20  # without a byte, after which the parent prints its stacks


def monitor(parent: int, who: str, seconds: float) -> None:
    """Send SIGUSR2 to the parent whenever it ran for `seconds` and wrote nothing. Return when it has ended."""
    silent = 0
    while os.getppid() == parent:  # a process forked by the parent may hold the pipe open
        if select.select([0], [], [], seconds / TICKS)[0]:
            if not os.read(0, 65536):
                return
            silent = 0
        elif _is_stopped(parent):
            silent = 0
        elif (silent := silent + 1) == TICKS:
            sys.stderr.write(f"\nTimeout: {who}: no Python thread ran for {seconds:.1f} s; its threads:\n")
            sys.stderr.flush()
            os.kill(parent, signal.SIGUSR2)
            silent = 0


def _is_stopped(pid: int) -> bool:
    """Return whether a signal or a debugger stops the process; False without /proc."""
    try:
        with open(f"/proc/{pid}/stat", encoding="latin-1") as file:
            return file.read().rpartition(")")[2].split()[0] in "Tt"
    except OSError:
        return False


if __name__ == "__main__":
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):  # of the process group
        signal.signal(number, signal.SIG_IGN)
    monitor(int(sys.argv[1]), sys.argv[2], float(sys.argv[3]))
