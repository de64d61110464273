"""Muon in one process: against a plain float64 reference, the stored state, and what it refuses."""

from __future__ import annotations

from typing import Any

import pytest

from tests import oracle
from tests.megatron_lite.conftest import batches, model_config

MUON = {"name": "muon"}


def train(engine: Any, steps: list[Any]) -> list[tuple[float, float]]:
    results = [engine.train_step(step, lr=3e-4) for step in steps]
    return [(result.loss, result.gradient_norm) for result in results]


@pytest.mark.parametrize("mixer", ["metala", "attention"])
def test_engine_equals_reference(build, mixer):
    config, steps = model_config((mixer,)), batches(4)
    expected = oracle.train(config, steps, seed=11, lr=3e-4, warmup=0, total=10**6, min_ratio=1.0, muon=True)
    actual = train(build(config, optimizer=MUON), steps)
    for found, wanted in zip(actual, expected, strict=True):
        assert found == pytest.approx(wanted, rel=1e-5)
    adamw = oracle.train(config, steps, seed=11, lr=3e-4, warmup=0, total=10**6, min_ratio=1.0)
    assert abs(actual[3][0] - adamw[3][0]) > 1e-4
