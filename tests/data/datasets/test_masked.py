"""Masked samples: the shares of the masking, whole words, and the same masks for the same (seed, epoch, sample)."""

import itertools
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from data.checksum import DamagedDataError
from data.corpus.document_sources import SourceTable, write_sources
from data.datasets.masked import MaskedDataset
from data.datasets.masking import IGNORED_LABEL, Masking, masking_for, word_continuations, word_numbers
from data.indexed import IndexedTokens, IndexedWriter
from data.loader import batches
from data.manifest import write_manifest
from data.synthetic.examples import UNLABELLED
from data.tokenizer import load_tokenizer
from models.operators import cross_entropy

VOCABULARY = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"w{n}" for n in range(30)), "##a", "##b", "."]
PAD, CLS, SEP, MASK = 0, 2, 3, 4


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wordpiece")
    (folder / "vocab.txt").write_text("\n".join(VOCABULARY) + "\n")
    return load_tokenizer("wordpiece", folder)


def write(prefix: Path, sizes: list[int], ended: bool = True) -> Path:
    """Document d holds d + 5, and [SEP] at its end."""
    with IndexedWriter(prefix, np.dtype("<u2")) as writer:
        for number, size in enumerate(sizes):
            writer.add_document(np.array([number % 30 + 5] * size + [SEP] * ended))
    return prefix


def restored(sample: dict[str, torch.Tensor]) -> list[int]:
    labels = sample["labels"]
    return torch.where(labels == IGNORED_LABEL, sample["tokens"], labels).tolist()


def dataset(prefix, tokenizer, rate=0.3, **changes) -> MaskedDataset:
    settings = {"sequence_length": 8, "num_samples": None, "seed": 1, **changes}
    return MaskedDataset(prefix, masking_for(tokenizer, rate), tokenizer, **settings)


@pytest.mark.parametrize("rate", [0.30, 0.15])
def test_the_shares(tokenizer, rate):
    masking = masking_for(tokenizer, rate)
    tokens = np.tile(np.arange(5, 35), 4000)
    inputs, labels = masking.apply(tokens, np.random.default_rng(0))
    chosen = labels != IGNORED_LABEL
    assert chosen.mean() == pytest.approx(rate, abs=0.01)
    assert (labels[chosen] == tokens[chosen]).all()
    assert (inputs[~chosen] == tokens[~chosen]).all()
    masked = inputs[chosen] == MASK
    same = inputs[chosen] == tokens[chosen]
    assert masked.mean() == pytest.approx(0.8, abs=0.01)
    assert same.mean() == pytest.approx(0.1 + 0.1 / 33, abs=0.01)
    other = inputs[chosen][~masked & ~same]
    assert other.min() >= 5, "special tokens are never put in"
    assert len(set(other.tolist())) == 33


def test_special_tokens_are_never_chosen(tokenizer):
    tokens = np.array([PAD, 1, CLS, SEP, MASK, 7] * 200)
    _, labels = masking_for(tokenizer, 0.9).apply(tokens, np.random.default_rng(0))
    assert set(labels.tolist()) == {IGNORED_LABEL, 7}


def test_whole_words_are_chosen_together(tokenizer):
    word = [10, 35, 36]  # w5 ##a ##b
    tokens = np.array([*word, 11, 37] * 500)
    masking = masking_for(tokenizer, 0.3, whole_word=True)
    _, labels = masking.apply(tokens, np.random.default_rng(0))
    chosen = (labels != IGNORED_LABEL).reshape(-1, 5)
    assert (chosen[:, :3].all(1) == chosen[:, :3].any(1)).all()
    assert (chosen[:, 3] != chosen[:, 0]).any()
    assert chosen.mean() == pytest.approx(0.3, abs=0.05)
    assert word_numbers(tokens[:6], np.ones(6, bool), word_continuations(tokenizer)).tolist() == [0, 0, 0, 1, 2, 3]
    # A row that is cut inside a word begins with its rest, behind the end of another document.
    numbers = word_numbers(np.array([10, SEP, 35, 36]), np.array([True, False, True, True]), masking.joined)
    assert numbers.tolist() == [0, 1, 2, 2], "no word contains a special token"


