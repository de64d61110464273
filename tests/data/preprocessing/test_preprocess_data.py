"""tools.preprocess_data: the same bytes for any number of workers and after a kill, and its messages."""

import contextlib
import gzip
import json
import random
import socket
from collections import Counter
from pathlib import Path

import pytest

from data.corpus import readers
from data.corpus.discovery import source_files
from data.corpus.document_sources import read_sources, sources_path
from data.corpus.readers import Document
from data.corpus.split import split_position
from data.indexed import IndexedTokens
from data.manifest import check_tokenizer, read_manifest, write_manifest
from data.preprocessing import pipeline as module
from data.preprocessing.encode import PreprocessingSettings
from data.preprocessing.pipeline import finished, preprocess
from data.preprocessing.prepare_corpus import prepare_corpus
from data.preprocessing.shards import finished_reports
from data.tokenizer import load_tokenizer
from tests.data.inline_pool import Inline
from tools.preprocess_data import main

DEAD = f"{2**22 + 1}@{socket.gethostname()}.aside"  # ends the temporary names of a process that is dead


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


def test_token_files_hold_all_documents_in_order(corpus, tmp_path, inline):
    prefix = tmp_path / "out"
    preprocess(source_files(corpus), prefix, PreprocessingSettings("bytes", append_eod=True), progress=False)
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
    written = {path.name for path in tmp_path.iterdir()}
    assert written == {"corpus", *(f"out_text_document.{ending}" for ending in ("bin", "idx", "json"))}

    preprocess(source_files(corpus), prefix, PreprocessingSettings("bytes", min_characters=20), progress=False)
    assert decoded(tmp_path / "out_text_document") == [text for text in expected if len(text) >= 20]
    assert IndexedTokens(tmp_path / "out_text_document")[0][-1] != 256


def test_existing_outputs_need_overwrite(corpus, tmp_path, inline, capsys):
    def run(*more: str) -> int:
        words = ["--input", str(corpus), "--tokenizer-type", "bytes", "--output-prefix", str(tmp_path / "out")]
        return main([*words, "--workers", "1", "--no-progress", *more])

    assert run() == 0
    written = outputs(tmp_path / "out")
    printed = capsys.readouterr().out
    Inline.done.clear()
    assert run() == 0
    again = capsys.readouterr().out
    assert "complete: written before from this input with these settings" in again
    assert printed.splitlines()[:2] == again.splitlines()[:2]
    assert not Inline.done
    for more in (["--append-eod"], ["--input", str(corpus / "d.jsonl")]):
        assert run(*more) == 2
        printed = capsys.readouterr().err
        assert (
            "out_text_document.bin exists, but was made from other input, with other settings or by an earlier version; name"
            in printed
        )
        assert "--overwrite" in printed
        assert outputs(tmp_path / "out") == written
    assert run("--append-eod", "--overwrite") == 0
    assert outputs(tmp_path / "out") != written
    # Files without a manifest are another project's; those whose tokens are gone are made again.
    (tmp_path / "out_text_document.json").unlink()
    assert run() == 2
    assert run("--overwrite") == 0
    assert outputs(tmp_path / "out") == written
    (tmp_path / "out_text_document.bin").unlink()
    assert run() == 0
    assert outputs(tmp_path / "out") == written


def test_another_end_of_documents_is_another_tokenizer(tmp_path, inline, capsys):
    """tokenizer_config.json names it; the hash covers only tokenizer.json."""
    import tokenizers

    vocabulary = {"<unk>": 0, "</s>": 1, "<end>": 2, "word": 3}
    model = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<unk>"))
    model.save(str(tmp_path / "tokenizer.json"))
    text = tmp_path / "a.txt"
    text.write_text("word")
    words = ["--input", str(text), "--tokenizer-type", "hf", "--vocab-file", str(tmp_path), "--append-eod"]
    words += ["--output-prefix", str(tmp_path / "out")]

    def prepared() -> list[int]:
        made = prepare_corpus(
            text,
            tokenizer_type="hf",
            tokenizer_path=tmp_path,
            validation_fraction=0,
            cache_directory=tmp_path / "cache",
            progress=False,
        )
        return IndexedTokens(made.train_prefix)[0].tolist()

    assert main(words) == 0
    assert prepared() == [3, 1]
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<end>"}')
    assert prepared() == [3, 2]
    assert main(words) == 2
    assert (
        "out_text_document.bin exists, but was made from other input, with other settings or" in capsys.readouterr().err
    )
    with pytest.raises(ValueError, match=r"another tokenizer: hf .*end of a document 1,.*end of a document 2,"):
        check_tokenizer(tmp_path / "out_text_document", load_tokenizer("hf", tmp_path))
    assert main([*words, "--overwrite"]) == 0
    assert IndexedTokens(tmp_path / "out_text_document")[0].tolist() == [3, 2]
    # Nor are the parts of a job that was killed before the change.
    more = tmp_path / "b.txt"
    more.write_text("word")
    words.insert(2, str(more))
    words[-1] = str(tmp_path / "cut")
    Inline.stop_at = "b.txt"
    assert main(words) == 130
    Inline.stop_at = None
    (tmp_path / "tokenizer_config.json").unlink()
    assert main(words) == 0
    assert [ids.tolist() for ids in IndexedTokens(tmp_path / "cut_text_document")] == [[3, 1], [3, 1]]


