"""Simulate two machines on one by network namespaces with a virtual link."""

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
    """Hold the command prefix, address and network interface of a machine."""

    prefix: list[str]
    address: str
    interface: str


@contextlib.contextmanager
def two_machines() -> Iterator[list[Machine]]:
    """Yield two namespaces joined by a pair of virtual interfaces, or two addresses of this machine if not permitted."""
    names = [f"metalion-{os.getpid()}-{i}" for i in range(2)]
    cards = [f"ml{os.getpid() % 100000}{letter}" for letter in "ab"]
    commands = [
        *(f"ip netns add {name}" for name in names),
        f"ip link add {cards[0]} netns {names[0]} type veth peer name {cards[1]} netns {names[1]}",
        *(
            f"ip -n {name} {command}"
            for i, (name, card) in enumerate(zip(names, cards, strict=True))
            for command in ("link set lo up", f"address add 10.213.77.{i + 1}/24 dev {card}", f"link set {card} up")
        ),
    ]
    try:
        is_permitted = shutil.which("ip") is not None and all(
            subprocess.run(command.split(), capture_output=True).returncode == 0 for command in commands
        )
        if is_permitted:
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
    """Return the first bash block under "Two machines" of docs/guide/launch.md."""
    text = (ROOT / "docs" / "guide" / "launch.md").read_text()
    return re.search(r"## Two machines.*?```bash\n(.*?)```", text, re.DOTALL)[1]
