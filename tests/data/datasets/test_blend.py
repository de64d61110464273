"""Blends: GPT-NeoX's rule against a plain loop, and shares that hold at every point."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from data.datasets.blend import BlendedDataset, Shares, blend_order, normalized, running_counts, training_dataset
from data.datasets.causal import CausalDataset, Packing
from data.datasets.sample_index import epochs_needed
from data.indexed import IndexedWriter
from data.loader import batches

WEIGHTS = st.lists(st.floats(0.01, 100), min_size=1, max_size=6)


def write(prefix: Path, size: int, value: int) -> Path:
    with IndexedWriter(prefix, np.dtype("<u2")) as writer:
        writer.add_document(np.full(size, value))
    return prefix


def by_weights(*weights: float) -> Shares:
    return Shares("weights", weights)


@given(WEIGHTS, st.integers(1, 300))
def test_the_rule(weights, count):
    shares = normalized(weights)
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
    shares = normalized(weights)
    source = blend_order(shares, 400)
    for point in (10, 100, 400):
        counts = np.bincount(source[:point], minlength=len(shares))
        assert np.abs(counts - np.array(shares) * point).max() <= len(shares)


def test_samples_come_from_their_files(tmp_path):
    prefixes = [write(tmp_path / "a", 100, 1), write(tmp_path / "b", 300, 2)]
    settings = {"sequence_length": 5, "num_samples": 40, "seed": 3}
    dataset = training_dataset(prefixes, by_weights(3, 1), **settings)
    assert isinstance(dataset, BlendedDataset)
    assert len(dataset) == 40
    values = [int(dataset[i]["tokens"][0]) - 1 for i in range(40)]
    assert values == dataset.source.tolist()
    assert np.bincount(values).tolist() == [30, 10]
    by_tokens = training_dataset(prefixes, **settings)
    assert np.bincount(by_tokens.source).tolist() == [10, 30]


def test_files_hold_half_a_percent_more_than_their_share(tmp_path):
    """GPT-NeoX's margin, which decides how many epochs one stream is of: 19 samples are one, 19 x 1.005 begin another."""
    prefixes = [write(tmp_path / name, 100, 1) for name in ("a", "b")]
    dataset = training_dataset(prefixes, by_weights(1, 1), sequence_length=5, num_samples=38, seed=3)
    assert [part.epochs for part in dataset.datasets] == [2, 2]


def test_one_file_needs_no_blend(tmp_path):
    dataset = training_dataset(write(tmp_path / "a", 100, 1), sequence_length=5, num_samples=4, seed=3)
    assert isinstance(dataset, CausalDataset)


@pytest.mark.parametrize(("order", "epochs"), [("neox", 2), ("reshuffle", 1)])
def test_one_file_has_the_margin_in_the_order_of_neox_only(tmp_path, order, epochs):
    """Read epochs of 19 samples. A file has 18.09 of 36; without its share it would begin another epoch."""
    prefixes = [write(tmp_path / name, 100, 1) for name in ("a", "b")]
    settings = {"sequence_length": 5, "seed": 3, "order": order}
    assert training_dataset(prefixes[0], num_samples=19, **settings).epochs == epochs
    parts = training_dataset(prefixes, by_weights(1, 1), num_samples=36, **settings).datasets
    assert [part.epochs for part in parts] == [1, 1]


def test_the_blend_is_cached_and_the_same(tmp_path):
    prefixes = [write(tmp_path / "a", 100, 1), write(tmp_path / "b", 300, 2)]
    settings = {"sequence_length": 5, "num_samples": 40, "seed": 3}
    direct = training_dataset(prefixes, by_weights(3, 1), **settings)
    for _ in range(2):
        cached = training_dataset(prefixes, by_weights(3, 1), **settings, cache_directory=tmp_path / "cache")
        assert cached.source.tolist() == direct.source.tolist()
        assert cached.number.tolist() == direct.number.tolist()
    training_dataset(prefixes, by_weights(2, 1), **settings, cache_directory=tmp_path / "cache")
    longer = {**settings, "num_samples": 60}
    assert len(training_dataset(prefixes, by_weights(3, 1), **longer, cache_directory=tmp_path / "cache")) == 60
    assert len(list((tmp_path / "cache").glob("blend-*"))) == 3


