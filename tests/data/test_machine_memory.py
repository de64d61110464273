"""The memory of a process is that of its machine, or the least limit of its control groups."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from data.machine_memory import machine_memory

MACHINE = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


@pytest.mark.parametrize(
    ("process", "limits", "expected"),
    [
        ("0::/job/step\n", {"job/step/memory.max": "2000", "job/memory.max": "1000"}, 1000),
        ("0::/job\n", {"job/memory.max": "max"}, MACHINE),
        ("0::/of/the/host\n", {"memory.max": "3000"}, 3000),  # a container sees its own group as the root
        ("4:cpu,memory:/job\n1:cpu:/job\n", {"memory/job/memory.limit_in_bytes": "500", "job/memory.max": "1"}, 500),
        ("4:memory:/job\n", {"memory/memory.limit_in_bytes": "9223372036854771712"}, MACHINE),
        ("", {}, MACHINE),
    ],
)
def test_least_limit(tmp_path: Path, process: str, limits: dict[str, str], expected: int) -> None:
    groups = tmp_path / "cgroup"
    for name, text in limits.items():
        (groups / name).parent.mkdir(parents=True, exist_ok=True)
        (groups / name).write_text(text + "\n")
    (tmp_path / "process").write_text(process)
    assert machine_memory(tmp_path / "process", groups) == expected


def test_without_control_groups(tmp_path: Path) -> None:
    assert machine_memory(tmp_path / "process", tmp_path) == MACHINE
