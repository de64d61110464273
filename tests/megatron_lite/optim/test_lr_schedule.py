"""Learning-rate schedules at the points that define them."""

from __future__ import annotations

from typing import Any

import pytest

from megatron_lite.config.schema import ScheduleConfig
from megatron_lite.optim.lr_schedule import learning_rate

COMMON = {"train_steps": 120, "warmup_steps": 10, "decay_steps": 110}


def rate_of(step: int, **changes: Any) -> float:
    return learning_rate(step, 1.0, ScheduleConfig(**{**COMMON, **changes}))


@pytest.mark.parametrize("kind", ["constant", "linear", "cosine", "inverse_sqrt", "wsd"])
def test_warmup_is_linear_and_reaches_the_peak(kind):
    rates = [rate_of(step, kind=kind) for step in range(11)]
    assert rates[:10] == pytest.approx([(step + 1) / 10 for step in range(10)])
    assert rate_of(0, kind=kind, warmup_steps=0) == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("kind", "step", "rate"),
    [
        ("constant", 109, 1.0),
        ("constant", 10_000, 1.0),
        ("linear", 10, 1.0),
        ("linear", 60, 0.55),
        ("linear", 110, 0.1),
        ("linear", 10_000, 0.1),
        ("cosine", 10, 1.0),
        ("cosine", 35, 0.1 + 0.45 * (1 + 2**-0.5)),
        ("cosine", 60, 0.55),
        ("cosine", 110, 0.1),
        ("cosine", 10_000, 0.1),
        ("inverse_sqrt", 39, 0.5),
        ("inverse_sqrt", 159, 0.25),
        ("inverse_sqrt", 10_000_000, 0.1),
        ("wsd", 87, 1.0),
        ("wsd", 99, 0.55),
        ("wsd", 110, 0.1),
        ("wsd", 10_000, 0.1),
    ],
)
def test_points(kind, step, rate):
    assert rate_of(step, kind=kind) == pytest.approx(rate)


def test_lowest_rate_and_the_decay_of_wsd_are_configured():
    assert rate_of(110, kind="linear", min_lr_ratio=0.3) == pytest.approx(0.3)
    assert rate_of(66, kind="wsd", wsd_decay_fraction=0.8) == pytest.approx(0.55)


@pytest.mark.parametrize(
    ("kind", "changes"),
    [("linear", {"decay_steps": 10}), ("cosine", {"decay_steps": 5}), ("wsd", {"wsd_decay_fraction": 0.0})],
)
def test_a_decay_without_length_is_over_at_its_end(kind, changes):
    rates = [rate_of(step, kind=kind, **changes) for step in (9, 110, 111)]
    assert rates == pytest.approx([1.0, 0.1, 0.1])
