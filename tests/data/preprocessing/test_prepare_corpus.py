"""From a corpus to token files: the split, the cache, and the error for an empty training set."""

import json
from pathlib import Path

import pytest

from data import checksum
from data.corpus.readers import Document
from data.corpus.split import TextSample, split_position
from data.datasets.causal import SequentialDataset
from data.indexed import IndexedTokens
from data.manifest import check_tokenizer, manifest_tokenizer
from data.preprocessing import prepare_corpus as prepare
from data.preprocessing.prepare_corpus import Prepared, prepare_corpus
from data.tokenizer import load_tokenizer


def run(corpus, folder: Path, **settings) -> Prepared:
    settings = {"tokenizer_type": "bytes", "validation_fraction": 0.3, **settings}
    return prepare_corpus(corpus, cache_directory=folder / "cache", progress=False, **settings)


def texts(prefix: Path | None) -> list[str]:
    assert prefix is not None
    tokens = IndexedTokens(prefix)
    decoder = load_tokenizer("bytes")
    assert all(tokens[i][-1] == decoder.end_of_document_id for i in range(len(tokens)))
    return [decoder.decode(tokens[i].tolist()) for i in range(len(tokens))]


def write(path: Path, documents: list[str]) -> Path:
    lines = (json.dumps({"text": text, "title": f"about {text}"}) for text in documents)
    path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    return path


def test_the_standard_library_with_a_tokenizer_trained_on_it(tmp_path):
    prepared = run("stdlib/asyncio", tmp_path, tokenizer_type="sentencepiece", vocab_size=500)
    assert prepared.tokenizer_path is not None
    assert prepared.validation_prefix is not None
    assert prepared.validation_text_path is not None
    tokenizer = load_tokenizer(prepared.tokenizer_type, prepared.tokenizer_path)
    assert tokenizer.vocab_size == 500
    manifest = prepared.manifest
    raw = prepared.validation_text_path.read_bytes()
    assert len(raw) == manifest["validation"]["bytes"]

    dataset = SequentialDataset(
        prepared.validation_prefix, sequence_length=64, first_token=tokenizer.end_of_document_id
    )
    labels = [int(t) for i in range(len(dataset)) for t in dataset[i]["labels"][dataset[i]["loss_weight"] == 1]]
    assert len(labels) == manifest["validation"]["tokens"]
    assert tokenizer.decode(labels).encode() == raw, "the labels of validation spell the whole validation text"
    assert labels.count(tokenizer.end_of_document_id) == manifest["validation"]["documents"]

    train = IndexedTokens(prepared.train_prefix)
    assert len(train) + manifest["validation"]["documents"] + sum(manifest["skipped"].values()) == manifest["files"]
    assert train.num_tokens == manifest["train"]["tokens"]
    check_tokenizer(prepared.train_prefix, tokenizer)
    named = manifest_tokenizer(prepared.train_prefix)
    assert named is not None
    assert named.hash == tokenizer.hash
    with pytest.raises(ValueError, match="was written with another tokenizer: sentencepiece"):
        check_tokenizer(prepared.train_prefix, load_tokenizer("bytes"))


def test_documents_are_whole_on_one_side_and_repeats_are_dropped(tmp_path):
    documents = [f"document {n}\n" * (n % 5 + 1) for n in range(60)]
    prepared = run(write(tmp_path / "x.jsonl", [*documents, *documents[:20], "", documents[3]]), tmp_path)
    train, validation = texts(prepared.train_prefix), texts(prepared.validation_prefix)
    assert sorted(train + validation) == sorted(documents)
    assert 8 <= len(validation) <= 28
    assert prepared.manifest["skipped"] == {"repeat": 21, "empty": 1}


def test_a_sample_is_of_the_texts_that_are_farthest_from_the_validation_side():
    sample = TextSample(10)
    for position, text in ((0.9, "aaaa"), (0.1, "bbbb"), (0.7, "cc"), (0.5, "dddd")):
        sample.add(position, text)
    assert (sample.texts(), sample.characters) == (["dddd", "cc", "aaaa"], 10)
    sample.add(0.95, "longer than the limit of characters")
    assert sample.texts() == ["longer than the limit of characters"]


def test_the_split_is_stable_when_documents_are_added(tmp_path):
    documents = [f"document {n}" for n in range(60)]
    first = run(write(tmp_path / "x.jsonl", documents), tmp_path)
    more = run(write(tmp_path / "y.jsonl", [f"new {n}" for n in range(40)] + documents[::-1]), tmp_path)
    for side in ("train_prefix", "validation_prefix"):
        assert set(texts(getattr(first, side))) <= set(texts(getattr(more, side)))


def test_a_document_with_a_key_keeps_its_side_when_its_text_changes():
    positions = [split_position(Document(text, Path(), key=key)) for text, key in (("a", "1"), ("b", "1"), ("a", "2"))]
    assert positions[0] == positions[1] != positions[2]
    assert split_position(Document("1", Path())) == positions[0]


