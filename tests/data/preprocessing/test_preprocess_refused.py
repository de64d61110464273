"""Splits, broken lines, and what tools.preprocess_data refuses."""

import json
import re
import sys

import numpy as np
import pytest

from data.corpus import readers
from data.corpus.discovery import SourceFile, source_files
from data.corpus.readers import read_blocks
from data.corpus.source_key import check_source_key
from data.indexed import IndexedTokens
from data.manifest import read_manifest
from data.preprocessing import pipeline
from data.preprocessing.encode import PreprocessingSettings
from data.preprocessing.pipeline import preprocess
from data.tokenizer import load_tokenizer
from tests.data.inline_pool import Inline
from tests.data.preprocessing.test_preprocess_data import decoded, write
from tools.preprocess_data import main


def test_a_split_is_by_hash(tmp_path, inline):
    path = write(tmp_path / "x.jsonl", [{"text": f"document {n}"} for n in range(400)])
    recipe = PreprocessingSettings("bytes", split=(50, 30, 20))
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
    with pytest.raises(ValueError, match=r"x\.jsonl line 2: not valid JSON.*\(broken lines allowed: 0\).*--max-broken"):
        preprocess(source_files(path), tmp_path / "out", PreprocessingSettings("bytes"), progress=False)
    with pytest.raises(ValueError, match=r"x\.jsonl line 4: not valid JSON.*\(broken lines allowed: 1\)"):
        preprocess(source_files(path), tmp_path / "out", PreprocessingSettings("bytes", max_broken=1), progress=False)
    preprocess(source_files(path), tmp_path / "out", PreprocessingSettings("bytes", max_broken=2), progress=False)
    assert decoded(tmp_path / "out_text_document") == ["a", "b"]
    manifest = read_manifest(tmp_path / "out_text_document")
    assert manifest is not None
    assert manifest["skipped"] == {"broken": 2}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"--input": "nowhere.jsonl"}, "nowhere.jsonl does not exist"),
        ({"--jsonl-keys": "content"}, "line 1: no key 'content'; the keys there are text; name the one that holds the"),
        ({"--jsonl-keys": "content"}, "--jsonl-key or --text-key) (broken lines allowed: 0). Repair the file"),
        ({"--jsonl-keys": "a/b"}, "--jsonl-keys a/b: the key names an output file, so it must not hold a slash"),
        ({"--tokenizer-type": "hf"}, "a tokenizer of type 'hf' needs a path"),
        ({"--split": "a,b"}, "--split 'a,b' must be numbers"),
        ({"--split": "1,2,3,4"}, "--split 1,2,3,4: up to three numbers from 0 are allowed, not all 0"),
        ({"--split": "nan,1"}, "--split nan,1: up to three numbers"),
        ({"--split": "90,-5"}, "--split 90,-5: up to three numbers"),
        (
            {"--output-prefix": "/dev/null/x"},
            "--output-prefix /dev/null/x_text_document.bin: cannot be written (Not a directory",
        ),
        (
            {"--output-prefix": "out/"},
            "--output-prefix out/ names a folder: add how the names of the files in it begin",
        ),
        ({"--output-prefix": "."}, "--output-prefix . names a folder"),
    ],
)
def test_messages(tmp_path, capsys, inline, changes, message):
    path = write(tmp_path / "x.jsonl", [{"text": "a"}])
    options = {"--input": str(path), "--tokenizer-type": "bytes", "--output-prefix": str(tmp_path / "out"), **changes}
    assert main([word for pair in options.items() for word in pair]) == 2
    assert message in capsys.readouterr().err
    assert not list(tmp_path.glob("out_*"))


@pytest.mark.parametrize(("given", "prefix"), [("", "x"), ("x_text_document.json", "x"), ("*.json", "x"), ("", "new")])
def test_outputs_that_the_next_run_would_read_as_text_are_refused(tmp_path, capsys, inline, given, prefix):
    path = write(tmp_path / "x_text_document.json", [{"text": "a"}])
    words = ["--input", str(tmp_path / given), "--tokenizer-type", "bytes", "--output-prefix", str(tmp_path / prefix)]
    assert main([*words, "--overwrite"]) == 2
    assert re.search(
        rf"--output-prefix .*{prefix}_text_document\.json: this command reads it, or its", capsys.readouterr().err
    )
    assert path.read_text() == '{"text": "a"}\n'
    assert list(tmp_path.iterdir()) == [path]


