"""MQAR examples: the structure of the golden ones, the definition, the distribution, and what solves them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data.synthetic.examples import UNLABELLED, Examples, distinct, weighted_distinct
from data.synthetic.mqar import mqar


def check(examples: Examples, pairs: int, vocabulary: int) -> None:
    """Everything that the definition says of one example, row by row."""
    half = vocabulary // 2
    for tokens, labels in zip(*examples, strict=True):
        keys, values = tokens[: 2 * pairs : 2], tokens[1 : 2 * pairs : 2]
        assert len(set(keys)) == len(set(values)) == pairs
        assert keys.min() >= 1
        assert keys.max() < half <= values.min()
        assert values.max() < vocabulary
        labelled = np.nonzero(labels != UNLABELLED)[0]
        assert len(labelled) == pairs
        assert labelled.min() >= 2 * pairs
        assert not (labelled % 2).any()
        assert dict(zip(tokens[labelled], labels[labelled], strict=True)) == dict(zip(keys, values, strict=True))
        rest = np.ones(len(tokens), bool)
        rest[: 2 * pairs] = rest[labelled] = False
        assert not tokens[rest].any()


def test_the_golden_examples_have_this_structure(shared_golden: Path) -> None:
    golden = np.load(shared_golden / "mqar_examples.npz")
    check(Examples(golden["inputs"], golden["labels"]), 16, 8192)
    ours = mqar(8, 256, 16)
    check(ours, 16, 8192)
    assert (ours.tokens.shape, ours.labels.shape) == (golden["inputs"].shape, golden["labels"].shape)


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 9).flatmap(lambda pairs: st.tuples(st.just(pairs), st.integers(2 * pairs, 40))),
    st.integers(0, 20),
    st.integers(0, 2**32 - 1),
)
def test_every_example_is_as_defined(shape: tuple[int, int], more: int, seed: int) -> None:
    pairs, half_length = shape
    vocabulary = 2 * pairs + 2 + more
    check(mqar(5, 2 * half_length, pairs, vocabulary=vocabulary, seed=seed), pairs, vocabulary)


def test_a_seed_is_a_data_set() -> None:
    first, again, other = (mqar(20, 64, 4, seed=seed).tokens for seed in (3, 3, 4))
    assert (first == again).all()
    assert (first != other).any()


def test_the_place_of_a_query_follows_the_power_law() -> None:
    """One pair: slot s with probability p_s. Two: the second among the rest, renormalized."""
    examples = mqar(40_000, 16, 1, power=0.3)
    slot = ((examples.labels != UNLABELLED).argmax(1) - 2) // 2
    weights = np.arange(1.0, 8) ** (0.3 - 1)
    expected = weights / weights.sum()
    assert np.abs(np.bincount(slot, minlength=7) / 40_000 - expected).max() < 0.01
    drawn = weighted_distinct(np.random.default_rng(1), 200_000, 2, np.array([4.0, 2.0, 1.0]))
    after_the_first = drawn[drawn[:, 0] == 0, 1]
    assert abs((after_the_first == 1).mean() - 2 / 3) < 0.01
    assert abs((drawn[:, 0] == 0).mean() - 4 / 7) < 0.01


def test_ordered_choices_are_uniformly_distributed() -> None:
    drawn = distinct(np.random.default_rng(2), 60_000, 2, 4)
    counts = np.bincount(drawn[:, 0] * 4 + drawn[:, 1], minlength=16).reshape(4, 4)
    assert not counts.diagonal().any()
    off = counts[~np.eye(4, dtype=bool)] / 60_000
    assert np.abs(off - 1 / 12).max() < 0.005


def test_lookup_solves_the_task_and_guessing_does_not() -> None:
    examples = mqar(2_000, 64, 4, vocabulary=64)
    labelled = examples.labels != UNLABELLED
    answers = np.zeros_like(examples.labels)
    for row, tokens in enumerate(examples.tokens):
        table = dict(zip(tokens[:8:2], tokens[1:8:2], strict=True))
        answers[row] = [table.get(token, 0) for token in tokens]
    assert (answers[labelled] == examples.labels[labelled]).all()
    guessed = np.random.default_rng(0).integers(32, 64, examples.labels.shape)
    assert abs((guessed[labelled] == examples.labels[labelled]).mean() - 1 / 32) < 0.01


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"length": 63, "pairs": 4}, "an even length of at least 4 x pairs = 16"),
        ({"length": 64, "pairs": 17}, "at least 4 x pairs = 68"),
        ({"length": 64, "pairs": 8, "vocabulary": 16}, "allows 1 to 7"),
        ({"length": 64, "pairs": 0}, "allows 1 to 4095"),
        ({"length": 64, "pairs": 4, "power": 0}, "power = 0: a number above 0"),
    ],
)
def test_invalid_settings_are_refused(arguments: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        mqar(1, **arguments)
    with pytest.raises(ValueError, match="cannot draw 5 distinct"):
        distinct(np.random.default_rng(0), 1, 5, 4)
