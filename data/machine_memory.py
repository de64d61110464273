"""Read how much memory this machine has for a process."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path


def machine_memory(process: Path = Path("/proc/self/cgroup"), groups: Path = Path("/sys/fs/cgroup")) -> int:
    """Return the bytes of memory of this machine, or the least limit of a control group, as containers and Slurm set it.

    process: Linux's file with the control groups of this process. groups: its folder with their limits.
    """
    return min([os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), *_limits(process, groups)])


def _limits(process: Path, groups: Path) -> Iterator[int]:
    lines = process.read_text().splitlines() if process.is_file() else []
    for number, controllers, path in (line.split(":", 2) for line in lines):
        if number == "0":
            folder, name = groups, "memory.max"
        elif "memory" in controllers.split(","):  # version 1
            folder, name = groups / "memory", "memory.limit_in_bytes"
        else:
            continue
        group = folder / path.lstrip("/")
        for parent in (group, *group.parents):
            if parent.is_relative_to(folder) and (file := parent / name).is_file():
                text = file.read_text().strip()
                if text.isdecimal():  # else "max"
                    yield int(text)
