"""What packed samples say about their documents, and the order that reshuffles every epoch."""

import itertools
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from data.corpus.document_sources import SourceTable, read_sources, write_sources
from data.datasets.blend import Shares, training_dataset
from data.datasets.causal import CausalDataset, Packing, SequentialDataset, TokenSpan
from data.indexed import IndexedWriter
from data.loader import batches
from data.manifest import write_manifest

SIZES = st.lists(st.integers(0, 12), min_size=1, max_size=12).filter(any)
EVERYTHING = Packing(reset_at_documents=True, mask_boundaries=True, sources=True)


def write(prefix: Path, sizes: list[int], sources: list[str] | None = None) -> Path:
    """Every token of document d is d + 1, so that a sample shows its documents."""
    table = SourceTable()
    with IndexedWriter(prefix, np.dtype("<i4")) as writer:
        for number, size in enumerate(sizes):
            writer.add_document(np.full(size, number + 1))
            table.add(sources[number] if sources else None)
    if sources:
        write_sources(prefix, table.ids)
        write_manifest(prefix, {"sources": table.names})
    return prefix


def bounds_of(stream: np.ndarray, document_ids: np.ndarray) -> list[int]:
    """0, where another document begins, and the length."""
    return [0, *(np.flatnonzero(np.diff(document_ids)) + 1).tolist(), len(stream)]


def _inputs(parts: list[TokenSpan]) -> list[TokenSpan]:
    """Without the last token of a sample, which is a label alone."""
    return parts if parts[-1][2] > 1 else parts[:-1]


@given(sizes=SIZES, length=st.integers(1, 15), samples=st.integers(1, 40), order=st.sampled_from(["neox", "reshuffle"]))
def test_bounds_are_where_documents_begin(tmp_path_factory, sizes, length, samples, order):
    if order == "reshuffle" and sum(sizes) <= length:
        return
    prefix = write(tmp_path_factory.mktemp("p") / "x", sizes)
    plain = CausalDataset(prefix, sequence_length=length, num_samples=samples, seed=3, order=order)
    packed = CausalDataset(prefix, sequence_length=length, num_samples=samples, seed=3, order=order, packing=EVERYTHING)
    assert len({len(packed[n]["cu_seqlens"]) for n in range(len(packed))}) == 1, "one shape"
    held = max(len(_inputs(packed.spans_of_sample(n))) for n in range(len(packed)))
    assert held <= packed.segments <= held + sizes.count(0) * packed.epochs, "and no longer than needed"
    for number in range(len(packed)):
        sample = packed[number]
        assert sample["tokens"].equal(plain[number]["tokens"])
        assert sample["labels"].equal(plain[number]["labels"])
        # A document that comes twice in a row has a bound inside, which its tokens do not show: take the parts.
        ids = np.repeat(
            np.arange(len(packed.spans_of_sample(number))), [part[2] for part in packed.spans_of_sample(number)]
        )
        shown = sample["cu_seqlens"].tolist()
        expected = bounds_of(ids[:-1], ids[:-1])
        assert shown == expected + [length] * (len(shown) - len(expected))
        new = [label for label in range(length) if ids[label + 1] != ids[label]]
        begins = [n for n in new if packed.spans_of_sample(number)[ids[n + 1]][1] == 0]
        assert np.flatnonzero(sample["loss_weight"] == 0).tolist() == begins == new


@given(sizes=SIZES, length=st.integers(1, 15))
def test_validation_resets_where_documents_begin_and_counts_every_token(tmp_path_factory, sizes, length):
    prefix = write(tmp_path_factory.mktemp("v") / "x", sizes)
    dataset = SequentialDataset(prefix, sequence_length=length, first_token=99, reset_at_documents=True)
    seen = []
    for number in range(len(dataset)):
        sample = dataset[number]
        tokens, bounds = sample["tokens"].numpy(), sample["cu_seqlens"].tolist()
        assert (bounds[0], bounds[-1], len(bounds)) == (0, length, dataset.segments + 1)
        assert bounds == sorted(bounds)
        expected = bounds_of(tokens, tokens)
        assert bounds == expected + [length] * (len(bounds) - len(expected))
        seen += sample["labels"][sample["loss_weight"] == 1].tolist()
    assert seen == [d + 1 for d, size in enumerate(sizes) for _ in range(size)]


def test_samples_of_a_micro_batch_become_one_row(tmp_path):
    prefix = write(tmp_path / "x", [3, 9, 1, 4, 4, 30])
    dataset = CausalDataset(prefix, sequence_length=6, num_samples=6, seed=0, packing=EVERYTHING)
    (step, *_) = batches(dataset, global_batch_size=6, micro_batch_size=3)
    assert len(step) == 2
    for index, batch in enumerate(step):
        samples = [dataset[3 * index + n] for n in range(3)]
        for key in ("tokens", "labels", "loss_weight", "source"):
            assert batch[key].equal(torch.cat([sample[key] for sample in samples])[None])
        whole = sorted({6 * n + int(b) for n, sample in enumerate(samples) for b in sample["cu_seqlens"]})
        assert sorted(set(batch["cu_seqlens"].tolist())) == whole
        assert batch["cu_seqlens"].tolist() == sorted(batch["cu_seqlens"].tolist())
        assert len(batch["cu_seqlens"]) == 3 * dataset.segments + 1
        assert batch["cu_seqlens"].dtype == torch.int32


