"""Kill a random process of a run by SIGKILL at a random moment and repeat the command until the run is complete."""

from __future__ import annotations

import random
import re
import signal
import time
from pathlib import Path
from typing import Any

from megatron_lite.checkpoint import reader
from tests.cli.conftest import metrics_lines, run_words, train_lines, write_corpus
from tests.faults.started_command import StartedCommand, last_step, training_command

INTERVAL = 5  # steps between saves, and between validations
MOMENTS = ("start", "step", "save", "validation")
END_SECONDS = 60.0  # after a kill, for all processes: the heartbeat, then torchrun's own timeout
SETTINGS = {
    "schedule.train_steps": 40,
    "checkpoint.interval": INTERVAL,
    "checkpoint.keep_last": 2,
    "evaluation.interval": INTERVAL,
    "evaluation.batches": 4,
    "run.heartbeat_seconds": 5,
}


def run(count: int, seed: int, folder: Path, *, ranks: tuple[int, ...] = (1, 2)) -> dict[str, int]:
    """Kill `count` times and compare every completed run with an uninterrupted one.

    Args:
        folder: holds the runs, which stay.
        ranks: numbers of processes, in turns.

    Returns:
        Counts; `different`, `orphans` and `lost_more_than_an_interval` must be 0. `starts_checked` counts the starts after a
        kill whose output names the step that they resume from; the others were killed earlier.
    """
    draw, corpus = random.Random(seed), write_corpus(folder)
    names = ("kills", "runs", "equal", "different", "orphans", "starts_checked", "lost_more_than_an_interval")
    counts = dict.fromkeys(names, 0)
    while counts["kills"] < count:
        size = ranks[counts["runs"] % len(ranks)]
        name = f"run{counts['runs']}"
        command = training_command(run_words(corpus, folder, name, **SETTINGS), ranks=size)
        kills = _kill_until_complete(command, folder / name, draw, count, counts)
        reference = folder / f"uninterrupted{size}"
        if not reference.exists():
            words = run_words(corpus, folder, reference.name, **SETTINGS)
            _kill_until_complete(training_command(words, ranks=size, slow=False), reference, draw, 0, dict(counts))
        counts["runs"] += 1
        if kills:
            counts["equal" if outcome(folder / name) == outcome(reference) else "different"] += 1
    return counts


def outcome(folder: Path) -> dict[str, Any]:
    """Return the values that must be equal bit for bit: files of the last checkpoint, losses, position in the data."""
    manifest = reader.read_manifest(reader.resolve(folder))
    return {
        "files": {name: entry for name, entry in manifest["files"].items() if name.endswith(".safetensors")},
        "state": {key: value for key, value in manifest["state"].items() if key != "seconds"},
        "steps": train_lines(folder),
        "validation": [(line["step"], line["loss"]) for line in metrics_lines(folder, "validation")],
    }


def _kill_until_complete(
    command: list[str], folder: Path, draw: random.Random, count: int, counts: dict[str, int]
) -> int:
    """Start the command and kill one of its processes until the run is complete. Return the number of kills."""
    kills = done = 0
    while True:
        with StartedCommand(command, folder.with_suffix(f".{kills}.log")) as started:
            moment = draw.choice(MOMENTS)
            killed = counts["kills"] < count and _wait_for(moment, started, folder, draw) and _kill_one(started, draw)
            # Without a kill the run ends by itself.
            orphans = started.wait_for_all(END_SECONDS if killed else 400)
        counts["orphans"] += len(orphans)
        output = started.log.read_text()
        first = _first_step(output) if kills else None
        if first is not None:
            counts["starts_checked"] += 1
            counts["lost_more_than_an_interval"] += done - first > INTERVAL
        if not killed:
            if started.agent.returncode:
                raise RuntimeError(f"{folder.name} ended with {started.agent.returncode}: {output[-3000:]}")
            return kills
        kills, done = kills + 1, last_step(folder)
        counts["kills"] += 1


def _kill_one(started: StartedCommand, draw: random.Random) -> bool:
    """Kill a random process. Return whether one was alive."""
    alive = started.victims()
    if alive:
        started.signal(signal.SIGKILL, [draw.choice(alive)])
    return bool(alive)


def _first_step(output: str) -> int | None:
    """Return the step that a start resumed from, 0 for a new run, None if it was killed earlier."""
    resumed = re.search(r"; from (?:the start|\S+ at step (\d+))", output)
    return int(resumed[1] or 0) if resumed else None


def _wait_for(moment: str, started: StartedCommand, folder: Path, draw: random.Random) -> bool:
    """Wait for the moment of a kill. Return False if the run has ended earlier."""
    first, share = last_step(folder), draw.random()
    checkpoints = folder / "checkpoints"
    saved = _latest(checkpoints)
    conditions = {
        "start": lambda: True,
        "step": lambda: last_step(folder) > first,
        "save": lambda: any(checkpoints.glob(".step_*.writing")),
        "validation": lambda: _latest(checkpoints) not in ("", saved),
    }
    seconds = {"start": 6.0, "step": 1.0, "save": 0.02, "validation": 0.15}[moment]
    if not started.wait_until(conditions[moment], 400):
        return False
    time.sleep(share * seconds)
    return not started.has_ended


def _latest(checkpoints: Path) -> str:
    try:
        return (checkpoints / "latest").read_text().strip()
    except OSError:
        return ""
