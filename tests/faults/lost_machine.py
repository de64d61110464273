"""Lose one of two machines: its link is cut and its processes are killed. docs/guide/launch.md describes the recovery."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import train
from tests.cli.conftest import assert_same_run, run_words, write_corpus
from tests.faults.started_command import StartedCommand, last_step
from tests.launch.machines import Machine, example, two_machines
from tests.parity.launch import free_port

HEARTBEAT = 5.0  # seconds
END_SECONDS = 60.0  # for torchrun on the other machine, which takes seconds beyond the heartbeat on a busy machine
SETTINGS = {
    "schedule.train_steps": 60,
    "checkpoint.interval": 5,
    "run.heartbeat_seconds": HEARTBEAT,
    "optimizer.lr": 1e-4,
}
STORE = (
    "import time; from torch.distributed import TCPStore as S; "
    "s = S('0.0.0.0', {port}, is_master=True, wait_for_workers=False); time.sleep(1e9)"
)


def run(count: int, seed: int, folder: Path) -> dict[str, int]:
    """Lose the machine of rank 0 `count` times, with the store in turns on another machine and on the lost machine.

    With the store on another machine, the run resumes when the lost machine repeats the command. Otherwise torchrun on the
    other machine ends, and the run resumes when both machines repeat the command.

    Returns:
        Counts; `recovered` must equal `losses`, and `slow_to_end` and `other_result` must be 0.
    """
    draw, corpus = random.Random(seed), write_corpus(folder)
    assert train.main(run_words(corpus, folder, "alone", **SETTINGS)) == 0
    counts = {"losses": 0, "recovered": 0, "other_result": 0, "slow_to_end": 0}
    for number in range(count):
        name = f"run{number}"
        words = run_words(corpus, folder, name, **SETTINGS)
        with two_machines() as machines, contextlib.ExitStack() as stack:
            run_of_two = _Run(machines, words, folder / name, stack, external=number % 2 == 0)
            step = draw.randint(8, 30)
            first, second = run_of_two.start(0), run_of_two.start(1)
            second.wait_until(lambda run=folder / name, step=step: last_step(run) >= step, 180)
            _set_link(machines[0], "down")
            first.signal(signal.SIGKILL, first.processes())
            counts["losses"] += 1
            if not run_of_two.external:
                counts["slow_to_end"] += bool(second.wait_for_all(END_SECONDS))
                second = None
            _set_link(machines[0], "up")
            commands = [run_of_two.start(0), second or run_of_two.start(1)]
            for command in commands:
                command.wait_for_all(240)
            if (folder / name / "summary.json").exists():  # the run is complete
                counts["recovered"] += 1
                try:
                    assert_same_run(folder / name, folder / "alone")
                except AssertionError:
                    counts["other_result"] += 1
    return counts


class _Run:
    """Start the example of docs/guide/launch.md on two machines; `external`: with a store outside of machine 0."""

    def __init__(
        self, machines: list[Machine], words: list[str], folder: Path, stack: contextlib.ExitStack, *, external: bool
    ) -> None:
        self.external = external
        self._machines, self._folder, self._stack, self._starts = machines, folder, stack, 0
        port = str(free_port())
        program = example().replace("29500", port).replace("train.py", "-m tests.faults.inject pace -1 1")
        if external:
            # Otherwise the second machine would see its own address and host the store.
            program = program.replace('"$ADDRESS" = ', '"" = ')
            code = STORE.format(port=port)
            store = subprocess.Popen([*machines[1].prefix, sys.executable, "-c", code])
            stack.callback(store.wait)
            stack.callback(store.kill)
        self._program = program
        self._variables = {
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "FIRST": machines[0].address,
            "STORE": machines[1].address if external else "",
            "GPUS": "1",
            "RUN": " ".join(words).replace("data.tokenizer={type: bytes}", "data.tokenizer.type=bytes"),
        }

    def start(self, index: int) -> StartedCommand:
        """Start the example on a machine."""
        machine, self._starts = self._machines[index], self._starts + 1
        where = {"ADDRESS": machine.address, "INTERFACE": machine.interface}
        log = self._folder.with_suffix(f".{self._starts}.log")
        command = [*machine.prefix, "bash", "-euc", self._program]
        return self._stack.enter_context(StartedCommand(command, log, **self._variables, **where))


def _set_link(machine: Machine, state: str) -> None:
    """Set the link of a machine down or up; a machine without a namespace loses its processes alone."""
    if machine.prefix:
        words = ["ip", "-n", machine.prefix[-1], "link", "set", machine.interface, state]
        subprocess.run(words, check=True)
        time.sleep(0.1)
