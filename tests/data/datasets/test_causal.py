"""Packed samples: GPT-NeoX's order against a naive walk, and validation that covers every token once."""

import errno
import itertools
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from data.atomic_io import temporary_path
from data.cache import cached_arrays
from data.datasets.causal import CausalDataset, SequentialDataset
from data.datasets.masked import MaskedDataset
from data.datasets.masking import IGNORED_LABEL, masking_for
from data.datasets.sample_index import build_reshuffled_index, build_sample_index, epochs_needed
from data.indexed import IndexedTokens, IndexedWriter, bin_path
from data.tokenizer import load_tokenizer

SIZES = st.lists(st.integers(0, 12), min_size=1, max_size=12).filter(any)


def write(prefix: Path, sizes: list[int]) -> Path:
    """Write a token file in which token p of the stream has the value p, so that a sample shows its origin."""
    with IndexedWriter(prefix, np.dtype("<i4")) as writer:
        start = 0
        for size in sizes:
            writer.add_document(np.arange(start, start + size))
            start += size
    return prefix


def naive_starts(sizes: list[int], order: list[int], length: int, samples: int) -> list[tuple[int, int]]:
    """Return the sample starts, found token by token."""
    stream = [(entry, offset) for entry, document in enumerate(order) for offset in range(sizes[document])]
    return [stream[sample * length] for sample in range(samples + 1)]


@given(sizes=SIZES, length=st.integers(1, 15), samples=st.integers(1, 60), seed=st.integers(0, 2**32 - 1))
def test_the_sample_index_equals_a_walk_along_the_documents(sizes, length, samples, seed):
    tokens = sum(sizes)
    epochs = epochs_needed(samples, tokens, length)
    assert (epochs * tokens - 1) // length >= samples
    assert epochs == 1 or ((epochs - 1) * tokens - 1) // length < samples

    index = build_sample_index(np.array(sizes, np.int32), length, epochs, seed)
    order = index.document_index.tolist()
    assert sorted(order) == sorted(list(range(len(sizes))) * epochs)
    count = (epochs * tokens - 1) // length
    assert sorted(index.shuffle_index.tolist()) == list(range(count))
    assert [tuple(row) for row in index.sample_index.tolist()] == naive_starts(sizes, order, length, count)


@given(sizes=SIZES, length=st.integers(1, 15), samples=st.integers(1, 40), seed=st.integers(0, 1000))
def test_samples_are_windows_of_the_shuffled_stream(tmp_path_factory, sizes, length, samples, seed):
    dataset = CausalDataset(
        write(tmp_path_factory.mktemp("c") / "x", sizes), sequence_length=length, num_samples=samples, seed=seed
    )
    assert len(dataset) >= samples
    starts = np.concatenate([[0], np.cumsum(sizes)])
    stream = [t for d in dataset.index.document_index for t in range(starts[d], starts[d + 1])]
    for number in range(len(dataset)):
        sample, place = dataset[number], int(dataset.index.shuffle_index[number]) * length
        assert sample["tokens"].tolist() == stream[place : place + length]
        assert sample["labels"].tolist() == stream[place + 1 : place + length + 1]
        assert sample["loss_weight"].tolist() == [1.0] * length
        parts = [starts[d] + np.arange(first, first + count) for d, first, count in dataset.spans_of_sample(number)]
        assert np.concatenate(parts).tolist() == stream[place : place + length + 1]


def test_the_order_is_the_one_of_numpy_random_state():
    """Document shuffle first, sample shuffle second, both from one RandomState: numbers kept from numpy's generator,
    whose stream is frozen."""
    index = build_sample_index(np.array([4, 3, 5], np.int32), 4, epochs=2, seed=1234)
    assert index.document_index.tolist() == DOCUMENTS
    assert index.sample_index.tolist() == STARTS
    assert index.shuffle_index.tolist() == SHUFFLED
    random = np.random.RandomState(1234)
    documents = np.array([0, 1, 2, 0, 1, 2])
    random.shuffle(documents)
    samples = np.arange(5)
    random.shuffle(samples)
    assert (documents.tolist(), samples.tolist()) == (DOCUMENTS, SHUFFLED)


DOCUMENTS = [2, 1, 2, 0, 1, 0]
STARTS = [[0, 0], [0, 4], [2, 0], [2, 4], [3, 3], [5, 0]]
SHUFFLED = [2, 0, 4, 3, 1]