def test_words_of_sentencepiece_and_bytes(sentencepiece):
    for tokenizer in (sentencepiece, load_tokenizer("bytes")):
        text = "async def naïve_name(x12, yy):\n    return"
        ids = np.array(tokenizer.encode(text))
        numbers = word_numbers(ids, np.ones(len(ids), bool), word_continuations(tokenizer))
        words = [tokenizer.decode(ids[numbers == n].tolist()).strip() for n in range(numbers[-1] + 1)]
        assert "async" in words
        assert "return" in words
        assert not [word for word in words if " " in word]
        assert "naïve_name" in words or "naïve" in words, "bytes that are parts of one letter continue a word"


@pytest.mark.parametrize("layout", ["padded", "packed"])
@pytest.mark.parametrize("samples", [None, 4])
def test_id_outside_the_vocabulary_is_named(tmp_path, layout, samples):
    with IndexedWriter(tmp_path / "x", np.dtype("<u2")) as writer:
        writer.add_document(np.array([1, 2, 300, 4, 256]))
    tokenizer = load_tokenizer("bytes")
    with pytest.raises(DamagedDataError, match=r"x\.bin is damaged at byte 4, .*token 300; ids below 257 are allowed"):
        list(
            batches(
                dataset(tmp_path / "x", tokenizer, sequence_length=4, num_samples=samples, layout=layout),
                global_batch_size=1,
                micro_batch_size=1,
            )
        )


def test_rates_that_cannot_be(tokenizer):
    for rate in (0, 1, -1):
        with pytest.raises(ValueError, match="must be between 0 and 1"):
            masking_for(tokenizer, rate)
    with pytest.raises(ValueError, match="fewer than 2 ordinary tokens"):
        Masking(0.3, 4, np.zeros(5, bool))


@given(
    sizes=st.lists(st.integers(0, 20), min_size=1, max_size=8).filter(any),
    length=st.integers(3, 12),
    ended=st.booleans(),
)
def test_padded_rows_hold_every_token_of_every_document_once(tmp_path_factory, tokenizer, sizes, length, ended):
    prefix = write(tmp_path_factory.mktemp("m") / "x", sizes, ended)
    data = dataset(prefix, tokenizer, sequence_length=length)
    documents: dict[int, int] = {}
    for number in range(len(data)):
        sample = data[number]
        row, real = restored(sample), sample["mask"].tolist()
        count = sum(real)
        assert real == [True] * count + [False] * (length - count)
        assert (row[0], row[count - 1]) == (CLS, SEP)
        assert set(row[count:]) <= {PAD}
        body = row[1 : count - 1]
        assert len(set(body)) == 1, "one document a row"
        documents[body[0] - 5] = documents.get(body[0] - 5, 0) + len(body)
        assert sample["loss_weight"].equal((sample["labels"] != IGNORED_LABEL).float())
    assert documents == {d: size for d, size in enumerate(sizes) if size}


def test_a_merged_file_whose_later_documents_lack_their_end(tmp_path, tokenizer):
    with IndexedWriter(tmp_path / "x", np.dtype("<u2")) as writer:
        for number in range(2100):
            writer.add_document(np.array([5, 6] + [SEP] * (number < 2000)))
    data = dataset(tmp_path / "x", tokenizer)
    rows = [restored(data[number]) for number in range(len(data))]
    assert rows[-1][:4] == [CLS, 5, 6, SEP]
    assert all(row[1:3] == [5, 6] for row in rows)


@given(sizes=st.lists(st.integers(0, 20), min_size=1, max_size=8).filter(any), length=st.integers(2, 12))
def test_packed_rows_hold_every_token_once(tmp_path_factory, tokenizer, sizes, length):
    prefix = write(tmp_path_factory.mktemp("m") / "x", sizes)
    data = dataset(prefix, tokenizer, sequence_length=length, layout="packed", reset_at_documents=True)
    stream: list[int] = []
    total = sum(sizes) + len(sizes)
    for number in range(len(data)):
        sample = data[number]
        row, bounds = restored(sample), sample["cu_seqlens"].tolist()
        assert "mask" not in sample
        assert (bounds[0], bounds[-1], len(bounds)) == (0, length, data.segments + 1)
        ends = [place + 1 for place, token in enumerate(row[: total - len(stream)]) if token == SEP]
        assert set(ends) <= set(bounds) | {length}
        stream += row
    expected = [t for d, size in enumerate(sizes) for t in [d + 5] * size + [SEP]]
    assert stream[: len(expected)] == expected
    assert set(stream[len(expected) :]) <= {SEP}
    assert len(stream) - len(expected) < length


