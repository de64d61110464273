"""What is made of the sums of a validation set and of its parts."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_lite.engine.engine import EvaluationSums
from megatron_lite.validation import ValidationSet, evaluate


def measured(
    sums: dict[str, EvaluationSums], shares: dict[str, float], total_bytes: int | None = None, limit: int | None = 3
) -> dict[str, float]:
    """Of a set of 100 tokens, of which each part is asked for at most `limit` micro batches."""

    def part_sums(batches: Any) -> EvaluationSums:
        name, asked = batches
        assert asked == limit
        return sums[name]

    data = ValidationSet(lambda *batches: batches, shares, total_bytes, total_tokens=100, micro_batches=1)  # type: ignore[arg-type, return-value]
    return evaluate(SimpleNamespace(evaluate=part_sums), data, limit)  # type: ignore[arg-type]


def test_every_part_counts_by_its_share_of_the_set():
    sums = {"books": EvaluationSums(20.0, 10.0, 5.0), "web": EvaluationSums(6.0, 2.0, 2.0)}
    values = measured(sums, {"books": 0.75, "web": 0.25}, total_bytes=400)
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
        }
    )


def test_of_the_whole_set_every_token_that_is_asked_for_counts_alike():
    """Parts of as many tokens may have masked tokens unevenly: ends of documents are never masked."""
    sums = {"books": EvaluationSums(20.0, 10.0, 5.0), "notes": EvaluationSums(6.0, 2.0, 2.0)}
    values = measured(sums, {"books": 0.5, "notes": 0.5}, limit=None)
    assert (values["loss"], values["accuracy"]) == pytest.approx((26 / 12, 7 / 12))
    assert (values["loss/books"], values["loss/notes"]) == (2.0, 3.0)


def test_a_part_in_which_no_token_is_asked_for_has_no_loss_and_leaves_that_of_the_set():
    sums = {"books": EvaluationSums(20.0, 10.0, 5.0), "notes": EvaluationSums(0.0, 0.0, 0.0)}
    values = measured(sums, {"books": 0.9, "notes": 0.1})
    assert (values["loss"], values["accuracy"]) == pytest.approx((2.0, 0.5))
    assert "loss/notes" not in values
    assert math.isnan(measured({"": EvaluationSums(0.0, 0.0, None)}, {"": 1.0})["loss"])


def test_one_part_without_a_name_and_a_loss_beyond_all_numbers():
    values = measured({"": EvaluationSums(8000.0, 10.0, None)}, {"": 1.0})
    assert set(values) == {"loss", "perplexity", "evaluated_tokens", "seconds"}
    assert values["loss"] == 800.0
    assert values["perplexity"] == math.exp(700)