def test_a_job_that_was_stopped_while_it_joined_goes_on(corpus, tmp_path, inline, monkeypatch):
    words = ["--input", str(corpus), "--tokenizer-type", "bytes", "--output-prefix", str(tmp_path / "out")]
    words += ["--workers", "1", "--no-progress", "--jsonl-keys", "text", "title"]
    for at in ("text", "title"):

        def stopped(prefix, content, at=at):
            if at in prefix.name:
                raise OSError("stopped")
            write_manifest(prefix, content)

        with monkeypatch.context() as patch:
            patch.setattr("data.preprocessing.shards.write_manifest", stopped)
            assert main(words) == 2
        assert (tmp_path / f"out_{at}_document.bin").exists()
    (tmp_path / f".out_title_document.bin.{DEAD}").touch()
    assert main(words) == 0
    assert read_manifest(tmp_path / "out_title_document")
    assert not list(tmp_path.glob(".*"))


def test_a_job_that_was_stopped_while_it_removed_its_parts_is_complete(corpus, tmp_path, inline, monkeypatch, capsys):
    words = ["--input", str(corpus), "--tokenizer-type", "bytes", "--output-prefix", str(tmp_path / "out")]
    words += ["--workers", "1", "--no-progress", "--deduplicate"]

    def stopped(folder, ignore_errors=False):
        if not ignore_errors:
            next(folder.glob("*.digests")).unlink()
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("data.preprocessing.pipeline.shutil.rmtree", stopped)
        assert main(words) == 130
    (tmp_path / f".out_text_document.md.{DEAD}").touch()  # of a data card
    assert main(words) == 0
    assert "complete: written before" in capsys.readouterr().out
    assert not [*tmp_path.glob("*.parts-*"), *tmp_path.glob(".*")]


def test_repeats_are_dropped_across_files(corpus, tmp_path, inline):
    recipe = PreprocessingSettings("bytes", keys=("text", "title"), deduplicate=True)
    manifests = preprocess(source_files(corpus), tmp_path / "out", recipe, progress=False)
    texts, titles = decoded(tmp_path / "out_text_document"), decoded(tmp_path / "out_title_document")
    assert len(set(texts)) == len(texts) == manifests["text"]["documents"]
    assert len(set(titles)) == len(titles) == 51
    assert "text 8 of a" in texts, "a text is not a repeat of the same words in a longer text"


def test_killed_job_resumes_after_its_finished_files(corpus, tmp_path, inline):
    recipe = PreprocessingSettings("bytes", append_eod=True, deduplicate=True, split=(80, 20))
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


