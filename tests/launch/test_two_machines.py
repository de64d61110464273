"""The two-machine example of docs/launch.md, run as it stands there, in two network namespaces that share a cable."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.cli.conftest import ROOT, assert_same_run, environment


@dataclass(frozen=True)
class Machine:
    """How to run a command there, its address and its network card."""

    prefix: list[str]
    address: str
    interface: str


@pytest.fixture
def machines() -> Iterator[list[Machine]]:
    """Two namespaces joined by a pair of virtual cards; where that is not allowed, two addresses of this machine."""
    names = [f"metalion-{os.getpid()}-{i}" for i in range(2)]
    cards = [f"ml{os.getpid() % 100000}{letter}" for letter in "ab"]
    commands = [
        *(f"ip netns add {name}" for name in names),
        f"ip link add {cards[0]} netns {names[0]} type veth peer name {cards[1]} netns {names[1]}",
        *(
            f"ip -n {name} {what}"
            for i, (name, card) in enumerate(zip(names, cards, strict=True))
            for what in ("link set lo up", f"address add 10.213.77.{i + 1}/24 dev {card}", f"link set {card} up")
        ),
    ]
    try:
        allowed = shutil.which("ip") is not None and all(
            subprocess.run(command.split(), capture_output=True).returncode == 0 for command in commands
        )
        if allowed:
            yield [
                Machine(["ip", "netns", "exec", name], f"10.213.77.{i + 1}", card)
                for i, (name, card) in enumerate(zip(names, cards, strict=True))
            ]
        elif Path("/sys/class/net/lo").exists():
            yield [Machine([], f"127.0.0.{i + 1}", "lo") for i in range(2)]
        else:
            pytest.skip("neither network namespaces nor a loopback device are allowed here")
    finally:
        if shutil.which("ip") is not None:
            for name in names:
                subprocess.run(["ip", "netns", "delete", name], capture_output=True)


def example() -> str:
    """The first bash block under "Two machines"."""
    text = (ROOT / "docs" / "launch.md").read_text()
    return re.search(r"## Two machines.*?```bash\n(.*?)```", text, re.DOTALL)[1]


def test_two_machines_are_one_run(machines, arguments, alone, tmp_path):
    processes = [
        subprocess.Popen(
            [*machine.prefix, "bash", "-euc", example()],
            cwd=ROOT,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={
                **environment(),
                "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
                "FIRST": machines[0].address,
                "ADDRESS": machine.address,
                "INTERFACE": machine.interface,
                "GPUS": "1",
                "RUN": " ".join(arguments()).replace("data.tokenizer={type: bytes}", "data.tokenizer.type=bytes"),
            },
        )
        for machine in machines
    ]
    try:
        outputs = [process.communicate(timeout=120)[0] for process in processes]
    finally:
        for process in processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
    assert [process.returncode for process in processes] == [0, 0], "\n".join(outputs)
    assert_same_run(tmp_path / "run", alone)
    manifest = json.loads((tmp_path / "run" / "checkpoints" / "step_00000008" / "manifest.json").read_text())
    assert manifest["layout"]["world_size"] == 2
