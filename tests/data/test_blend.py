"""Blends: GPT-NeoX's rule against a plain loop, and shares that hold at every point."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from data.blend import BlendedDataset, blend_order, normalised, running_counts, training_dataset
from data.causal import CausalDataset
from data.indexed import IndexedWriter

WEIGHTS = st.lists(st.floats(0.01, 100), min_size=1, max_size=6)


def write(prefix: Path, size: int, value: int) -> Path:
    with IndexedWriter(prefix, np.dtype("<u2")) as writer:
        writer.add_document(np.full(size, value))
    return prefix


@given(WEIGHTS, st.integers(1, 300))
def test_the_rule(weights, count):
    shares = normalised(weights)
    taken = [0] * len(shares)
    expected = []
    for step in range(count):
        behind = [share * max(step, 1) - n for share, n in zip(shares, taken, strict=True)]
        chosen = behind.index(max(behind))
        expected.append((chosen, taken[chosen]))
        taken[chosen] += 1
    source = blend_order(shares, count)
    assert list(zip(source.tolist(), running_counts(source, len(shares)).tolist(), strict=True)) == expected


def test_equal_weights_take_turns():
    assert blend_order([0.5, 0.5], 6).tolist() == [0, 1, 0, 1, 0, 1]
    assert blend_order([0.25, 0.75], 8).tolist() == [1, 0, 1, 1, 0, 1, 1, 1]


@given(WEIGHTS)
def test_shares_hold_at_every_point(weights):
    shares = normalised(weights)
    source = blend_order(shares, 400)
    for point in (10, 100, 400):
        counts = np.bincount(source[:point], minlength=len(shares))
        assert np.abs(counts - np.array(shares) * point).max() <= len(shares)


def test_samples_come_from_their_files(tmp_path):
    prefixes = [write(tmp_path / "a", 100, 1), write(tmp_path / "b", 300, 2)]
    settings = {"sequence_length": 5, "num_samples": 40, "seed": 3}
    dataset = training_dataset(prefixes, [3, 1], **settings)
    assert isinstance(dataset, BlendedDataset)
    assert len(dataset) == 40
    values = [int(dataset[i]["tokens"][0]) - 1 for i in range(40)]
    assert values == dataset.source.tolist()
    assert np.bincount(values).tolist() == [30, 10]
    by_tokens = training_dataset(prefixes, **settings)
    assert np.bincount(by_tokens.source).tolist() == [10, 30]


def test_one_file_needs_no_blend(tmp_path):
    dataset = training_dataset(write(tmp_path / "a", 100, 1), sequence_length=5, num_samples=4, seed=3)
    assert isinstance(dataset, CausalDataset)


def test_the_blend_is_cached_and_the_same(tmp_path):
    prefixes = [write(tmp_path / "a", 100, 1), write(tmp_path / "b", 300, 2)]
    settings = {"sequence_length": 5, "num_samples": 40, "seed": 3}
    direct = training_dataset(prefixes, [3, 1], **settings)
    for _ in range(2):
        cached = training_dataset(prefixes, [3, 1], **settings, cache_directory=tmp_path / "cache")
        assert cached.source.tolist() == direct.source.tolist()
        assert cached.number.tolist() == direct.number.tolist()
    training_dataset(prefixes, [2, 1], **settings, cache_directory=tmp_path / "cache")
    assert len(list((tmp_path / "cache").glob("blend-*"))) == 2


@pytest.mark.parametrize("weights", [[1, 0], [1, -2], [1, float("nan")], [1, float("inf")]])
def test_weights_must_be_positive(tmp_path, weights):
    prefixes = [write(tmp_path / "a", 10, 1), write(tmp_path / "b", 10, 2)]
    with pytest.raises(ValueError, match=r"weight 2 of the token files is .*: it must be above 0"):
        training_dataset(prefixes, weights, sequence_length=5, num_samples=4, seed=3)


def test_as_many_weights_as_files(tmp_path):
    with pytest.raises(ValueError, match="2 weights for 1 token files"):
        training_dataset([tmp_path / "a"], [1, 2], sequence_length=5, num_samples=4, seed=3)
    with pytest.raises(ValueError, match="at least one prefix"):
        training_dataset([], sequence_length=5, num_samples=4, seed=3)
