"""tools.preprocess_data: the same bytes for any number of workers and after a kill, and its messages."""

import gzip
import importlib.util
import json
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest

from data import preprocess as module
from data.corpora import source_files
from data.encode import Recipe, encode_block
from data.indexed import IndexedTokens
from data.manifest import read_manifest
from data.preprocess import preprocess
from data.readers import Block, read_blocks
from data.tokenizer import load_tokenizer
from tools.preprocess_data import main


class Inline:
    """A pool that works in this process: what a worker does, without the second that starting one takes.

    ``done`` lists the files whose blocks were tokenised; a kill comes at the block of the file named ``stop_at``.
    """

    done: ClassVar[list[str]] = []
    stop_at: str | None = None

    def __init__(self, recipe: Recipe) -> None:
        self.recipe, self.tokenizer = recipe, load_tokenizer(recipe.tokenizer_type, recipe.tokenizer_path)

    def __enter__(self) -> "Inline":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def submit(self, _, block: Block) -> "Result":
        return Result(self, block)


@dataclass
class Result:
    pool: Inline
    block: Block

    def result(self):
        name = self.block.file.path.name
        if name == Inline.stop_at:
            raise KeyboardInterrupt
        Inline.done.append(name)
        return [encode_block(self.block, key, self.pool.recipe, self.pool.tokenizer) for key in self.pool.recipe.keys]


@pytest.fixture
def inline(monkeypatch):
    monkeypatch.setattr(module, "_pool", lambda recipe, workers: Inline(recipe))
    monkeypatch.setattr(Inline, "done", [])
    monkeypatch.setattr(Inline, "stop_at", None)


def write(path: Path, records: list[dict[str, str]]) -> Path:
    raw = "".join(json.dumps(record) + "\n" for record in records).encode()
    path.write_bytes(gzip.compress(raw) if path.suffix == ".gz" else raw)
    return path


@pytest.fixture
def corpus(tmp_path):
    folder = tmp_path / "corpus"
    folder.mkdir()
    write(folder / "a.jsonl", [{"text": f"text {n} of a" * (n % 7), "title": f"title {n}"} for n in range(50)])
    write(folder / "b.jsonl.gz", [{"text": f"text {n} of {'ab'[n % 2]}", "title": "same"} for n in range(40)])
    write(folder / "c.jsonl", [])
    write(folder / "d.jsonl", [{"text": f"text {n} of d", "title": f"title {n}"} for n in range(5)])
    return folder


def outputs(prefix: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in prefix.parent.iterdir() if path.name.startswith(prefix.name)}


def decoded(prefix: Path) -> list[str]:
    tokens = IndexedTokens(prefix)
    tokenizer = load_tokenizer("bytes")
    return [tokenizer.decode(tokens[i].tolist()) for i in range(len(tokens))]


def test_one_worker_and_two_write_the_same_bytes(corpus, tmp_path, sentencepiece, capsys):
    written = []
    for workers in ("1", "2"):
        prefix = tmp_path / workers / "out"
        arguments = ["--input", str(corpus), "--tokenizer-type", "SPMTokenizer", "--vocab-file", sentencepiece.path]
        arguments += ["--append-eod", "--deduplicate", "--split", "80,20", "--jsonl-keys", "text", "title"]
        arguments += ["--output-prefix", str(prefix), "--workers", workers, "--no-progress"]
        assert main(arguments) == 0
        written.append(outputs(prefix))
    assert written[0] == written[1]
    names = {f"out_{side}_{key}_document" for side in ("train", "validation") for key in ("text", "title")}
    assert set(written[0]) == {f"{name}.{suffix}" for name in names for suffix in ("bin", "idx", "json")}
    report = capsys.readouterr().out
    assert "out_train_text_document: " in report
    assert "repeat" in report


