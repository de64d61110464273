"""tools.inspect_data and tools.train_tokenizer."""

import gzip
import json

import numpy as np
import pytest

from data.corpus.discovery import source_files
from data.indexed import IndexedWriter
from data.preprocessing.encode import PreprocessingSettings
from data.preprocessing.pipeline import preprocess
from data.preprocessing.prepare_corpus import prepare_corpus
from data.tokenizer import load_tokenizer
from tools import inspect_data, train_tokenizer


@pytest.fixture(scope="module")
def prefix(tmp_path_factory):
    folder = tmp_path_factory.mktemp("inspect")
    path = folder / "x.jsonl"
    path.write_text("".join(json.dumps({"text": f"the text of document {n}\n" * (n + 1)}) + "\n" for n in range(20)))
    return prepare_corpus(
        path, tokenizer_type="bytes", validation_fraction=0, cache_directory=folder, progress=False
    ).train_prefix


def test_summary_counts_documents(prefix, capsys):
    assert inspect_data.main([str(prefix)]) == 0
    text = capsys.readouterr().out
    assert "documents  20\n" in text
    assert "end with the end-of-document token: 20 of the first 20" in text


def test_a_document_as_text(prefix, capsys):
    assert inspect_data.main([str(prefix), "--document", "2"]) == 0
    assert (
        capsys.readouterr().out
        == "document 2: 70 tokens\n" + "the text of document 2\n" * 3 + "\nfrom a file that is not recorded\n"
    )
    assert inspect_data.main([str(prefix), "--document", "20"]) == 2
    assert "there is no document 20: " in capsys.readouterr().err


def test_where_a_sample_comes_from(prefix, capsys):
    arguments = ["--sample", "1", "--sequence-length", "30", "--num-samples", "10", "--seed", "7"]
    assert inspect_data.main([str(prefix), *arguments]) == 0
    text = capsys.readouterr().out
    assert "(epochs: 1, seed 7)" in text
    assert "  document " in text
    assert ": a file that is not recorded" in text
    assert "of document" in text
    assert inspect_data.main([str(prefix), *arguments, "--sample", "900"]) == 2
    assert "there is no sample 900: these files give 0 to " in capsys.readouterr().err


def test_long_documents_and_those_that_each_packing_cuts(prefix, capsys):
    assert inspect_data.main([str(prefix), "--sequence-length", "256", "--min-tokens", "100"]) == 0
    text = capsys.readouterr().out
    assert "100 tokens or more: 16 documents, " in text
    assert "one epoch of 16 documents:\n    stream    " in text
    assert " documents cut (62.5%), padding " in text.split("best_fit")[1]
    words = ["--sample", "0", "--sequence-length", "256", "--order", "reshuffle", "--packing", "best_fit"]
    assert inspect_data.main([str(prefix), *words, "--min-tokens", "470"]) == 0
    text = capsys.readouterr().out
    assert "  document 19, tokens " in text
    assert inspect_data.main([str(prefix), *words, "--min-tokens", "482"]) == 2
    assert "data.blend.min_tokens = 482: the longest document of " in capsys.readouterr().err


def test_documents_without_sequences(tmp_path, capsys):
    with IndexedWriter(tmp_path / "x", np.dtype("<u2")) as writer:
        for sequences in ([], [[1, 256]], [], [[2], [3]], []):
            writer.add_document(*map(np.array, sequences))
    assert inspect_data.main([str(tmp_path / "x"), "--tokenizer-type", "bytes"]) == 0
    text = capsys.readouterr().out
    assert "documents  5 of 3 sequences" in text
    assert "end with the end-of-document token: 1 of the first 2" in text


def test_the_file_and_the_source_of_a_document(tmp_path, capsys, inline):
    for name, texts in (("a", ["one", "two"]), ("b", ["three"])):
        records = [{"text": text, "meta": {"pile_set_name": f"set {text}"}} for text in texts]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, records)))
    preprocess(
        source_files(tmp_path), tmp_path / "out", PreprocessingSettings("bytes", append_eod=True), progress=False
    )
    prefix = str(tmp_path / "out_text_document")
    assert inspect_data.main([prefix, "--document", "2"]) == 0
    assert capsys.readouterr().out.endswith(f"three\nfrom {tmp_path}/b.jsonl, text 1 of 1, set three\n")
    assert inspect_data.main([prefix, "--sample", "0", "--sequence-length", "12", "--order", "reshuffle"]) == 0
    text = capsys.readouterr().out
    assert f"document 1, tokens 0 to 3: {tmp_path}/a.jsonl, text 2 of 2, set two" in text
    assert inspect_data.main([prefix]) == 0
    assert "sources    set three 42.9%, set two 28.6%, set one 28.6% of the tokens" in capsys.readouterr().out