@pytest.mark.parametrize("weights", [[1, 0], [1, -2], [1, float("nan")], [1, float("inf")]])
def test_weights_must_be_positive(tmp_path, weights):
    prefixes = [write(tmp_path / "a", 10, 1), write(tmp_path / "b", 10, 2)]
    with pytest.raises(ValueError, match=r"weight 2 of the token files is .*: it must be above 0"):
        training_dataset(prefixes, by_weights(*weights), sequence_length=5, num_samples=4, seed=3)


def test_as_many_weights_as_files(tmp_path):
    with pytest.raises(ValueError, match="2 weights for 1 token files"):
        training_dataset([tmp_path / "a"], by_weights(1, 2), sequence_length=5, num_samples=4, seed=3)
    with pytest.raises(ValueError, match="at least one prefix"):
        training_dataset([], sequence_length=5, num_samples=4, seed=3)


def test_shares_by_tokens_documents_and_temperature(tmp_path):
    with IndexedWriter(tmp_path / "a", np.dtype("<u2")) as writer:
        for _ in range(3):
            writer.add_document(np.zeros(30))
    prefixes = [tmp_path / "a", write(tmp_path / "b", 10, 2)]
    assert Shares().of(prefixes) == [0.9, 0.1]
    assert Shares("documents").of(prefixes) == [0.75, 0.25]
    assert Shares("tokens", temperature=2).of(prefixes) == pytest.approx([0.75, 0.25])  # 3 : 1, the roots of 9 : 1
    assert Shares("weights", (1, 9), temperature=2).of(prefixes) == pytest.approx([0.25, 0.75])
    assert Shares(temperature=1e9).of(prefixes) == pytest.approx([0.5, 0.5])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"by": "bytes"}, "a blend by 'bytes' is unknown; allowed: tokens, documents, weights"),
        ({"by": "weights"}, "weights and by='weights' require each other"),
        ({"weights": (1,)}, "weights and by='weights' require each other"),
        ({"temperature": 0}, "temperature 0 of a blend must be above 0"),
    ],
)
def test_settings_of_a_blend(settings, message):
    with pytest.raises(ValueError, match=message):
        Shares(**settings)


def test_repeated_file_wraps_as_in_gpt_neox(tmp_path):
    """One sample short of its length: after sample 3 of 4 come 4 % 3 = 1 and 5 % 3 = 2."""
    with IndexedWriter(tmp_path / "a", np.dtype("<u2")) as writer:
        writer.add_document(np.arange(41))
    part = CausalDataset(tmp_path / "a", sequence_length=10, num_samples=3, seed=0)
    assert len(part) == 4
    blend = BlendedDataset([part, part], [0.5, 0.5], num_samples=12)
    taken = [blend[i]["tokens"].tolist() for i in range(0, 12, 2)]
    assert taken == [part[n]["tokens"].tolist() for n in (0, 1, 2, 3, 1, 2)]


def test_batches_of_a_blend_hold_the_documents_of_the_file_with_most(tmp_path):
    with IndexedWriter(tmp_path / "short", np.dtype("<u2")) as writer:
        for _ in range(20):
            writer.add_document(np.array([2, 2]))
    prefixes = [write(tmp_path / "long", 40, 1), tmp_path / "short"]
    settings = {"sequence_length": 10, "num_samples": 8, "seed": 0, "packing": Packing(reset_at_documents=True)}
    samples = training_dataset(prefixes, by_weights(1, 1), **settings)
    (batch,) = next(iter(batches(samples, global_batch_size=2, micro_batch_size=2)))
    # The first sample has one document, and the second one has five.
    assert sorted({*batch["cu_seqlens"].tolist()}) == [0, 10, 12, 14, 16, 18, 20]


def test_one_file_in_the_order_neox_has_the_margin_of_gpt_neox(tmp_path):
    prefix = write(tmp_path / "x", 101, 1)
    settings = {"sequence_length": 10, "num_samples": 1000, "seed": 0}
    samples = training_dataset(prefix, **settings)
    assert samples.epochs == epochs_needed(1005, 101, 10)
    assert len(samples) >= 1005
    # The order reshuffle does not depend on the number of samples.
    assert training_dataset(prefix, order="reshuffle", **settings).epochs == 100
