"""Two machines on one: network namespaces that share a cable."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.cli.conftest import ROOT


@dataclass(frozen=True)
class Machine:
    """How to run a command there, its address and its network card."""

    prefix: list[str]
    address: str
    interface: str


@contextlib.contextmanager
def two_machines() -> Iterator[list[Machine]]:
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
    text = (ROOT / "docs" / "guide" / "launch.md").read_text()
    return re.search(r"## Two machines.*?```bash\n(.*?)```", text, re.DOTALL)[1]
