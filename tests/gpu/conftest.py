from __future__ import annotations

import pytest
import torch

from tests.untuned import leave_untuned

if torch.cuda.is_available():
    leave_untuned()


@pytest.fixture(autouse=True)
def _drawn_anew() -> None:
    """Other inputs every time; pytest shows the seed of a test that failed."""
    print(f"inputs of torch.manual_seed({torch.seed()})")
