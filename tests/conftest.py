"""What tests of several areas share."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

with contextlib.suppress(ImportError):  # a GPU machine that runs tests/gpu alone may lack it
    from hypothesis import settings

    # The same cases every time, and no time limit a case: the machine may be busy.
    settings.register_profile("deterministic", deadline=None, derandomize=True, database=None, max_examples=60)
    settings.load_profile("deterministic")

SHARED = Path(__file__).resolve().parents[2] / "shared"


@pytest.fixture(scope="session", autouse=True)
def unsynced() -> Iterator[None]:
    """Do not wait for the disk: what tests write need not outlive a power cut."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda handle: None)
        yield


@pytest.fixture(scope="session")
def shared() -> Path:
    """The optional folder of real samples beside the checkout."""
    if not (SHARED / "data").is_dir():
        pytest.skip(f"the real data samples are not there: {SHARED}/data")
    return SHARED


@pytest.fixture(scope="session")
def shared_golden() -> Path:
    """Golden values computed by a program apart, where they are at hand."""
    folder = SHARED / "golden"
    if not folder.is_dir():
        pytest.skip(f"{folder} is absent: the golden values kept in tests/ are checked instead")
    return folder