@given(sizes=SIZES, length=st.integers(1, 10), samples=st.integers(1, 60), more=st.integers(0, 60))
def test_reshuffled_epochs(tmp_path_factory, sizes, length, samples, more):
    """Every epoch has each of its tokens at most once, epochs differ, and a longer run begins like a shorter one."""
    if sum(sizes) <= length:
        return
    with IndexedWriter(prefix := tmp_path_factory.mktemp("r") / "x", np.dtype("<i4")) as writer:
        starts = np.cumsum([0, *sizes])
        for start, end in itertools.pairwise(starts):
            writer.add_document(np.arange(start, end))
    short, long = (
        CausalDataset(prefix, sequence_length=length, num_samples=n, seed=5, order="reshuffle")
        for n in (samples, samples + more)
    )
    per_epoch = (sum(sizes) - 1) // length
    assert len(short) % per_epoch == 0
    assert len(short) >= samples
    taken = [short[n]["labels"].tolist() for n in range(len(short))]
    assert taken == [long[n]["labels"].tolist() for n in range(len(short))]
    for epoch in range(len(short) // per_epoch):
        labels = list(itertools.chain(*taken[epoch * per_epoch : (epoch + 1) * per_epoch]))
        assert len(labels) == len(set(labels))


def test_epochs_differ_and_a_seed_repeats_them(tmp_path):
    prefix = write(tmp_path / "x", [10] * 30)
    make = lambda seed: CausalDataset(prefix, sequence_length=10, num_samples=58, seed=seed, order="reshuffle")  # noqa: E731
    first = [make(1)[n]["tokens"].tolist() for n in range(58)]
    assert first == [make(1)[n]["tokens"].tolist() for n in range(58)]
    assert first[:29] != first[29:]
    assert first != [make(2)[n]["tokens"].tolist() for n in range(58)]


def test_unknown_orders_are_refused(tmp_path):
    prefix = write(tmp_path / "x", [5])
    with pytest.raises(ValueError, match=r"5 tokens are fewer than one sample of 5 \+ 1, .* data\.order=neox"):
        CausalDataset(prefix, sequence_length=5, num_samples=1, seed=0, order="reshuffle")
    with pytest.raises(ValueError, match="order 'random' of the samples is unknown; allowed: neox, reshuffle"):
        CausalDataset(prefix, sequence_length=5, num_samples=1, seed=0, order="random")


def test_each_label_has_its_source(tmp_path):
    sources = ["Github", "ArXiv", "Github", "Books"]
    prefix = write(tmp_path / "x", [7, 5, 4, 9], sources)
    dataset = CausalDataset(prefix, sequence_length=6, num_samples=8, seed=1, packing=Packing(sources=True))
    assert dataset.sources == ["Github", "ArXiv", "Books"]
    for number in range(len(dataset)):
        sample = dataset[number]
        assert [dataset.sources[s] for s in sample["source"]] == [sources[int(label) - 1] for label in sample["labels"]]


def test_sources_of_a_blend_share_their_numbers(tmp_path):
    named = write(tmp_path / "a", [20, 20], ["ArXiv", "Github"])
    other = write(tmp_path / "b", [20, 2, 20], ["Github", "Books", "Books"])
    plain = write(tmp_path / "web_text_document", [40])
    blend = training_dataset(
        [named, other, plain], Shares(), sequence_length=5, num_samples=30, seed=0, packing=Packing(True, False, True)
    )
    assert blend.sources == ["ArXiv", "Github", "Books", "web"]
    owners = [["ArXiv", "Github"], ["Github", "Books", "Books"], ["web"]]
    shapes = set()
    for number in range(30):
        sample = blend[number]
        shapes.add(sample["cu_seqlens"].shape)
        part = int(blend.source[number])
        assert [blend.sources[s] for s in sample["source"]] == [owners[part][int(t) - 1] for t in sample["labels"]]
    assert len(shapes) == 1, "batches of several files are of one shape"


def test_sources_of_other_files_are_refused(tmp_path):
    prefix = write(tmp_path / "x", [3, 3], ["a", "b"])
    write_sources(prefix, np.zeros(5, np.int16))
    with pytest.raises(ValueError, match=r"numbers 5 documents .* has 2 .*do not belong together"):
        read_sources(prefix, 2)
    (tmp_path / "x.sources.npy").unlink()
    with pytest.raises(ValueError, match=r"x\.sources\.npy does not exist"):
        read_sources(prefix, 2)


def test_a_source_key_that_differs_from_document_to_document_is_named():
    table = SourceTable()
    for number in range(2**15):
        table.add(f"https://example.org/{number}")
    with pytest.raises(ValueError, match=r"more than 32,768 sources, such as 'one more': .*data\.source_key"):
        table.add("one more")
    assert len(table.ids) == 2**15


def test_source_names_are_kept_if_one_source_is_known(tmp_path):
    table = SourceTable()
    table.add(None)
    assert table.names == []
    table.add("Github")
    assert table.names == ["other", "Github"]
    prefix = write(tmp_path / "x", [3, 2], ["a", "b"])
    for wrong in (-1, 2):
        write_sources(prefix, np.array([0, wrong], np.int16))
        with pytest.raises(ValueError, match=f"numbers 2 documents from {min(wrong, 0)} to {max(wrong, 0)}"):
            read_sources(prefix, 2)
