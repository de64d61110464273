"""`direct_launch` with the launchers of several Triton releases: the arguments that the C function receives."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("triton", reason="Triton is not installed: pip install triton")

from models.kernels.launch import Launch, direct_launch

GRID = (7, 3, 1)


class Launcher:
    """As in Triton 3.5 and 3.6: the launch's settings, then the kernel's arguments."""

    global_scratch_size = profile_scratch_size = 0

    def __init__(self, launch: Callable[..., None]) -> None:
        self.launch = launch

    def __call__(self, x: int, y: int, z: int, stream: object, function: int, *rest: Any) -> None:
        self.launch(x, y, z, stream, function, False, True, None, None, *rest)


class WithoutProfiler(Launcher):
    """As in Triton 3.4."""

    def __call__(self, x: int, y: int, z: int, stream: object, function: int, *rest: Any) -> None:
        self.launch(x, y, z, stream, function, False, True, None, *rest)


class Packed(Launcher):
    """As in Triton 3.7: the kernel's arguments in a tuple."""

    def __call__(
        self, x: int, y: int, z: int, stream: object, function: int, metadata: Any, launch_metadata: Any,
        enter: Any, leave: Any, *arguments: Any,
    ) -> None:  # fmt: skip
        self.launch(x, y, z, stream, function, False, True, metadata, launch_metadata, enter, leave, b"", arguments)


class Scratch(Launcher):
    global_scratch_size = 128


class Swapped(Launcher):
    """The same arguments in another order."""

    def __call__(self, x: int, y: int, z: int, stream: object, function: int, *rest: Any) -> None:
        self.launch(*reversed(rest), x, y, z, stream, function)


class Strict(Launcher):
    """A launcher that refuses objects in place of numbers, as C code does."""

    def __call__(self, x: int, y: int, z: int, stream: object, function: int, *rest: Any) -> None:
        raise TypeError("an integer is required")


def compiled(launcher: type[Launcher], calls: list[tuple[Any, ...]]) -> Any:
    run = launcher(lambda *passed: calls.append(passed))
    return SimpleNamespace(run=run, function=1234, packed_metadata=(4, 1, 2048))


@pytest.mark.parametrize("launcher", [Launcher, WithoutProfiler])
def test_direct_launch_passes_the_launchers_arguments(launcher: type[Launcher]) -> None:
    calls: list[tuple[Any, ...]] = []
    kernel = compiled(launcher, calls)
    actual = direct_launch(kernel, GRID, 5)
    assert calls == []
    assert actual is not None
    start, before, after = actual
    arguments = (4096, None, 8192, 128, 0.5)
    start(*before, 77, *after, *arguments)
    kernel.run(*GRID, 77, kernel.function, kernel.packed_metadata, None, None, None, *arguments)
    assert calls[0] == calls[1]


@pytest.mark.parametrize("launcher", [Packed, Scratch, Swapped, Strict])
def test_unknown_launcher_has_no_direct_launch(launcher: type[Launcher]) -> None:
    calls: list[tuple[Any, ...]] = []
    kernel = compiled(launcher, calls)
    assert direct_launch(kernel, GRID, 5) is None
    assert calls == []


def test_launcher_without_c_function_has_no_direct_launch() -> None:
    def run(*arguments: Any) -> None:
        raise AssertionError("launched")

    assert direct_launch(SimpleNamespace(run=run, function=1, packed_metadata=()), GRID, 2) is None


def test_grid_beyond_cuda_is_refused() -> None:
    def kernel() -> None:
        pass

    Launch(kernel, (70_000, 65_535))
    with pytest.raises(ValueError, match=r"kernel needs a grid of \(3, 65536, 1\) programs.*batch.micro_batch_size"):
        Launch(kernel, (3, 65_536))