def test_the_reshuffled_order_is_that_of_seed_and_epoch():
    """Documents first, samples second, both from one generator an epoch; a run that goes on reads on in it."""
    index = build_reshuffled_index(np.array([4, 3, 5], np.int32), 2, epochs=3, seed=7)
    documents, rows = [], []
    for epoch in range(3):
        random = np.random.Generator(np.random.PCG64([7, epoch]))
        documents += random.permutation(3).tolist()
        rows += (random.permutation(5) + 6 * epoch).tolist()
    assert index.document_index.tolist() == documents
    assert index.shuffle_index.tolist() == rows


@given(sizes=SIZES, length=st.integers(1, 15))
def test_validation_predicts_every_token_exactly_once(tmp_path_factory, sizes, length):
    end = 999
    dataset = SequentialDataset(
        write(tmp_path_factory.mktemp("s") / "x", sizes), sequence_length=length, first_token=end
    )
    samples = [dataset[number] for number in range(len(dataset))]
    tokens = np.concatenate([sample["tokens"].numpy() for sample in samples])
    labels = np.concatenate([sample["labels"].numpy() for sample in samples])
    weight = np.concatenate([sample["loss_weight"].numpy() for sample in samples])
    total = sum(sizes)
    assert labels[weight == 1].tolist() == list(range(total))
    assert tokens[weight == 1].tolist() == [end, *range(total - 1)]
    assert set(labels[weight == 0]) <= {end}
    assert len(labels) - total < length


def test_selected_sequences_equal_a_file_with_only_these(tmp_path):
    prefix = write(tmp_path / "x", [5, 3, 0, 9, 4])
    with IndexedWriter(tmp_path / "y", np.dtype("<i4")) as writer:
        for number in (1, 2, 4):
            writer.add_document(IndexedTokens(prefix)[number])
    settings = {"sequence_length": 4, "first_token": 99, "reset_at_documents": True}
    some = SequentialDataset(prefix, sequences=np.array([1, 2, 4]), **settings)
    alone = SequentialDataset(tmp_path / "y", **settings)
    assert (some.num_tokens, len(some), some.segments) == (alone.num_tokens, len(alone), alone.segments)
    for number in range(len(alone)):
        assert all(value.equal(alone[number][key]) for key, value in some[number].items())


def test_validation_is_the_same_every_time(tmp_path):
    prefix = write(tmp_path / "x", [5, 9, 1])
    first, second = (SequentialDataset(prefix, sequence_length=4, first_token=0) for _ in range(2))
    assert all(first[i]["labels"].equal(second[i]["labels"]) for i in range(len(first)))


def test_the_index_is_cached_under_everything_that_made_it(tmp_path):
    prefix = write(tmp_path / "x", [50, 30, 20])
    cache = tmp_path / "cache"
    base = {"sequence_length": 7, "num_samples": 20, "seed": 1}

    def folders(**changes: object) -> set[str]:
        dataset = CausalDataset(prefix, **{**base, **changes}, cache_directory=cache)
        direct = CausalDataset(prefix, **{**base, **changes})
        assert [dataset[i]["tokens"].tolist() for i in range(len(dataset))] == [
            direct[i]["tokens"].tolist() for i in range(len(direct))
        ]
        return {path.name for path in cache.iterdir()}

    first = folders()
    assert len(first) == 1
    assert folders() == first
    assert folders(num_samples=21) == first, "the same number of epochs is the same order"
    seen = first
    for change in ({"seed": 2}, {"sequence_length": 8}, {"num_samples": 40}, {"order": "reshuffle"}):
        now = folders(**change)
        assert len(now - seen) == 1, change
        seen = now
    write(prefix, [20, 30, 50])  # as many tokens and bytes
    assert len(folders() - seen) == 1
    assert not [name for name in seen if name.endswith("aside")]


def test_cache_written_by_another_process_meanwhile_is_used(tmp_path, monkeypatch):
    prefix = write(tmp_path / "x", [50, 30])
    cache = tmp_path / "cache"
    settings = {"sequence_length": 7, "num_samples": 5, "seed": 1, "cache_directory": cache}
    CausalDataset(prefix, **settings)
    (folder,) = cache.iterdir()
    moment = iter([False])  # the folder is not there yet when it is looked for first
    real = Path.is_dir
    monkeypatch.setattr(Path, "is_dir", lambda path: next(moment, real(path)) if path == folder else real(path))
    dataset = CausalDataset(prefix, **settings)
    assert dataset[0]["tokens"].shape == (7,)
    assert [path.name for path in cache.iterdir()] == [folder.name]


