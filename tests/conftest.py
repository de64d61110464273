"""Fixtures of all tests."""

from __future__ import annotations

import contextlib
import gc
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.shortcuts import take_shortcuts
from tools.reporting.style import STYLE

with contextlib.suppress(ImportError):  # a GPU machine that runs tests/gpu alone may lack it
    from hypothesis import settings

    # Repeatable cases. No time limit per case, because the machine may be busy.
    settings.register_profile("deterministic", deadline=None, derandomize=True, database=None, max_examples=60)
    settings.load_profile("deterministic")


TESTS = Path(__file__).resolve().parent


def runs_only_gpu_tests(paths: Sequence[str], marks: str) -> bool:
    """Return whether pytest, called with these paths and this `-m`, runs no other tests than those of a GPU."""
    folders = TESTS / "gpu", TESTS / "models" / "kernels"
    files = [Path(path.partition("::")[0]).resolve() for path in paths]
    return marks == "gpu" or all(any(file.is_relative_to(folder) for folder in folders) for file in files)


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Set the environment of child processes: their startup, and no GPU, unless this process runs only tests of a GPU.

    One process cannot run both kinds: its first engine decides the device of DeepSpeed and of the process group.
    """
    config.addinivalue_line("markers", "gpu: runs on a GPU if there is one")
    paths = [str(TESTS / "startup"), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(filter(None, paths)))
    gpu = runs_only_gpu_tests(config.args, config.option.markexpr)
    if gpu:
        import torch

        gpu = torch.cuda.is_available()
    if not gpu:
        # Triton reads its variable when it is imported.
        os.environ.update(CUDA_VISIBLE_DEVICES="", TRITON_INTERPRET="1")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests of a GPU, which `-m gpu` selects: those of tests/gpu and those with the fixture `device`."""
    for item in items:
        if TESTS / "gpu" in item.path.parents or "device" in getattr(item, "fixturenames", ()):
            item.add_marker("gpu")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[object]:
    """Import the tests without garbage collection, which would traverse all imported objects again and again."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


SHARED = TESTS.parents[1] / "shared"


@pytest.fixture(scope="module", autouse=True)
def frozen_heap() -> None:
    """Exempt imported objects from garbage collection: DeepSpeed collects several times per engine, 0.5 s each otherwise."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def shortcuts() -> Iterator[None]:
    """Leave out slow parts of runs and evaluations in this process."""
    with pytest.MonkeyPatch.context() as patch:
        take_shortcuts(patch)
        yield


@pytest.fixture(scope="session", autouse=True)
def small_figures() -> Iterator[None]:
    """Write the figures of this process with few pixels."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(STYLE, "savefig.dpi", 50)
        yield


@pytest.fixture(scope="session")
def shared() -> Path:
    """Return the optional folder of real samples beside the checkout."""
    if not (SHARED / "data").is_dir():
        pytest.skip(f"the real data samples are not there: {SHARED}/data")
    return SHARED


@pytest.fixture(scope="session")
def shared_golden() -> Path:
    """Return the optional folder of golden values, which an independent program computed."""
    folder = SHARED / "golden"
    if not folder.is_dir():
        pytest.skip(f"{folder} is absent: the golden values kept in tests/ are checked instead")
    return folder