def test_input_without_text(tmp_path, inline):
    path = write(tmp_path / "x.jsonl", [{"text": ""}])
    with pytest.raises(
        ValueError, match=r"holds no text: .*x\.jsonl.*\(1 empty\)\. Name files .*--jsonl-keys, now text\)"
    ):
        preprocess(source_files(path), tmp_path / "out", PreprocessingSettings("bytes"), progress=False)
    assert [entry.name for entry in tmp_path.iterdir()] == ["x.jsonl"]


def test_ftfy_must_be_installed(monkeypatch):
    monkeypatch.setitem(sys.modules, "ftfy", None)
    with pytest.raises(ValueError, match="--ftfy needs the package ftfy, which is not installed: pip install ftfy"):
        PreprocessingSettings("bytes", ftfy=True)


def test_help_has_examples_and_next_steps(capsys):
    with pytest.raises(SystemExit):
        main(["--help"])
    text = capsys.readouterr().out
    for word in (
        "examples:",
        "--append-eod",
        "data.train=",
        "PREFIX_text_document.idx",
        "To resume a job that was killed",
    ):
        assert word in text


def test_the_pile_sample(shared, tmp_path, inline):
    folder = shared / "data/tokenizers/gpt-neox-20b"
    recipe = PreprocessingSettings("hf", str(folder), append_eod=True)
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


def test_many_empty_documents_stop_the_job(tmp_path, inline):
    path = write(tmp_path / "x.jsonl", [{"text": "a" * (n % 4 == 0)} for n in range(20)])
    for _ in range(2):  # the parts of the first time are finished, and it is refused as before
        with pytest.raises(ValueError, match=r"15 of 20 documents are empty, more than the share 0\.5 .*--max-empty"):
            preprocess(source_files(path), tmp_path / "out", PreprocessingSettings("bytes"), progress=False)
    manifest = preprocess(
        source_files(path), tmp_path / "out", PreprocessingSettings("bytes", max_empty=0.8), progress=False
    )["text"]
    assert manifest["skipped"] == {"empty": 15}


def test_share_of_empty_documents_is_of_all_documents(tmp_path, inline):
    """Count documents that are too short, and repeats, also after a kill."""
    short = write(tmp_path / "x.jsonl", [{"text": text} for text in ["long text"] * 2 + ["a"] * 8 + [""] * 4])
    recipe = PreprocessingSettings("bytes", min_characters=5)
    manifest = preprocess(source_files(short), tmp_path / "out", recipe, progress=False)["text"]
    assert manifest["skipped"] == {"empty": 4, "short": 8}
    repeats = [write(tmp_path / f"{n}.jsonl", [{"text": "a"}] * 8 + [{"text": ""}] * 4) for n in (1, 2)]
    recipe = PreprocessingSettings("bytes", deduplicate=True)
    Inline.stop_at = "2.jsonl"
    with pytest.raises(KeyboardInterrupt):
        preprocess(source_files(repeats), tmp_path / "again", recipe, progress=False)
    Inline.stop_at = None
    manifest = preprocess(source_files(repeats), tmp_path / "again", recipe, progress=False)["text"]
    assert manifest["skipped"] == {"empty": 8, "repeat": 15}


def test_line_that_no_key_can_read_counts_once(tmp_path, inline):
    path = tmp_path / "x.jsonl"
    path.write_text('{"text": "a", "title": "t"}\nnonsense\n{"text": "b"}\n')
    recipe = PreprocessingSettings("bytes", keys=("text", "title"), max_broken=2)
    manifests = preprocess(source_files(path), tmp_path / "out", recipe, progress=False)
    assert [manifest["skipped"] for manifest in manifests.values()] == [{"broken": 2}] * 2


def test_file_without_the_key_counts_as_broken_lines(tmp_path, inline):
    write(tmp_path / "a.jsonl", [{"text": "a"}])
    write(tmp_path / "b.jsonl", [{"title": "b"}])
    recipe = PreprocessingSettings("bytes", max_broken=1)
    manifest = preprocess(source_files(tmp_path), tmp_path / "out", recipe, progress=False)["text"]
    assert manifest["skipped"] == {"broken": 1}


