from __future__ import annotations

import pytest
import torch

from tests.untuned import leave_untuned

if torch.cuda.is_available():
    leave_untuned()


@pytest.fixture(autouse=True)
def _random_seed() -> None:
    """Draw other inputs in every run. pytest shows the seed of a failed test."""
    print(f"inputs of torch.manual_seed({torch.seed()})")
