"""Metrics of a validation set from the sums of its parts."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_lite.engine.engine import EvaluationSums
from megatron_lite.validation import ValidationSet, evaluate


def metrics_of(
    sums: dict[str, EvaluationSums], shares: dict[str, float], total_bytes: int | None = None, limit: int | None = 3
) -> dict[str, float]:
    """Evaluate a set of 100 tokens in 16 micro-batches, of which `limit` global batches read 30 %."""

    def part_sums(batches: Any) -> EvaluationSums:
        name, requested = batches
        assert requested == limit
        return sums[name]

    data = ValidationSet(
        lambda *batches: batches, shares, total_bytes, total_tokens=100, micro_batches=16, fraction=lambda _: 0.3
    )  # type: ignore[arg-type, return-value]
    return evaluate(SimpleNamespace(evaluate=part_sums), data, limit)  # type: ignore[arg-type]


def test_parts_of_a_selection_count_by_their_shares():
    sums = {"books": EvaluationSums(20.0, 10.0, 5.0), "web": EvaluationSums(6.0, 2.0, 2.0)}
    values = metrics_of(sums, {"books": 0.75, "web": 0.25}, total_bytes=400)
    assert values.pop("seconds") >= 0
    assert values == pytest.approx(
        {
            "loss": 2.25,
            "perplexity": math.exp(2.25),
            "accuracy": 0.75 * 0.5 + 0.25,
            "bits_per_byte": 2.25 / math.log(2) / 4,
            "loss/books": 2.0,
            "loss/web": 3.0,
            "evaluated_tokens": 12.0,
            "evaluated_fraction": 0.3,
        }
    )


def test_labelled_tokens_of_the_whole_set_have_equal_weights():
    """Parts of equal size may have different numbers of masked tokens, because ends of documents are never masked."""
    sums = {"books": EvaluationSums(20.0, 10.0, 5.0), "notes": EvaluationSums(6.0, 2.0, 2.0)}
    values = metrics_of(sums, {"books": 0.5, "notes": 0.5}, limit=None)
    assert (values["loss"], values["accuracy"]) == pytest.approx((26 / 12, 7 / 12))
    assert values["evaluated_fraction"] == 1
    assert (values["loss/books"], values["loss/notes"]) == (2.0, 3.0)


def test_part_without_labels_has_no_loss():
    sums = {"books": EvaluationSums(20.0, 10.0, 5.0), "notes": EvaluationSums(0.0, 0.0, 0.0)}
    values = metrics_of(sums, {"books": 0.9, "notes": 0.1})
    assert (values["loss"], values["accuracy"]) == pytest.approx((2.0, 0.5))
    assert "loss/notes" not in values
    assert math.isnan(metrics_of({"": EvaluationSums(0.0, 0.0, None)}, {"": 1.0})["loss"])


def test_perplexity_of_an_unnamed_part_is_bounded():
    values = metrics_of({"": EvaluationSums(8000.0, 10.0, None)}, {"": 1.0})
    assert set(values) == {"loss", "perplexity", "evaluated_tokens", "evaluated_fraction", "seconds"}
    assert values["loss"] == 800.0
    assert values["perplexity"] == math.exp(700)