def test_what_is_written(corpus, tmp_path, inline):
    prefix = tmp_path / "out"
    preprocess(source_files(corpus), prefix, Recipe("bytes", append_eod=True), progress=False)
    tokens = IndexedTokens(tmp_path / "out_text_document")
    expected = [f"text {n} of a" * (n % 7) for n in range(50) if n % 7]
    expected += [f"text {n} of {'ab'[n % 2]}" for n in range(40)] + [f"text {n} of d" for n in range(5)]
    assert decoded(tmp_path / "out_text_document") == expected
    assert all(tokens[i][-1] == 256 for i in range(len(tokens)))
    manifest = read_manifest(tmp_path / "out_text_document")
    assert manifest is not None
    assert manifest["documents"] == len(expected)
    assert manifest["tokens"] == tokens.num_tokens
    assert manifest["bytes"] == sum(len(text.encode()) for text in expected)
    assert manifest["skipped"] == {"empty": 8}
    assert {p.name for p in tmp_path.iterdir()} == {
        "corpus",
        *(f"out_text_document.{s}" for s in ("bin", "idx", "json")),
    }

    preprocess(source_files(corpus), prefix, Recipe("bytes", min_characters=20), progress=False)
    assert decoded(tmp_path / "out_text_document") == [text for text in expected if len(text) >= 20]
    assert IndexedTokens(tmp_path / "out_text_document")[0][-1] != 256


def test_repeats_are_dropped_across_files(corpus, tmp_path, inline):
    recipe = Recipe("bytes", keys=("text", "title"), deduplicate=True)
    manifests = preprocess(source_files(corpus), tmp_path / "out", recipe, progress=False)
    texts, titles = decoded(tmp_path / "out_text_document"), decoded(tmp_path / "out_title_document")
    assert len(set(texts)) == len(texts) == manifests["text"]["documents"]
    assert len(set(titles)) == len(titles) == 51
    assert "text 8 of a" in texts, "a text is not a repeat of the same words in a longer text"


def test_a_killed_job_goes_on_where_it_was(corpus, tmp_path, inline):
    recipe = Recipe("bytes", append_eod=True, deduplicate=True, split=(80, 20))
    files = source_files(corpus)
    preprocess(files, tmp_path / "whole", recipe, progress=False)
    expected = {name.removeprefix("whole"): content for name, content in outputs(tmp_path / "whole").items()}
    Inline.done.clear()
    for stop_at in ("b.jsonl.gz", "d.jsonl"):
        Inline.stop_at = stop_at
        with pytest.raises(KeyboardInterrupt):
            preprocess(files, tmp_path / "cut", recipe, progress=False)
    Inline.stop_at = None
    preprocess(files, tmp_path / "cut", recipe, progress=False)
    assert Inline.done == ["a.jsonl", "b.jsonl.gz", "d.jsonl"], "no file is done twice"
    assert {name.removeprefix("cut"): content for name, content in outputs(tmp_path / "cut").items()} == expected


def test_parts_of_another_recipe_are_not_used(corpus, tmp_path, inline):
    files = source_files(corpus)
    Inline.stop_at = "d.jsonl"
    with pytest.raises(KeyboardInterrupt):
        preprocess(files, tmp_path / "out", Recipe("bytes", append_eod=True), progress=False)
    Inline.stop_at = None
    Inline.done.clear()
    preprocess(files, tmp_path / "out", Recipe("bytes"), progress=False)
    assert Inline.done == ["a.jsonl", "b.jsonl.gz", "d.jsonl"]


def test_a_split_is_by_hash(tmp_path, inline):
    path = write(tmp_path / "x.jsonl", [{"text": f"document {n}"} for n in range(400)])
    recipe = Recipe("bytes", split=(50, 30, 20))
    manifests = preprocess(source_files(path), tmp_path / "out", recipe, progress=False)
    counts = [manifests[f"{side}_text"]["documents"] for side in ("train", "validation", "test")]
    assert sum(counts) == 400
    assert np.abs(np.array(counts) - [200, 120, 80]).max() < 40
    before = set(decoded(tmp_path / "out_validation_text_document"))
    write(path, [{"text": f"document {n}"} for n in range(500)])
    preprocess(source_files(path), tmp_path / "out", recipe, progress=False)
    assert before <= set(decoded(tmp_path / "out_validation_text_document"))


