"""Held-out documents that the training text holds are found and named."""

import random

import pytest

from data.corpus.discovery import source_files
from data.indexed import IndexedWriter, token_dtype
from data.preprocessing.encode import PreprocessingSettings
from data.preprocessing.pipeline import preprocess
from tests.data.preprocessing.test_preprocess_data import write
from tools.inspect_data import main


@pytest.fixture
def prefixes(tmp_path, inline):
    draw = random.Random(0)
    words = [[f"w{draw.randrange(2000)}" for _ in range(100)] for _ in range(6)]
    train = [" ".join(w) for w in words[:4]] + ["two words"]
    held_out = [
        " ".join(words[4]),
        " ".join(words[0]).upper().replace(" ", ", "),  # the same words, written in another way
        train[1],
        " ".join(words[2][:70] + words[5][:30]),  # 58 of 88 13-grams
        " ".join(words[3][:30] + words[5][:70]),  # 18 of 88
        "two words",
        "w1",
    ]
    made = []
    for name, texts in (("train", train), ("held", held_out)):
        path = write(tmp_path / f"{name}.jsonl", [{"text": t, "meta": {"pile_set_name": "a"}} for t in texts])
        preprocess(source_files(path), tmp_path / name, PreprocessingSettings("bytes", append_eod=True), progress=False)
        made.append(str(tmp_path / f"{name}_text_document"))
    return made


def test_shared_documents_are_named(prefixes, capsys):
    train, held_out = prefixes
    assert main([held_out, "--trained-on", train]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(" (")[0] for line in lines] == [*(f"document {n}" for n in (2, 5, 1, 3)), lines[-1]]
    assert "(a, 'two words'): equals a training document" in lines[1]
    assert lines[2].endswith(": 100% of its 88 n-grams")
    assert lines[3].endswith(": 66% of its 88 n-grams")
    assert lines[-1] == (
        "documents in the training text: 4 of 7, 2 equal and 2 with at least 50% of their 13-word n-grams"
    )
    assert main([held_out, "--trained-on", train, "--overlap", "0.2"]) == 1
    assert "document 4 (a, " in capsys.readouterr().out
    assert main([train, "--trained-on", held_out, "--overlap", "1", "--ngram-words", "90"]) == 1
    assert "training text: 3 of 5, " in capsys.readouterr().out


def test_disjoint_sets_pass_and_unknown_tokenizers_are_refused(prefixes, tmp_path, capsys, inline):
    path = write(tmp_path / "more.jsonl", [{"text": "nothing in common"}])
    preprocess(source_files(path), tmp_path / "more", PreprocessingSettings("bytes"), progress=False)
    assert main([str(tmp_path / "more_text_document"), "--trained-on", *prefixes]) == 0
    assert "documents in the training text: 0 of 1, " in capsys.readouterr().out
    with IndexedWriter(tmp_path / "plain", token_dtype(257)) as writer:
        writer.add_document([1, 2])
    assert main([str(tmp_path / "plain"), "--trained-on", prefixes[0]]) == 2
    assert "plain.json does not exist, so the tokenizer of" in capsys.readouterr().err
    assert main([prefixes[1], "--trained-on", str(tmp_path / "trian_text_document")]) == 2
    assert "trian_text_document.idx does not exist. Beside it: " in capsys.readouterr().err
    assert main([prefixes[1], "--overlap", "0.4"]) == 2
    assert "--overlap 0.4 has no effect without --trained-on: add --trained-on PREFIX" in capsys.readouterr().err
