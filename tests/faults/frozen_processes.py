"""Freeze runs by SIGSTOP: a run survives a pause of all processes, and names one frozen rank."""

from __future__ import annotations

import random
import re
import signal
import time
from pathlib import Path

from tests.cli.conftest import run_words, write_corpus
from tests.faults.outcomes import record_failure
from tests.faults.started_command import StartedCommand, last_step, training_command

HEARTBEAT = 2.0  # seconds
SETTINGS = {"run.heartbeat_seconds": HEARTBEAT, "schedule.train_steps": 99999, "checkpoint.interval": 0}


def run(count: int, seed: int, folder: Path) -> dict[str, int]:
    """Freeze `count` runs of two ranks: all processes for longer than the heartbeat, then one rank until the run ends.

    Returns:
        Counts; `killed_by_a_pause`, `not_named` and `orphans` must be 0.
    """
    draw, corpus = random.Random(seed), write_corpus(folder)
    counts = {"runs": 0, "survived_a_pause": 0, "killed_by_a_pause": 0, "named": 0, "not_named": 0, "orphans": 0}
    for number in range(count):
        name = f"frozen{number}"
        command = training_command(run_words(corpus, folder, name, **SETTINGS), ranks=2)
        with StartedCommand(command, folder / f"{name}.log") as started:
            if not started.wait_until(lambda run=folder / name: last_step(run) >= 3, 400):
                raise RuntimeError(f"the run did not start: {started.log.read_text()[-3000:]}")
            time.sleep(draw.random())
            survived = _survives_a_pause(started, folder / name)
            named = survived and _is_named(started, draw.randrange(2))
            # torchrun waits 30 s for a frozen rank before it kills it.
            counts["orphans"] += len(started.wait_for_all(100))
            if not named:
                record_failure(folder, case=number, survived=survived, output=started.log.read_text()[-3000:])
        counts["runs"] += 1
        counts["survived_a_pause" if survived else "killed_by_a_pause"] += 1
        counts["named" if named else "not_named"] += survived
    return counts


def _survives_a_pause(started: StartedCommand, run_folder: Path) -> bool:
    """Freeze all processes for longer than the heartbeat. Return whether the run then makes steps without an error."""
    processes = started.processes()
    started.signal(signal.SIGSTOP, processes)
    time.sleep(1.6 * HEARTBEAT)
    step = last_step(run_folder)
    started.signal(signal.SIGCONT, processes)
    end = time.monotonic() + 1.5 * HEARTBEAT  # a wrong verdict on the pause comes within one heartbeat
    survives = started.wait_until(lambda: last_step(run_folder) > step + 3 and time.monotonic() > end, 200)
    return survives and "error: " not in started.log.read_text()


def _is_named(started: StartedCommand, rank: int) -> bool:
    """Freeze one rank, wait for the error of the others, and kill it. Return whether the error names it."""
    victim = started.ranks()[rank]
    started.signal(signal.SIGSTOP, [victim])
    error = rf"error: rank {rank} \([^)]*process {victim}, .*silent for \d+ s: killed, frozen or disconnected"
    is_named = started.wait_until(lambda: re.search(error, started.log.read_text()), 200)
    started.signal(signal.SIGKILL, [victim])
    return is_named