def test_end_tokens_are_kept_unless_all_documents_have_one(tmp_path, tokenizer):
    with IndexedWriter(tmp_path / "x", np.dtype("<u2")) as writer:
        for document in ([7, 7, SEP], [8, 8]):
            writer.add_document(np.array(document))
    data = dataset(tmp_path / "x", tokenizer)
    assert [restored(data[n])[:5] for n in range(2)] == [[CLS, 7, 7, SEP, SEP], [CLS, 8, 8, SEP, PAD]]


@pytest.mark.parametrize("layout", ["padded", "packed"])
def test_selected_sequences_equal_a_file_with_only_these(tmp_path, tokenizer, layout):
    prefix = write(tmp_path / "x", [5, 3, 0, 9, 14])
    whole = IndexedTokens(prefix)
    with IndexedWriter(tmp_path / "y", np.dtype("<u2")) as writer:
        for number in (1, 2, 4):
            writer.add_document(whole[number])
    settings = {"layout": layout, "reset_at_documents": layout == "packed"}
    some = dataset(prefix, tokenizer, sequences=np.array([1, 2, 4]), **settings)
    alone = dataset(tmp_path / "y", tokenizer, **settings)
    assert (some.num_tokens, len(some)) == (alone.num_tokens, len(alone))
    for number in range(len(alone)):
        assert all(value.equal(alone[number][key]) for key, value in some[number].items())


@pytest.mark.parametrize("layout", ["padded", "packed"])
@pytest.mark.parametrize("samples", [None, 12])
def test_each_token_has_its_source(tmp_path, tokenizer, layout, samples):
    sources = ["Github", "ArXiv", "Github", "Books"]
    prefix = write(tmp_path / "x", [20, 3, 9, 4])  # document d holds d + 5
    table = SourceTable()
    for source in sources:
        table.add(source)
    write_sources(prefix, table.ids)
    write_manifest(prefix, {"sources": table.names})
    data = dataset(prefix, tokenizer, layout=layout, sources=True, num_samples=samples)
    for number in range(len(data)):
        sample = data[number]
        shown = zip(restored(sample), sample["source"].tolist(), strict=True)
        assert all(data.sources[source] == sources[token - 5] for token, source in shown if token >= 5)


@pytest.mark.parametrize("layout", ["padded", "packed"])
def test_orders_and_masks_are_those_of_seed_and_epoch(tmp_path, tokenizer, layout):
    data = dataset(write(tmp_path / "x", [6] * 12), tokenizer, layout=layout, num_samples=30, seed=6)
    assert (data.per_epoch, len(data)) == ((12, 36) if layout == "padded" else (10, 30))
    masking = masking_for(tokenizer, 0.3)
    for number in range(len(data)):
        epoch, at = divmod(number, data.per_epoch)
        sample, place = data[number], int(data._order[number])
        tokens = np.array(restored(sample))
        if layout == "padded":
            assert place == np.random.default_rng([6, epoch]).permutation(12)[at]
            assert tokens[1] == place + 5
        inputs, labels = masking.apply(tokens, np.random.default_rng([6, epoch, place]))
        assert sample["tokens"].tolist() == inputs.tolist()
        assert sample["labels"].tolist() == labels.tolist()


def test_the_order_is_cached_under_everything_that_made_it(tmp_path, tokenizer):
    prefixes = [write(tmp_path / name, [6] * count) for name, count in (("x", 12), ("y", 13))]
    for prefix, settings in itertools.product(prefixes, ({}, {"seed": 2}, {"num_samples": 100})):
        settings = {"num_samples": 30, **settings}
        direct = dataset(prefix, tokenizer, **settings)
        cached = dataset(prefix, tokenizer, **settings, cache_directory=tmp_path / "cache")
        assert direct._order.tolist() == cached._order.tolist()