def test_kill_inside_a_large_file_repeats_only_its_last_shard(tmp_path, inline, monkeypatch):
    """Parts of two blocks: what a killed job finished of a file is not tokenised again."""
    monkeypatch.setattr(readers, "BLOCK_BYTES", 300)
    monkeypatch.setattr(module, "SHARD_BLOCKS", 2)
    records = [{"text": f"text {n % 50} of the file", "meta": {"pile_set_name": "ab"[n % 2]}} for n in range(60)]
    files = source_files([write(tmp_path / "large.jsonl", records), write(tmp_path / "more.jsonl", records[:3])])
    recipe = PreprocessingSettings("bytes", append_eod=True, deduplicate=True)
    preprocess(files, tmp_path / "whole", recipe, progress=False)
    total = len(Inline.done)
    assert total > 8
    expected = {name.removeprefix("whole"): content for name, content in outputs(tmp_path / "whole").items()}
    submitted: list[int] = []

    class Killed(Inline):
        def submit(self, function, block):
            submitted.append(1)
            if len(submitted) > 11:
                raise KeyboardInterrupt
            return super().submit(function, block)

    monkeypatch.setattr(module, "_pool", lambda recipe, workers: Killed(recipe))
    Inline.done.clear()
    with pytest.raises(KeyboardInterrupt):
        preprocess(files, tmp_path / "cut", recipe, workers=1, progress=False)
    finished = sum(report["blocks"] for report in finished_reports(next(tmp_path.glob("cut.parts-*")), 1)[0])
    assert 0 < finished <= len(Inline.done)
    assert finished % 2 == 0
    monkeypatch.setattr(module, "_pool", lambda recipe, workers: Inline(recipe))
    Inline.done.clear()
    preprocess(files, tmp_path / "cut", recipe, progress=False)
    assert len(Inline.done) == total - finished
    assert {name.removeprefix("cut"): content for name, content in outputs(tmp_path / "cut").items()} == expected


def test_sources_and_files_of_the_documents(tmp_path, inline):
    files = [
        write(tmp_path / "a.jsonl", [{"text": f"a{n}", "meta": {"pile_set_name": "xyx"[n]}} for n in range(3)]),
        write(tmp_path / "b.jsonl", [{"text": "b", "meta": {"pile_set_name": "y"}}, {"text": "c"}]),
    ]
    manifest = preprocess(source_files(files), tmp_path / "out", PreprocessingSettings("bytes"), progress=False)["text"]
    assert manifest["sources"] == ["x", "y", "other"]
    assert manifest["documents_of_files"] == [[str(files[0]), 3], [str(files[1]), 2]]
    assert (manifest["padded_vocab_size"], manifest["append_eod"]) == (384, False)
    names, ids = read_sources(tmp_path / "out_text_document", 5)
    assert [names[i] for i in ids] == ["x", "y", "x", "y", "other"]
    other = write(tmp_path / "c.jsonl", [{"text": "c", "domain": {"name": "web"}}])
    recipe = PreprocessingSettings("bytes", source_key="domain.name")
    assert preprocess(source_files(other), tmp_path / "out", recipe, progress=False)["text"]["sources"] == ["web"]
    assert sources_path(tmp_path / "out_text_document").exists()
    preprocess(source_files(other), tmp_path / "out", PreprocessingSettings("bytes"), progress=False)
    assert not sources_path(tmp_path / "out_text_document").exists(), "of the files that were there before"


def test_outputs_equal_those_of_a_plain_loop(tmp_path, inline, monkeypatch):
    """Two keys, three sides, repeats within and across files and keys, sources, short texts, many parts."""
    monkeypatch.setattr(readers, "BLOCK_BYTES", 400)
    monkeypatch.setattr(module, "SHARD_BLOCKS", 2)
    draw = random.Random(0)
    records = [
        {key: " ".join(draw.choices(["a", "bé", "値"], k=draw.randrange(1, 6))) for key in ("text", "title")}
        | {"meta": {"pile_set_name": draw.choice("xyz")}}
        for _ in range(200)
    ]
    of_files = {"a": records[:120], "b": [], "c": records[120:150], "d": records[150:]}
    files = source_files([write(tmp_path / f"{name}.jsonl", of) for name, of in of_files.items()])
    recipe = PreprocessingSettings(
        "bytes", keys=("text", "title"), append_eod=True, split=(5, 3, 2), deduplicate=True, min_characters=2
    )
    manifests = preprocess(files, tmp_path / "out", recipe, progress=False)
    repeats = short = 0
    for key in recipe.keys:
        kept: dict[str, list[tuple[str, str, str]]] = {side: [] for side in ("train", "validation", "test")}
        seen: set[str] = set()
        for file, of in of_files.items():
            for record in of:
                text, document = record[key], Document(record[key], tmp_path / file)
                short += len(text) < 2
                repeats += len(text) >= 2 and text in seen
                if len(text) >= 2 and text not in seen:
                    side = ("train", "validation", "test")[recipe.side_of(split_position(document))]
                    kept[side].append((text, record["meta"]["pile_set_name"], file))
                    seen.add(text)
        for side, documents in kept.items():
            assert documents
            prefix, manifest = tmp_path / f"out_{side}_{key}_document", manifests[f"{side}_{key}"]
            assert [[*text.encode(), 256] for text, _, _ in documents] == [t.tolist() for t in IndexedTokens(prefix)]
            assert IndexedTokens(prefix).document_starts.tolist() == [*range(len(documents) + 1)]
            names, ids = read_sources(prefix, len(documents))
            assert [names[i] for i in ids] == [source for _, source, _ in documents]
            size = sum(len(text.encode()) for text, _, _ in documents)
            assert (manifest["documents"], manifest["bytes"]) == (len(documents), size)
            assert (manifest["tokens"], manifest["append_eod"]) == (size + len(documents), True)
            counts = Counter(file for _, _, file in documents)
            assert manifest["documents_of_files"] == [[str(tmp_path / f"{f}.jsonl"), counts[f]] for f in of_files]
    assert manifests["train_text"]["skipped"] == {"repeat": repeats, "short": short}


