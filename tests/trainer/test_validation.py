"""What is made of the sums of a validation set and of its parts."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_lite.engine import Evaluated
from megatron_lite.validation import ValidationSet, evaluate


def measured(sums: dict[str, Evaluated], shares: dict[str, float], total_bytes: int | None = None) -> dict[str, float]:
    """Of a set of 100 tokens, of which each part asks for at most 3 micro batches."""

    def part_sums(batches: Any) -> Evaluated:
        name, limit = batches
        assert limit == 3
        return sums[name]

    data = ValidationSet(lambda *batches: batches, shares, total_bytes, total_tokens=100, micro_batches=1)  # type: ignore[arg-type, return-value]
    return evaluate(SimpleNamespace(evaluate=part_sums), data, 3)  # type: ignore[arg-type]


def test_every_part_counts_by_its_share_of_the_set():
    sums = {"books": Evaluated(20.0, 10.0, 5.0), "web": Evaluated(6.0, 2.0, 2.0)}
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


def test_a_part_in_which_no_token_is_asked_for_has_no_loss_and_leaves_that_of_the_set():
    sums = {"books": Evaluated(20.0, 10.0, 5.0), "notes": Evaluated(0.0, 0.0, 0.0)}
    values = measured(sums, {"books": 0.9, "notes": 0.1})
    assert (values["loss"], values["accuracy"]) == pytest.approx((2.0, 0.5))
    assert "loss/notes" not in values
    assert math.isnan(measured({"": Evaluated(0.0, 0.0, None)}, {"": 1.0})["loss"])


def test_one_part_without_a_name_and_a_loss_beyond_all_numbers():
    values = measured({"": Evaluated(8000.0, 10.0, None)}, {"": 1.0})
    assert set(values) == {"loss", "perplexity", "evaluated_tokens", "seconds"}
    assert values["loss"] == 800.0
    assert values["perplexity"] == math.exp(700)
