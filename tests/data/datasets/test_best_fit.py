"""Best-fit packing: whole documents in samples, every token once, in an order that only seed and epoch determine."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from data.checksum import DamagedDataError
from data.datasets.best_fit import best_fit, build_best_fit_index
from data.datasets.blend import BlendedDataset, Shares, training_dataset
from data.datasets.causal import CausalDataset, Packing
from tests.data.datasets.test_causal import write

SIZES = st.lists(st.integers(0, 30), min_size=1, max_size=25).filter(any)
SEPARATE = Packing(reset_at_documents=True, mask_boundaries=True, sources=True, method="best_fit")


def packed(prefix: Path, samples: int, packing: Packing = SEPARATE, **more) -> CausalDataset:
    settings = {"sequence_length": 9, "num_samples": samples, "seed": 3, "order": "reshuffle", **more}
    return CausalDataset(prefix, packing=packing, **settings)


@given(lengths=st.lists(st.integers(1, 12), min_size=1, max_size=60))
def test_bins_equal_those_of_one_piece_at_a_time(lengths):
    lengths.sort(reverse=True)
    free: list[int] = []
    for length in lengths:
        fitting = [space for space in free if space >= length]
        if fitting:
            free[free.index(min(fitting))] -= length
        else:
            free.append(12 - length)
    bins, count = best_fit(np.array(lengths), 12)
    used = np.bincount(bins, lengths, minlength=count)
    assert sorted(12 - used) == sorted(free)


@given(sizes=SIZES, length=st.integers(1, 15), samples=st.integers(1, 40))
def test_every_token_is_packed_once_and_predicted_once(tmp_path_factory, sizes, length, samples):
    """Token p of the file has the value p. Pieces of a cut document overlap by one token, which is a label once."""
    dataset = packed(write(tmp_path_factory.mktemp("b") / "x", sizes), samples, sequence_length=length)
    starts = np.cumsum([0, *sizes])
    per_epoch = len(dataset) // dataset.epochs
    assert len(dataset) >= samples > len(dataset) - per_epoch
    for epoch in range(dataset.epochs):
        labels: list[int] = []
        read: list[int] = []
        for number in range(epoch * per_epoch, (epoch + 1) * per_epoch):
            sample, spans = dataset[number], dataset.spans_of_sample(number)
            kept = sample["loss_weight"].numpy() == 1
            labels += sample["labels"].numpy()[kept].tolist()
            assert (sample["tokens"].numpy()[kept] + 1 == sample["labels"].numpy()[kept]).all(), "of one document"
            read += [
                p
                for d, first, count in spans
                for p in range(starts[d] + first + bool(first), starts[d] + first + count)
            ]
            bounds = [0, *np.cumsum([span[2] for span in spans]).tolist()]
            expected = [bound for bound in bounds if bound < length]
            assert sample["cu_seqlens"].tolist() == expected + [length] * (dataset.segments + 1 - len(expected))
            assert all(first == 0 and count == sizes[d] for d, first, count in spans if sizes[d] <= length + 1), "whole"
        assert sorted(read) == list(range(sum(sizes)))
        assert sorted(labels) == sorted(set(range(sum(sizes))) - set(starts[:-1].tolist()))


def test_order_depends_on_seed_and_epoch_and_a_longer_run_begins_like_a_shorter_one(tmp_path):
    sizes = np.random.default_rng(0).integers(1, 30, 60).tolist()
    prefix = write(tmp_path / "x", sizes)
    rows = lambda dataset, count: [dataset[n]["tokens"].tolist() for n in range(count)]  # noqa: E731
    short, long = packed(prefix, 50), packed(prefix, 300, cache_directory=tmp_path / "cache")
    again = packed(prefix, 300, cache_directory=tmp_path / "cache")
    assert rows(short, len(short)) == rows(long, len(short)) == rows(again, len(short))
    per_epoch = len(long) // long.epochs
    assert long.epochs > 2
    assert rows(long, per_epoch) != [long[per_epoch + n]["tokens"].tolist() for n in range(per_epoch)]
    assert rows(short, 50) != rows(packed(prefix, 50, seed=4), 50)
    assert [path.name.split("-")[0] for path in (tmp_path / "cache").iterdir()] == ["best_fit"]


def test_fewer_documents_are_cut_than_in_a_stream(tmp_path):
    sizes = np.random.default_rng(1).geometric(0.02, 400).tolist()
    prefix = write(tmp_path / "x", sizes)

    def cut(dataset: CausalDataset, per_epoch: int) -> int:
        spans = [span for number in range(per_epoch) for span in dataset.spans_of_sample(number)]
        return len({d for d, _, _ in spans} - {d for d, first, count in spans if (first, count) == (0, sizes[d])})

    stream = CausalDataset(prefix, sequence_length=127, num_samples=10, seed=1, order="reshuffle")
    best = packed(prefix, 10, sequence_length=127)
    long = sum(size > 128 for size in sizes)
    assert cut(best, len(best)) == long
    assert cut(stream, len(stream)) > 3 * long
    assert len(best) <= 1.05 * len(stream), "little padding"


def test_loss_of_documents_that_are_not_separate_skips_only_padding_and_cut_starts(tmp_path):
    dataset = packed(write(tmp_path / "x", [25, 3, 4, 2]), 3, Packing(method="best_fit"))
    spans = [dataset.spans_of_sample(number) for number in range(len(dataset))]
    assert sorted(sorted(span[2] for span in sample) for sample in spans) == [[2, 4], [3, 7], [10], [10]]
    for number, sample in enumerate(spans):
        assert "cu_seqlens" not in dataset[number]
        weight = dataset[number]["loss_weight"].tolist()
        places = np.cumsum([0, *(span[2] for span in sample)]).tolist()
        expected = [1.0] * (places[-1] - 1) + [0.0] * (10 - places[-1])
        for place, span in zip(places, sample, strict=False):
            if place and span[1]:
                expected[place - 1] = 0.0
        assert weight == expected


def test_long_documents_have_a_share_of_their_own(tmp_path):
    prefix = write(tmp_path / "x", [4, 30, 5, 60, 6, 200])
    shares = Shares("weights", (1, 3), min_tokens=(0, 30))
    for packing, order in ((Packing(), "neox"), (Packing(), "reshuffle"), (SEPARATE, "reshuffle")):
        blend = training_dataset(
            [prefix, prefix], shares, sequence_length=9, num_samples=80, seed=0, order=order, packing=packing
        )
        assert isinstance(blend, BlendedDataset)
        documents = [
            {span[0] for number in range(len(part)) for span in part.spans_of_sample(number)} for part in blend.datasets
        ]
        assert documents[1] == {1, 3, 5}
        assert documents[0] > documents[1]
        assert np.bincount(blend.source[:80]).tolist() == [20, 60]
    assert Shares(min_tokens=(0, 30)).of([prefix, prefix]) == pytest.approx([305 / 595, 290 / 595])
    assert Shares("documents", min_tokens=(0, 60)).of([prefix, prefix]) == pytest.approx([6 / 8, 2 / 8])


@pytest.mark.parametrize(("order", "packing"), [("neox", Packing()), ("reshuffle", Packing()), ("reshuffle", SEPARATE)])
def test_min_tokens_is_a_part_of_the_cache_key(tmp_path, order, packing):
    prefix = write(tmp_path / "x", [4, 30, 5, 60, 6, 200])
    for min_tokens in (0, 30, 60):
        settings = {"sequence_length": 9, "num_samples": 40, "seed": 0, "order": order, "packing": packing}
        settings |= {"min_tokens": min_tokens}
        direct = CausalDataset(prefix, **settings)
        cached = CausalDataset(prefix, **settings, cache_directory=tmp_path / "cache")
        assert [cached.spans_of_sample(n) for n in range(40)] == [direct.spans_of_sample(n) for n in range(40)]


def test_impossible_packings_are_refused(tmp_path):
    prefix = write(tmp_path / "x", [5, 20])
    with pytest.raises(ValueError, match="order 'neox' with packing 'best_fit': reshuffle is allowed"):
        packed(prefix, 1, order="neox")
    with pytest.raises(ValueError, match="packing 'best' is unknown; allowed: stream, best_fit"):
        Packing(method="best")
    for packing in (Packing(), Packing(method="best_fit")):
        with pytest.raises(
            ValueError, match=r"min_tokens = 21: the longest document of .* has 20 tokens; at most 20 is"
        ):
            packed(prefix, 1, packing, min_tokens=21)
    with pytest.raises(ValueError, match="1 values of min_tokens for 2 token files: give one for each"):
        Shares(min_tokens=(3,)).of([prefix, prefix])
    index = build_best_fit_index(np.array([5, 20], np.int32), 9, 1, 0)
    index.offsets[:] = 30
    with pytest.raises(DamagedDataError, match="it names a sample that the token files do not hold"):
        index.spans(np.array([5, 20]), 0, 9)