def test_pictures_and_common_tokens(prefix, capsys, tmp_path):
    picture = tmp_path / "lengths.png"
    assert inspect_data.main([str(prefix), "--histogram", str(picture), "--most-common", "2"]) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert "'t'" in capsys.readouterr().out.split("most common")[1]


def test_tokens_that_are_not_there_are_not_common(tmp_path, capsys):
    with IndexedWriter(tmp_path / "few", np.dtype("<u2")) as writer:
        writer.add_document(np.array([7, 7, 3]))
    assert inspect_data.main([str(tmp_path / "few"), "--most-common", "5"]) == 0
    shares = capsys.readouterr().out.split("most common")[1].splitlines()[1:]
    assert [line.split() for line in shares] == [["66.67", "%", "7"], ["33.33", "%", "3"]]


def test_files_that_are_not_there(tmp_path, capsys):
    assert inspect_data.main([str(tmp_path / "none")]) == 2
    assert "none.idx does not exist" in capsys.readouterr().err


def test_a_tokenizer_is_trained_and_measured(tmp_path, capsys, monkeypatch):
    output = tmp_path / "t.model"
    assert train_tokenizer.main(["--input", "stdlib/json", "--vocab-size", "400", "--output", str(output)]) == 0
    assert "400 pieces, 1.6" in capsys.readouterr().out
    tokenizer = load_tokenizer("sentencepiece", output)
    assert tokenizer.decode(tokenizer.encode("  def\t\n")) == "  def\t\n"
    assert train_tokenizer.main(["--input", str(tmp_path / "no"), "--output", str(output)]) == 2
    assert "does not exist" in capsys.readouterr().err
    monkeypatch.setattr(
        train_tokenizer, "train_sentencepiece", lambda *_, **__: pytest.fail("the output cannot be written")
    )
    assert train_tokenizer.main(["--input", "stdlib/json", "--output", str(output / "in_a_file.model")]) == 2
    assert "in_a_file.model: cannot be written (Not a directory" in capsys.readouterr().err


def test_a_tokenizer_of_one_document(tmp_path, capsys, monkeypatch):
    """Hold out the only document if its hash selects it."""
    monkeypatch.setattr(train_tokenizer, "split_position", lambda document: 0.005)
    (tmp_path / "a.txt").write_text("some words of a text that go on\n" * 300)
    words = ["--input", str(tmp_path / "a.txt"), "--output", str(tmp_path / "t.model"), "--vocab-size", "280"]
    assert train_tokenizer.main([*words, "--workers", "9" * 15]) == 0
    assert "280 pieces" in (printed := capsys.readouterr().out)
    assert "on the training text" in printed


def test_reading_the_text_of_a_tokenizer_shows_progress(tmp_path, monkeypatch):
    bars = []

    class Recorded(train_tokenizer.ProgressBar):
        def __init__(self, **settings):
            super().__init__(**settings)
            bars.append(self)

    monkeypatch.setattr(train_tokenizer, "ProgressBar", Recorded)
    lines = "".join(json.dumps({"text": f"some words of text {n} that go on\n" * 9}) + "\n" for n in range(30))
    (tmp_path / "a.jsonl").write_text(lines)
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    words = ["--input", str(tmp_path / "[ab].*"), "--output", str(tmp_path / "t.model"), "--vocab-size", "300"]
    assert train_tokenizer.main(words) == 0
    (bar,) = bars
    assert bar.n == bar.total == sum(path.stat().st_size for path in tmp_path.glob("*.jsonl*"))


def test_kill_before_the_record_repeats_only_the_training(tmp_path, monkeypatch):
    words = ["--input", "stdlib/json", "--output", str(tmp_path / "t.model"), "--vocab-size", "400"]

    def killed(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(train_tokenizer, "write_text", killed)
        assert train_tokenizer.main(words) == 130
    assert train_tokenizer.main(words) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["t.model", "t.model.json"]


def test_trained_tokenizer_is_replaced_only_with_overwrite(tmp_path, capsys, monkeypatch):
    output = tmp_path / "t.model"

    def run(*more: str) -> int:
        return train_tokenizer.main(["--input", "stdlib/json", "--output", str(output), "--vocab-size", "400", *more])

    assert run() == 0
    written = output.read_bytes()
    with monkeypatch.context() as patch:
        patch.setattr(train_tokenizer, "read_documents", None)
        assert run() == 0
        assert "t.model is complete" in capsys.readouterr().out
        assert run("--vocab-size", "410") == 2
        assert "t.model exists, made from other input" in capsys.readouterr().err
        assert run("--vocab-size", "10") == 2
        assert "vocab_size 10 is too small" in capsys.readouterr().err
        output.with_name("t.model.json").unlink()
        assert run() == 2
    assert output.read_bytes() == written
    assert run("--vocab-size", "410", "--overwrite") == 0
    assert load_tokenizer("sentencepiece", output).vocab_size == 410