def test_cache_that_cannot_be_written_is_named_and_removed(tmp_path):
    def full() -> dict[str, np.ndarray]:
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        cached_arrays(tmp_path, "x", {}, full)
    assert list(tmp_path.iterdir()) == []
    kept = cached_arrays(tmp_path, "x", {}, lambda: {"a": np.arange(3)})
    (folder,) = tmp_path.iterdir()
    left = temporary_path(folder)  # by a process of that number that was killed
    folder.rename(left)
    again = cached_arrays(tmp_path, "x", {}, lambda: {"b": np.arange(4)})
    assert (list(kept), {name: array.tolist() for name, array in again.items()}) == (["a"], {"b": [0, 1, 2, 3]})
    assert list(tmp_path.iterdir()) == [folder]


def test_more_than_two_to_the_31_tokens(tmp_path, monkeypatch):
    """Use a sparse file: three sequences of 2^30 zeros and a short one after them."""

    def skip(writer: IndexedWriter, tokens: np.ndarray) -> None:
        writer._file.truncate(writer._file.seek(len(tokens), os.SEEK_CUR))

    prefix, sizes, length = tmp_path / "x", [2**30] * 3 + [8], 2**20
    monkeypatch.setattr(IndexedWriter, "_write", skip)
    with IndexedWriter(prefix, np.dtype("u1")) as writer:
        for size in sizes:
            writer.add_document(np.broadcast_to(np.uint8(0), size))
    with open(bin_path(prefix), "r+b") as file:
        file.seek(3 * 2**30)
        file.write(bytes(range(1, 9)))
    tokens = IndexedTokens(prefix)
    assert (tokens.num_tokens, tokens[3].tolist()) == (sum(sizes), list(range(1, 9)))
    assert tokens.is_contiguous
    training = CausalDataset(prefix, sequence_length=length, num_samples=4000, seed=0)
    assert training.epochs == 2
    ends = [0, *itertools.accumulate(sizes[document] for document in training.index.document_index.tolist())]
    places = [ends[entry] + offset for entry, offset in training.index.sample_index.tolist()]
    assert places == list(range(0, 2 * sum(sizes), length))
    validation = SequentialDataset(prefix, sequence_length=length, first_token=0)
    tokenizer = load_tokenizer("bytes")
    masked = MaskedDataset(
        prefix,
        masking_for(tokenizer, 0.3),
        tokenizer,
        sequence_length=length,
        num_samples=None,
        seed=0,
        layout="packed",
    )
    assert (len(validation), len(masked), masked.num_tokens) == (3073, 3073, sum(sizes))
    assert validation[3072]["labels"][:8].tolist() == list(range(1, 9))
    last = masked[3072]
    found = torch.where(last["labels"] == IGNORED_LABEL, last["tokens"], last["labels"])
    assert found[:9].tolist() == [*range(1, 9), tokenizer.end_of_document_id]


@pytest.mark.parametrize("order", ["neox", "reshuffle"])
def test_more_than_two_to_the_16_samples(tmp_path, order):
    dataset = CausalDataset(write(tmp_path / "x", [70_001]), sequence_length=1, num_samples=70_000, seed=0, order=order)
    assert sorted(dataset.index.shuffle_index.tolist()) == list(range(70_000))


def test_a_file_shorter_than_a_sample_is_repeated(tmp_path):
    dataset = CausalDataset(write(tmp_path / "x", [3]), sequence_length=8, num_samples=2, seed=0)
    assert dataset.epochs == 6
    assert dataset[0]["tokens"].shape == (8,)


@pytest.mark.parametrize("number", [-1, 1000])
def test_sample_out_of_range_raises_index_error(tmp_path, number):
    prefix = write(tmp_path / "x", [30])
    for dataset in (
        CausalDataset(prefix, sequence_length=3, num_samples=3, seed=0),
        SequentialDataset(prefix, sequence_length=3, first_token=0),
    ):
        with pytest.raises(IndexError, match=f"sample {number} of"):
            dataset[number]


@pytest.mark.parametrize("order", ["neox", "reshuffle"])
@pytest.mark.parametrize("samples", [10**14, 10**20, 10**40])
def test_index_larger_than_memory_is_refused(tmp_path, samples, order):
    prefix = write(tmp_path / "x", [30])
    with pytest.raises(
        ValueError,
        match=r"schedule.train_steps asks for 1[0,]* samples, .* epochs of .*: their index takes .* GiB, .*; set fewer steps",
    ):
        CausalDataset(prefix, sequence_length=10, num_samples=samples, seed=0, order=order)


def test_settings_below_one(tmp_path):
    prefix = write(tmp_path / "x", [30])
    with pytest.raises(ValueError, match="sequence_length 0 and num_samples 3 must be 1 or more"):
        CausalDataset(prefix, sequence_length=0, num_samples=3, seed=0)
    with pytest.raises(ValueError, match="sequence_length 0"):
        SequentialDataset(prefix, sequence_length=0, first_token=0)
