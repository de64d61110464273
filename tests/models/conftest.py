from __future__ import annotations

from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def shared_golden() -> Path:
    """Golden values computed by a program apart, where they are at hand."""
    folder = ROOT.parent / "shared" / "golden"
    if not folder.is_dir():
        pytest.skip(f"{folder} is absent: the golden values kept in tests/models/golden are checked instead")
    return folder


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)