def test_the_cache_is_used_for_the_same_settings_only(tmp_path, monkeypatch):
    path = write(tmp_path / "x.jsonl", [f"document {n}" for n in range(30)])
    first = run(path, tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(prepare, "_build", lambda *_: pytest.fail("built again"))
        assert run(path, tmp_path) == first
        assert run([path], tmp_path) == first
    folders = {first.train_prefix.parent}
    for changed in (
        {"validation_fraction": 0.4},
        {"text_key": "title"},
        {"tokenizer_type": "sentencepiece", "vocab_size": 290},
        {"tokenizer_type": "sentencepiece", "vocab_size": 289},
    ):
        folder = run(path, tmp_path, **changed).train_prefix.parent
        assert folder not in folders
        folders.add(folder)
    write(path, [f"changed {n}" for n in range(31)])
    assert run(path, tmp_path).train_prefix.parent not in folders
    assert not list((tmp_path / "cache").glob(".*"))


def test_the_cache_may_be_moved(tmp_path):
    path = write(tmp_path / "x.jsonl", [f"document {n} of some words" for n in range(30)])
    settings = {"tokenizer_type": "sentencepiece", "vocab_size": 290}
    prepared = run(path, tmp_path, **settings)
    (tmp_path / "cache").rename(tmp_path / "moved")
    tokenizer = manifest_tokenizer(tmp_path / "moved" / prepared.train_prefix.parent.name / prepared.train_prefix.name)
    assert tokenizer is not None
    assert tokenizer.hash == prepared.manifest["tokenizer"]["hash"]


def test_damaged_manifest_that_counts_as_large_is_named(tmp_path, monkeypatch):
    path = write(tmp_path / "x.jsonl", [f"document {n}" for n in range(30)])
    manifest = run(path, tmp_path).train_prefix.parent / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"path"', '"pauh"'))
    monkeypatch.setattr(checksum, "ALWAYS_CHECKED", 200)
    message = rf"{manifest} does not describe a tokenizer by .*: remove {manifest.parent}; it is rebuilt"
    with pytest.raises(ValueError, match=message):
        run(path, tmp_path)


def test_a_build_that_stops_leaves_nothing(tmp_path, monkeypatch):
    path = write(tmp_path / "x.jsonl", [f"document {n}" for n in range(30)])
    with monkeypatch.context() as patch:
        patch.setattr(prepare, "_tokenise", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            run(path, tmp_path)
    assert list((tmp_path / "cache").iterdir()) == []
    assert run(path, tmp_path).manifest["train"]["documents"] > 0


def test_few_documents_have_both_sides(tmp_path):
    for number in range(8):
        path = write(tmp_path / f"{number}.jsonl", [f"{number} one", f"{number} two"])
        for fraction in (0.001, 0.999):
            prepared = run(path, tmp_path, validation_fraction=fraction)
            assert len(texts(prepared.train_prefix)) == len(texts(prepared.validation_prefix)) == 1


def test_without_validation(tmp_path):
    prepared = run(write(tmp_path / "x.jsonl", ["only one"]), tmp_path, validation_fraction=0)
    assert texts(prepared.train_prefix) == ["only one"]
    assert (prepared.validation_prefix, prepared.validation_text_path) == (None, None)


def test_nothing_to_train_on(tmp_path):
    with pytest.raises(ValueError, match=r"holds no text: .*x\.jsonl \(2 empty\).*data\.corpus.*data\.text_key"):
        run(write(tmp_path / "x.jsonl", ["", "\n"]), tmp_path)
    with pytest.raises(ValueError, match=r"holds no text: .*x\.jsonl \(no documents\)"):
        run(write(tmp_path / "x.jsonl", []), tmp_path)
    with pytest.raises(ValueError, match=r"holds one document .*data\.validation_fraction=0"):
        run(write(tmp_path / "x.jsonl", ["a", "a"]), tmp_path)
    with pytest.raises(FileNotFoundError, match=r"nowhere does not exist"):
        run(tmp_path / "nowhere", tmp_path)
    with pytest.raises(ValueError, match=r"validation_fraction 1 must be in"):
        run("stdlib/json", tmp_path, validation_fraction=1)
    with pytest.raises(ValueError, match=r"x\.jsonl line 1: no key 'content'; the keys there are text, title"):
        run(write(tmp_path / "x.jsonl", ["a", "b"]), tmp_path, text_key="content")
    with pytest.raises(ValueError, match=r"source key 'domain' \(data\.source_key, .*x\.jsonl have no text under it"):
        run(write(tmp_path / "x.jsonl", ["a", "b"]), tmp_path, source_key="domain")
    (tmp_path / "x.jsonl").write_text('{"text": "a"}\n{"text": "b\n')
    with pytest.raises(ValueError, match=r"x\.jsonl line 2: not valid JSON"):
        run(tmp_path / "x.jsonl", tmp_path)


def test_the_tokenizer_sees_no_validation_text(tmp_path, monkeypatch):
    documents = [f"document {n} " + "words " * 20 for n in range(30)]
    seen: list[str] = []
    real = prepare.train_sentencepiece
    monkeypatch.setattr(
        prepare, "train_sentencepiece", lambda texts, *a, **k: (seen.extend(texts), real(texts, *a, **k))
    )
    settings = {"tokenizer_type": "sentencepiece", "vocab_size": 290}
    run(write(tmp_path / "x.jsonl", documents), tmp_path, **settings)
    held_out = run(tmp_path / "x.jsonl", tmp_path)
    assert sorted(seen) == sorted(texts(held_out.train_prefix))