@pytest.mark.parametrize("layout", ["padded", "packed"])
def test_masks_are_a_function_of_seed_epoch_and_sample(tmp_path, tokenizer, layout):
    prefix = write(tmp_path / "x", [30] * 12)
    make = lambda **changes: dataset(prefix, tokenizer, layout=layout, num_samples=150, **changes)  # noqa: E731
    first, again, other = make(), make(cache_directory=tmp_path / "cache"), make(seed=2)
    rows = [first[n] for n in range(len(first))]
    assert all(again[n]["tokens"].equal(rows[n]["tokens"]) for n in reversed(range(len(first))))
    assert [other[n]["labels"].tolist() for n in range(len(first))] != [row["labels"].tolist() for row in rows]
    assert len(first) == first.per_epoch * -(-150 // first.per_epoch)
    if layout == "padded":
        epochs = [
            sorted(tuple(restored(row)) for row in rows[start : start + first.per_epoch])
            for start in range(0, len(first), first.per_epoch)
        ]
        assert epochs[0] == epochs[1], "each epoch holds the same rows"
        masks = [
            sorted(map(tuple, (row["labels"].tolist() for row in rows[s : s + first.per_epoch])))
            for s in (0, first.per_epoch)
        ]
        assert masks[0] != masks[1], "under other masks"
    validation = [dataset(prefix, tokenizer, rate=0.15, layout=layout) for _ in range(2)]
    assert all(validation[0][n]["labels"].equal(validation[1][n]["labels"]) for n in range(len(validation[0])))


def test_batches_of_padded_rows(tmp_path, tokenizer):
    data = dataset(write(tmp_path / "x", [3, 9, 1]), tokenizer, num_samples=4)
    (step, *_) = batches(data, global_batch_size=4, micro_batch_size=4)
    assert set(step[0]) == {"tokens", "labels", "loss_weight", "mask"}
    assert {tuple(value.shape) for value in step[0].values()} == {(4, 8)}


def test_a_tokenizer_without_a_mask_token(tmp_path, sentencepiece):
    assert load_tokenizer("bytes").mask_id == 257, "the first row beyond its entries"
    assert sentencepiece.mask_id == 1, "unknown, which no text contains"
    assert sentencepiece.begin_id is None
    prefix = tmp_path / "x"
    with IndexedWriter(prefix, np.dtype("<u2")) as writer:
        writer.add_document(np.array([*b"some text", 256]))
    row = dataset(prefix, load_tokenizer("bytes"), sequence_length=12)[0]
    assert bytes(restored(row)[:9]) == b"some text"
    assert row["mask"].sum() == 10
    full = dataset(prefix, load_tokenizer("bytes"), sequence_length=10)
    assert len(full) == 1, "no place of a row stays empty for a begin token"
    assert restored(full[0]) == [*b"some text", 256]


def test_settings_that_cannot_be(tmp_path, tokenizer):
    prefix = write(tmp_path / "x", [3])
    with pytest.raises(ValueError, match="layout 'dense' of masked samples is unknown; allowed: padded, packed"):
        dataset(prefix, tokenizer, layout="dense")
    with pytest.raises(ValueError, match="samples of 2 tokens have no room for text"):
        dataset(prefix, tokenizer, sequence_length=2)
    with pytest.raises(ValueError, match="only end-of-document tokens"):
        dataset(write(tmp_path / "y", [0, 0]), tokenizer, num_samples=3)
    with pytest.raises(IndexError, match="sample 5 of 1"):
        dataset(prefix, tokenizer)[5]


def test_the_real_vocabulary(shared):
    tokenizer = load_tokenizer("wordpiece", shared / "data/tokenizers/bert-base-uncased")
    assert (tokenizer.begin_id, tokenizer.end_of_document_id, tokenizer.mask_id, tokenizer.pad_id) == (101, 102, 103, 0)
    assert set(tokenizer.special_ids) == {0, 100, 101, 102, 103}
    ids = np.array(tokenizer.encode("unaffable transformers"))
    assert word_numbers(ids, np.ones(len(ids), bool), word_continuations(tokenizer))[-1] == 1


def test_data_and_loss_have_one_number_for_labels_that_do_not_count():
    assert IGNORED_LABEL == UNLABELLED == cross_entropy.IGNORED_LABEL
