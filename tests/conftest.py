"""Fixtures of all tests."""

from __future__ import annotations

import contextlib
import gc
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

with contextlib.suppress(ImportError):  # a GPU machine that runs tests/gpu alone may lack it
    from hypothesis import settings

    # Repeatable cases. No time limit per case, because the machine may be busy.
    settings.register_profile("deterministic", deadline=None, derandomize=True, database=None, max_examples=60)
    settings.load_profile("deterministic")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[object]:
    """Import the tests without garbage collection, which would traverse all imported objects again and again."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


SHARED = Path(__file__).resolve().parents[2] / "shared"


@pytest.fixture(scope="module", autouse=True)
def frozen_heap() -> None:
    """Exempt imported objects from garbage collection: DeepSpeed collects several times per engine, 0.5 s each otherwise."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def unsynced() -> Iterator[None]:
    """Skip fsync, since files of tests need not survive a power cut."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda handle: None)
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
