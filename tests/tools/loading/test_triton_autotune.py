"""Configurations of a kernel are compiled by children of this process, which keeps what it was."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from tools.loading import triton_autotune as tuning


@pytest.fixture
def active(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Triton's driver, of a device that does not exist, on a machine of three processors."""
    driver = SimpleNamespace(get_current_device=lambda: 3, get_current_target=lambda: "target")
    module: Any = ModuleType("triton.runtime.driver")
    module.driver = SimpleNamespace(active=driver)
    monkeypatch.setitem(sys.modules, "triton", ModuleType("triton"))
    monkeypatch.setitem(sys.modules, "triton.runtime", ModuleType("triton.runtime"))
    monkeypatch.setitem(sys.modules, "triton.runtime.driver", module)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2})
    return driver


class Kernel:
    """Writes who compiled what for which device; `slow` sleeps and `bad` cannot be compiled."""

    def __init__(self, folder: Path, active: SimpleNamespace) -> None:
        self.folder, self.active = folder, active

    def run(self, *args: Any, grid: tuple[int], warmup: bool, name: str) -> None:
        if name == "slow":
            time.sleep(60)
        if name == "bad":
            raise ValueError("out of registers")
        words = os.getpid(), self.active.get_current_device(), self.active.get_current_target(), args, grid, warmup
        (self.folder / name).write_text(repr(words))


def _config(name: str) -> SimpleNamespace:
    kwargs: Callable[[], dict[str, str]] = lambda: {"name": name}  # noqa: E731
    return SimpleNamespace(all_kwargs=kwargs)


def test_configurations_are_compiled_by_one_process_per_processor(tmp_path: Path, active: SimpleNamespace) -> None:
    before = dict(vars(active))
    names = ["a", "bad", "b", "c", "d", "e", "f"]
    kernel = Kernel(tmp_path, active)
    tuning._compile(kernel, (1, "x"), {"grid": (8,), "warmup": False}, [_config(name) for name in names])
    printed = {path.name: eval(path.read_text()) for path in tmp_path.iterdir()}
    assert sorted(printed) == ["a", "b", "c", "d", "e", "f"]
    processes = {words[0] for words in printed.values()}
    assert len(processes) == 3
    assert os.getpid() not in processes
    assert {words[1:] for words in printed.values()} == {(3, "target", (1, "x"), (8,), True)}
    assert vars(active) == before


def test_compilation_that_does_not_end_is_killed(
    tmp_path: Path, active: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tuning, "COMPILE_SECONDS", 3.0)
    begin = time.monotonic()
    tuning._compile(Kernel(tmp_path, active), (), {"grid": (1,)}, [_config("slow"), _config("a")])
    assert time.monotonic() - begin < 30
    assert [path.name for path in tmp_path.iterdir()] == ["a"]
