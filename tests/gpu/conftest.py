from __future__ import annotations

import pytest
import torch

from tests.untuned import leave_untuned


@pytest.fixture(scope="session", autouse=True)
def _gpu() -> None:
    if not torch.cuda.is_available():
        pytest.skip(
            "needs a CUDA device, which `pytest tests/gpu` and `pytest -m gpu` see, but no run with other tests"
        )
    leave_untuned()


@pytest.fixture(autouse=True)
def _random_seed() -> None:
    """Draw other inputs in every run. pytest shows the seed of a failed test."""
    print(f"inputs of torch.manual_seed({torch.seed()})")
