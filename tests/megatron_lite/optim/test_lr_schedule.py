"""Learning-rate schedules at the points that define them."""

from __future__ import annotations

import pytest

from megatron_lite.optim.lr_schedule import learning_rate

COMMON = {"peak": 1.0, "warmup_steps": 10, "decay_steps": 110, "min_ratio": 0.1}


@pytest.mark.parametrize("kind", ["constant", "linear", "cosine", "inverse_sqrt", "wsd"])
def test_warmup_is_linear_and_reaches_the_peak(kind):
    rates = [learning_rate(step, kind=kind, **COMMON) for step in range(11)]
    assert rates[:10] == pytest.approx([(step + 1) / 10 for step in range(10)])
    assert learning_rate(0, kind=kind, **{**COMMON, "warmup_steps": 0}) == pytest.approx(1.0)


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
    assert learning_rate(step, kind=kind, **COMMON) == pytest.approx(rate)


@pytest.mark.parametrize(
    ("kind", "changes"),
    [("linear", {"decay_steps": 10}), ("cosine", {"decay_steps": 5}), ("wsd", {"wsd_decay_fraction": 0.0})],
)
def test_a_decay_without_length_is_over_at_its_end(kind, changes):
    rates = [learning_rate(step, kind=kind, **{**COMMON, **changes}) for step in (9, 110, 111)]
    assert rates == pytest.approx([1.0, 0.1, 0.1])


def test_an_unknown_kind_is_refused():
    with pytest.raises(ValueError, match=r"schedule\.kind: 'steps'"):
        learning_rate(20, kind="steps", **COMMON)  # type: ignore[arg-type]
