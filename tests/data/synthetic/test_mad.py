"""The tasks of MAD by their definitions: what can be read off a row, and that a reader of the context answers all."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data.synthetic.examples import UNLABELLED, Examples
from data.synthetic.mad import TASKS

SEEDS = st.integers(0, 2**32 - 1)


def test_shapes_are_those_of_the_paper() -> None:
    """Recall leaves the last token out: it is only a label."""
    shapes = {name: task(3).tokens.shape for name, task in TASKS.items() if name != "noisy_recall"}
    assert shapes == {
        "in_context_recall": (3, 127),
        "fuzzy_recall": (3, 128),
        "memorization": (3, 32),
        "compression": (3, 32),
        "selective_copying": (3, 256),
    }


def whole(examples: Examples) -> np.ndarray:
    """Return the rows with the token that is only a label."""
    return np.concatenate([examples.tokens, examples.labels[:, -1:]], 1)


def both(task: str, **options: Any) -> tuple[Examples, Examples]:
    """Return the same rows, labelled for training and for testing."""
    return TASKS[task](6, **options, training=True), TASKS[task](6, **options, training=False)


@settings(max_examples=40, deadline=None)
@given(SEEDS, st.integers(4, 40), st.integers(2, 30), st.sampled_from([0.0, 0.2, 0.8]))
def test_in_context_recall(seed: int, vocabulary: int, half_length: int, noise: float) -> None:
    options: dict[str, Any] = {"length": 2 * half_length, "seed": seed, "vocabulary": vocabulary}
    if noise:
        options |= {"noise": noise, "noise_vocabulary": 16, "vocabulary": vocabulary + 16}
    train, test = both("noisy_recall", **options)
    tokens = whole(train)
    assert (train.labels == tokens[:, 1:]).all()
    assert (test.tokens == train.tokens).all()
    keys = vocabulary // 2
    for row, labels in zip(tokens, test.labels, strict=True):
        pairs = row.reshape(-1, 2)
        noisy = (pairs >= vocabulary).any(1)
        assert (pairs[noisy] >= vocabulary).all()
        assert not noisy[-1]
        assert (~noisy[:-1]).any()
        table: dict[int, int] = {}
        for place, (key, value) in enumerate(pairs):
            queried = key in table and not noisy[place]
            assert labels[2 * place] == (value if queried else UNLABELLED)
            if not noisy[place]:
                assert key < keys <= value < vocabulary
                assert table.setdefault(key, value) == value
        assert (labels[1::2] == UNLABELLED).all()
        assert labels[-1] == table[pairs[-1, 0]]


def test_noise_has_its_share_and_every_key_is_as_likely_the_last() -> None:
    options = {"vocabulary": 32, "noise_vocabulary": 16, "length": 64, "seed": 1, "noise": 0.3}
    pairs = whole(TASKS["noisy_recall"](1000, **options)).reshape(-1, 32, 2)
    before, last = pairs[:, :-1], pairs[:, -1]
    noisy = before[:, :, 0] >= 16
    assert noisy.mean() == pytest.approx(0.3 * 30 / 31, abs=0.008)  # of 31 pairs one is none
    # Noise, keys, values, and last keys: every id of its own as often as any other.
    for ids, first, count, tolerance in (
        (before[noisy], 16, 16, 0.005),
        (before[~noisy][:, 0], 0, 8, 0.008),
        (before[~noisy][:, 1], 8, 8, 0.02),
        (last[:, 0], 0, 8, 0.04),
    ):
        assert np.allclose(np.bincount(ids.ravel() - first) / ids.size, np.full(count, 1 / count), atol=tolerance)
    # However often a key was shown: of three pairs with two keys, one key was once there.
    keys = whole(TASKS["in_context_recall"](4000, vocabulary=4, length=8, seed=2))[:, ::2]
    twice = (keys[:, :3].sum(1) >= 2).astype(int)
    both_shown = np.ptp(keys[:, :3], axis=1) == 1
    assert (keys[:, 3] != twice)[both_shown].mean() == pytest.approx(0.5, abs=0.03)


@pytest.mark.parametrize(("task", "ids"), [("compression", 15), ("memorization", 127), ("selective_copying", 14)])
def test_ids_are_uniformly_distributed(task: str, ids: int) -> None:
    examples = TASKS[task](3000, seed=4)
    places = {"compression": examples.tokens[:, :-1], "memorization": examples.tokens[:, ::2]}
    drawn = places.get(task, examples.labels[:, -16:])
    assert np.allclose(np.bincount(drawn.ravel()) * ids / drawn.size, np.ones(ids), atol=0.25)


def runs(row: np.ndarray, keys: int) -> Iterator[tuple[bool, int, tuple[int, ...]]]:
    """Return the runs of key tokens and of value tokens: whether it is a key, its first position, its tokens."""
    start = 0
    for end in range(1, len(row) + 1):
        if end == len(row) or (row[end] < keys) != (row[start] < keys):
            yield bool(row[start] < keys), start, tuple(row[start:end])
            start = end


@settings(max_examples=40, deadline=None)
@given(SEEDS, st.integers(8, 40), st.integers(19, 80), st.booleans())
def test_fuzzy_recall(seed: int, vocabulary: int, length: int, training: bool) -> None:
    """Reading keys and values as wholes answers every label."""
    examples = TASKS["fuzzy_recall"](6, vocabulary=vocabulary, length=length, seed=seed, training=training)
    keys, pad = (vocabulary - 1) // 2, vocabulary - 1
    for row, labels in zip(whole(examples), examples.labels, strict=True):
        if training:
            assert (labels == row[1:]).all()
        filled = int((row == pad).sum())
        assert (row[:filled] == pad).all()
        table: dict[tuple[int, ...], tuple[int, ...]] = {}
        expected = np.full(len(row), UNLABELLED)
        key: tuple[int, ...] = ()
        for is_key, start, ids in runs(row[filled:], keys):
            assert len(set(ids)) == len(ids) <= 3
            if is_key:
                key = ids
                assert training or len(ids) == 3
            else:
                if key in table:
                    expected[filled + start : filled + start + len(ids)] = table[key]
                assert table.setdefault(key, ids) == ids
        assert training or (labels == expected[1:]).all()
        assert expected[-1] == row[-1], "the last key was shown"


def test_fuzzy_keys_of_more_than_32_bits_are_told_apart() -> None:
    """Draw keys that mostly occur once: 255 ids, four of them per key."""
    labels = TASKS["fuzzy_recall"](1, vocabulary=512, motif=4, seed=0, training=False).labels
    answered = np.flatnonzero(labels[0] != UNLABELLED)
    assert 1 <= len(answered) <= 4, "only the last pair repeats a key"
    assert (np.diff(answered) == 1).all()


def test_fuzzy_keys_have_every_length() -> None:
    rows = whole(TASKS["fuzzy_recall"](300, seed=1))
    sizes = [len(ids) for row in rows for is_key, _, ids in runs(row[row != 15], 7) if is_key]
    assert np.allclose(np.bincount(sizes)[1:] / len(sizes), 1 / 3, atol=0.03)


@settings(max_examples=20, deadline=None)
@given(SEEDS, st.integers(4, 600))
def test_memorization_has_one_table(seed: int, vocabulary: int) -> None:
    table: dict[int, int] = {}
    for tokens, labels in (TASKS["memorization"](20, vocabulary=vocabulary, seed=s) for s in (seed, seed + 1)):
        assert (tokens[:, 1::2] == vocabulary - 1).all()
        assert (labels[:, ::2] == UNLABELLED).all()
        for key, value in zip(tokens[:, ::2].flat, labels[:, 1::2].flat, strict=True):
            assert key < (vocabulary - 1) // 2 <= value < vocabulary - 1
            assert table.setdefault(key, value) == value
    assert len(set(table.values())) == len(table)


def test_table_of_memorization_depends_on_its_own_seed() -> None:
    one, other, same = (TASKS["memorization"](4, table_seed=seed, seed=3) for seed in (0, 1, 0))
    assert (one.tokens == other.tokens).all()
    assert (one.labels != other.labels).any()
    assert (one.labels == same.labels).all()


@settings(max_examples=20, deadline=None)
@given(SEEDS, st.integers(3, 50), st.integers(2, 60))
def test_compression(seed: int, vocabulary: int, length: int) -> None:
    tokens, labels = TASKS["compression"](4, vocabulary=vocabulary, length=length, seed=seed)
    assert (tokens == labels).all()
    assert (tokens[:, -1] == vocabulary - 1).all()
    assert (tokens[:, :-1] < vocabulary - 1).all()


@settings(max_examples=30, deadline=None)
@given(SEEDS, st.integers(1, 20), st.integers(1, 60), st.integers(3, 40))
def test_selective_copying(seed: int, copied: int, blanks: int, vocabulary: int) -> None:
    length = 2 * copied + 1 + blanks
    options = {"copied": copied, "length": length, "vocabulary": vocabulary, "seed": seed}
    for row, labels in zip(*TASKS["selective_copying"](6, **options), strict=True):
        first, copy, rest = np.split(row, [length - copied - 1, length - copied])
        assert copy == vocabulary - 1
        assert (rest == vocabulary - 2).all()
        ids = first[first < vocabulary - 2]
        assert len(ids) == copied
        assert first[-1] < vocabulary - 2, "blanks stand before the ids"
        assert (labels[:-copied] == UNLABELLED).all()
        assert (labels[-copied:] == ids).all()


def test_blanks_are_spread_evenly() -> None:
    rows = TASKS["selective_copying"](4_000, copied=4, length=17, seed=3).tokens[:, :12]
    before = np.diff(np.nonzero(rows < 14)[1].reshape(-1, 4), axis=1, prepend=-1) - 1
    assert np.allclose(before.mean(0), 2, atol=0.1)


def test_a_seed_is_a_data_set() -> None:
    for name, task in TASKS.items():
        options = {"vocabulary": 32, "noise_vocabulary": 16, "noise": 0.2} if name == "noisy_recall" else {}
        first, again, other = (task(30, **options, seed=[seed, 0]).tokens for seed in (3, 3, 4))
        assert (first == again).all()
        assert (first != other).any()


@pytest.mark.parametrize(
    ("task", "options", "message"),
    [
        ("in_context_recall", {"length": 15}, "length 15: an even number"),
        ("noisy_recall", {"noise": 0.2}, "set noise_vocabulary"),
        ("fuzzy_recall", {"vocabulary": 5}, "2 with vocabulary 5"),
        ("fuzzy_recall", {"length": 18}, "more than 18"),
        ("fuzzy_recall", {"vocabulary": 514, "motif": 8}, "keys exceed 64 bits"),
        ("selective_copying", {"length": 33}, "more than 2 x copied"),
        ("selective_copying", {"vocabulary": 2}, "vocabulary: 2 ids; at least 3 are required"),
        ("memorization", {"vocabulary": 2}, "at least 3"),
        ("compression", {"vocabulary": 1}, "at least 2"),
        (
            "noisy_recall",
            {"noise": 0.5, "noise_vocabulary": 15},
            "1 ids besides the noise_vocabulary of 15; at least 2",
        ),
    ],
)
def test_invalid_settings_are_refused(task: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TASKS[task](1, **options)
