"""Process that lets its parent print its stacks when no Python thread of the parent runs.

`Watchdog` starts it as `python stack_monitor.py WHO SECONDS` and writes a byte to its standard input from a thread. It counts
ticks of its own, not time: a pause of both processes (SIGSTOP, suspend) is at most one tick. The timer of faulthandler counts
time. After a pause it would read the stacks while the threads run, which can end the process with a segmentation fault.
"""

from __future__ import annotations

import os
import select
import signal
import sys

TICKS = 20  # without a byte, after which the parent prints its stacks


def monitor(who: str, seconds: float) -> None:
    """Send SIGUSR2 to the parent whenever it wrote nothing for `seconds`. Return when the parent has ended."""
    parent, silent = os.getppid(), 0
    while os.getppid() == parent:
        if select.select([0], [], [], seconds / TICKS)[0]:
            if not os.read(0, 4096):
                return
            silent = 0
        elif (silent := silent + 1) == TICKS:
            sys.stderr.write(f"\nTimeout: {who}: no Python thread ran for {seconds:.1f} s; its threads:\n")
            sys.stderr.flush()
            os.kill(parent, signal.SIGUSR2)
            silent = 0


if __name__ == "__main__":
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):  # of the process group
        signal.signal(number, signal.SIG_IGN)
    monitor(sys.argv[1], float(sys.argv[2]))