def test_broken_lines_stop_the_job_or_are_counted(tmp_path, inline):
    path = tmp_path / "x.jsonl"
    path.write_text('{"text": "a"}\n{"text": \n{"text": "b"}\nnonsense\n')
    with pytest.raises(
        ValueError, match=r"x\.jsonl line 2: not valid JSON.*\(0 such lines are allowed\).*--max-broken"
    ):
        preprocess(source_files(path), tmp_path / "out", Recipe("bytes"), progress=False)
    with pytest.raises(ValueError, match=r"x\.jsonl line 4: not valid JSON.*\(1 such lines"):
        preprocess(source_files(path), tmp_path / "out", Recipe("bytes", max_broken=1), progress=False)
    preprocess(source_files(path), tmp_path / "out", Recipe("bytes", max_broken=2), progress=False)
    assert decoded(tmp_path / "out_text_document") == ["a", "b"]
    manifest = read_manifest(tmp_path / "out_text_document")
    assert manifest is not None
    assert manifest["skipped"] == {"broken": 2}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"--input": "nowhere.jsonl"}, "nowhere.jsonl does not exist"),
        ({"--jsonl-keys": "content"}, "line 1: no key 'content'; the keys there are text"),
        ({"--tokenizer-type": "hf"}, "a tokenizer of type 'hf' needs a path"),
        ({"--split": "a,b"}, "--split 'a,b' must be numbers"),
        ({"--split": "1,2,3,4"}, "must be up to three shares"),
    ],
)
def test_messages(tmp_path, capsys, inline, changes, message):
    path = write(tmp_path / "x.jsonl", [{"text": "a"}])
    options = {"--input": str(path), "--tokenizer-type": "bytes", "--output-prefix": str(tmp_path / "out"), **changes}
    assert main([word for pair in options.items() for word in pair]) == 1
    assert message in capsys.readouterr().err
    assert not list(tmp_path.glob("out_*"))


def test_input_without_text(tmp_path, inline):
    path = write(tmp_path / "x.jsonl", [{"text": ""}])
    with pytest.raises(ValueError, match=r"the input holds no text: .*x\.jsonl.*\(1 empty\)"):
        preprocess(source_files(path), tmp_path / "out", Recipe("bytes"), progress=False)


@pytest.mark.skipif(importlib.util.find_spec("ftfy") is not None, reason="ftfy is installed here")
def test_ftfy_must_be_installed():
    with pytest.raises(ValueError, match="--ftfy needs the package ftfy, which is not installed: pip install ftfy"):
        Recipe("bytes", ftfy=True)


def test_the_help_teaches(capsys):
    with pytest.raises(SystemExit):
        main(["--help"])
    text = capsys.readouterr().out
    for word in ("examples:", "--append-eod", "data.train=", "PREFIX_text_document.idx", "goes on where it was"):
        assert word in text


def test_the_pile_sample(shared, tmp_path, inline):
    folder = shared / "data/tokenizers/gpt-neox-20b"
    recipe = Recipe("hf", str(folder), append_eod=True)
    files = source_files(shared / "data/pile_sample/val.jsonl.zst")
    manifest = preprocess(files, tmp_path / "val", recipe, progress=False)["text"]
    tokens = IndexedTokens(tmp_path / "val_text_document")
    assert tokens.dtype == np.dtype("<u2")
    assert manifest["documents"] == len(tokens) == 27
    assert 3 < manifest["bytes_per_token"] < 5
    tokenizer = load_tokenizer("hf", folder)
    (block, *_) = read_blocks(files)
    first = json.loads(block.lines[0])["text"]
    assert tokens[0].tolist() == [*tokenizer.encode(first), tokenizer.end_of_document_id]
