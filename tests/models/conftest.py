from __future__ import annotations

from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def _seed() -> None:
    # Without a GPU torch.manual_seed stores a stack trace per kind of device, which takes 2 ms.
    (torch.manual_seed if torch.cuda.is_available() else torch.default_generator.manual_seed)(0)