def test_outputs_of_a_side_without_documents_are_removed(tmp_path, inline):
    recipe = PreprocessingSettings("bytes", split=(50, 50))
    path = write(tmp_path / "x.jsonl", [{"text": f"document {n}", "meta": {"pile_set_name": "a"}} for n in range(20)])
    assert len(preprocess(source_files(path), tmp_path / "out", recipe, progress=False)) == 2
    write(path, [{"text": "document 0"}])
    (name,) = preprocess(source_files(path), tmp_path / "out", recipe, progress=False)
    assert {file.split("_document")[0] for file in outputs(tmp_path / "out")} == {f"out_{name}"}
    assert finished(source_files(path), tmp_path / "out", recipe)


def test_command_lines_of_gpt_neox_run(tmp_path, inline, sentencepiece):
    path = write(tmp_path / "x.jsonl", [{"text": "a"}])
    words = (
        f"--input {path} --jsonl-keys text --num-docs 1 --tokenizer-type SPMTokenizer --vocab-file {sentencepiece.path}"
    )
    words += f" --append-eod --output-prefix {tmp_path}/out --dataset-impl mmap --workers 1 --log-interval 10"
    assert main(words.split()) == 0
    assert IndexedTokens(tmp_path / "out_text_document").num_documents == 1


def test_a_comma_separates_inputs_or_is_part_of_a_name(tmp_path, inline):
    names = ("one, more.jsonl", "two.jsonl", "three.jsonl")
    one, two, three = (write(tmp_path / name, [{"text": name}]) for name in names)
    words = ["--tokenizer-type", "bytes", "--output-prefix", f"{tmp_path}/out", "--overwrite", "--no-progress"]
    for given, documents in (([str(one)], 1), ([f"{two},{three}"], 2), ([str(one), str(two)], 2)):
        assert main(["--input", *given, *words]) == 0
        assert IndexedTokens(tmp_path / "out_text_document").num_documents == documents


def test_parts_of_another_recipe_are_not_used(corpus, tmp_path, inline):
    files = source_files(corpus)
    Inline.stop_at = "d.jsonl"
    with pytest.raises(KeyboardInterrupt):
        preprocess(files, tmp_path / "out", PreprocessingSettings("bytes", append_eod=True), progress=False)
    Inline.stop_at = None
    Inline.done.clear()
    preprocess(files, tmp_path / "out", PreprocessingSettings("bytes"), progress=False)
    assert Inline.done == ["a.jsonl", "b.jsonl.gz", "d.jsonl"]


def test_parts_of_another_tokenizer_are_not_used(tmp_path, inline):
    """Change the entries of the vocabulary file between a kill and the next attempt."""
    for name in "ab":
        write(tmp_path / f"{name}.jsonl", [{"text": "word"}])
    files = source_files(str(tmp_path / "*.jsonl"))
    for more, stop_at in (("word", "b.jsonl"), ("other\nword", None)):
        (tmp_path / "vocab.txt").write_text(f"[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\n{more}\n")
        Inline.stop_at = stop_at
        with contextlib.suppress(KeyboardInterrupt):
            preprocess(
                files, tmp_path / "out", PreprocessingSettings("wordpiece", str(tmp_path / "vocab.txt")), progress=False
            )
    assert [ids.tolist() for ids in IndexedTokens(tmp_path / "out_text_document")] == [[6], [6]]