@pytest.mark.parametrize("append_eod", [False, True])
def test_a_document_without_tokens_is_an_empty_one(tmp_path, inline, append_eod):
    vocabulary = tmp_path / "vocab.txt"
    vocabulary.write_text("[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\nword\n")
    for name, text in (("a.txt", "\x01\x02"), ("b.txt", "word"), ("c.txt", "\x03 \x04")):
        (tmp_path / "in" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "in" / name).write_text(text)
    recipe = PreprocessingSettings("wordpiece", str(vocabulary), append_eod=append_eod, max_empty=0.9)
    manifest = preprocess(source_files(tmp_path / "in"), tmp_path / "out", recipe, progress=False)["text"]
    assert (manifest["documents"], manifest["tokens"]) == (1, 1 + append_eod)
    assert manifest["skipped"] == {"empty": 2}
    (tmp_path / "in" / "b.txt").unlink()
    with pytest.raises(ValueError, match=r"the input holds no text: .*\(2 empty\)"):
        preprocess(source_files(tmp_path / "in"), tmp_path / "out", recipe, progress=False)


def test_files_in_another_encoding_are_counted(tmp_path, inline):
    (tmp_path / "a.py").write_bytes(b"x = '\xff'\n")
    (tmp_path / "b.py").write_bytes(b"x = 1\n")
    files = [SourceFile(tmp_path / name, "python", name) for name in ("a.py", "b.py")]
    with pytest.raises(
        ValueError, match=r"a\.py: not text in the encoding that it declares \(broken lines allowed: 0\)"
    ):
        preprocess(files, tmp_path / "out", PreprocessingSettings("bytes"), progress=False)
    manifest = preprocess(files, tmp_path / "out", PreprocessingSettings("bytes", max_broken=1), progress=False)["text"]
    assert (manifest["documents"], manifest["skipped"]) == (1, {"broken": 1})


def test_wrong_source_key_is_refused_before_the_corpus_is_read(tmp_path, inline, monkeypatch):
    monkeypatch.setattr(readers, "BLOCK_BYTES", 400)
    monkeypatch.setattr(pipeline, "SHARD_BLOCKS", 1)  # finished shards are kept after an error
    records = [{"text": f"document {n}", "domain": {"name": "web", "page": n}} for n in range(100)]
    files = source_files([write(tmp_path / "a.jsonl", [{"text": "a"}]), write(tmp_path / "b.jsonl", records)])

    def run(source_key: str, **settings: tuple[str, ...]) -> None:
        recipe = PreprocessingSettings("bytes", source_key=source_key, **settings)
        preprocess(files, tmp_path / "out", recipe, progress=False)

    Inline.done.clear()
    for wrong in ("domain.nam", "domain", "domain.page"):
        with pytest.raises(
            ValueError,
            match=rf"source key '{wrong}' \(data\.source_key, --source-key\): the first documents of .*a\.jsonl and 1 more have "
            "no text under it; their keys are text, domain.name, domain.page. Name the key of the source",
        ):
            run(wrong)
    assert not Inline.done
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["a.jsonl", "b.jsonl"]
    with pytest.raises(ValueError, match="line 1: no key 'content'; the keys there are text"):
        run("domain.nam", keys=("content",))
    run("domain.name")
    manifest = read_manifest(tmp_path / "out_text_document")
    assert manifest is not None
    assert manifest["sources"] == ["other", "web"]


def test_columns_of_a_wrong_source_key_are_named(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "x.parquet"
    table = pyarrow.Table.from_pylist([{"text": "a", "domain": {"name": "web"}, "url": "u"}])
    parquet.write_table(table, path)
    check_source_key("domain.name", ["text"], source_files(path))
    with pytest.raises(ValueError, match=r"x\.parquet have no text under it; their keys are text, domain\.name, url\."):
        check_source_key("domain", ["text"], source_files(path))
    (tmp_path / "x.txt").write_text("a text")
    with pytest.raises(ValueError, match=r"x\.txt have no text under it; plain text has no keys\."):
        check_source_key("domain", ["text"], source_files(tmp_path / "x.txt"))
