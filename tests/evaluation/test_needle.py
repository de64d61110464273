"""Needle in a haystack: the texts, the answers beside plain greedy decoding, what is read, what is kept."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path

import pytest
import torch

import eval as command
from tests.masked.conftest import masked_run
from tools.decoding import generate
from tools.evaluation import needle
from tools.evaluation.needle import cells, needle_command, questions, split_filler
from tools.load_model import load_model

__all__ = ["masked_run"]

WORDS = ["--suite", "needle", "--device", "cpu", "--needles", "2", "--depths", "0,50,100", "--lengths", "256,512"]


def encode(text: str) -> list[str]:
    """A token a word."""
    return text.split()


TEXT = "".join(f"Sentence {i} says little. And more! A line ends\n" for i in range(200))


def test_texts_hold_one_needle_at_their_depth() -> None:
    filler = split_filler(TEXT, encode, 400)
    assert "".join(filler.pieces) == TEXT[: len("".join(filler.pieces))]
    assert 400 <= filler.total < 410
    asked = questions(filler, 300, [0, 25, 100], 3, seed=7, encode=encode)
    assert [(q.needle, q.depth) for q in asked[:4]] == [(0, 0), (0, 25), (0, 100), (1, 0)]
    bare = set()
    for question in asked:
        text, asked_for = question.context.rsplit("\n\nQuestion: ", 1)
        sentence = next(line for line in text.replace("! ", "!\n").splitlines() if "secret" in line)
        start = text.index("The secret number")
        assert text.count("secret") == 1
        assert sentence.endswith(f"is{question.answer}.")
        city = asked_for.split("secret number of ")[1].split("?")[0]
        assert f"of {city} is{question.answer}." in text
        assert asked_for.endswith(f"The secret number of {city} is")
        # Nearest piece: a sentence of six words at most from the depth.
        before = len(encode(text[:start]))
        whole = len(encode(text)) - 6
        assert abs(before - whole * question.depth / 100) <= 6
        assert 285 <= len(encode(question.context)) + 1 <= 300
        bare.add(" ".join(text.replace(f"The secret number of {city} is{question.answer}.", "").split()))
    assert len(bare) == 1  # the same filler for every needle and depth
    answers = {question.answer for question in asked}
    assert len(answers) == 3
    assert {q.answer for q in questions(filler, 200, [50], 3, seed=7, encode=encode)} == answers
    assert {q.answer for q in questions(filler, 200, [50], 3, seed=8, encode=encode)} != answers
    with pytest.raises(ValueError, match=r"--lengths 1000: the filler has"):
        questions(filler, 1000, [0], 1, seed=0, encode=encode)
    # 7 words of the fact, 16 of the question with its answer, 4 of the first piece.
    with pytest.raises(ValueError, match=r"--lengths 10: .* take 27 tokens; name 27 or more"):
        questions(filler, 10, [0, 100], 2, seed=0, encode=encode)
    with pytest.raises(ValueError, match="--lengths 26:"):
        questions(filler, 26, [0, 100], 2, seed=0, encode=encode)
    shortest = questions(filler, 27, [0, 100], 1, seed=0, encode=encode)
    assert [len(encode(question.context)) for question in shortest] == [26, 26]


def test_cells_are_means() -> None:
    asked = questions(split_filler(TEXT, encode, 200), 100, [0, 100], 4, seed=0, encode=encode)
    right = [question.needle < (1 if question.depth else 3) for question in asked]
    found = cells(asked, [(-1.0 - question.needle, hit) for question, hit in zip(asked, right, strict=True)])
    assert [(cell["depth"], cell["accuracy"]) for cell in found] == [(0, 0.75), (100, 0.25)]
    assert found[0]["log_likelihood"] == -2.5
    assert found[0]["right"] == [True, True, True, False]


def test_answers_are_those_of_greedy_decoding(trained_run: Path, tmp_path: Path, monkeypatch, capsys) -> None:
    out = tmp_path / "needle.json"
    reads = []
    ask = needle._ask

    def spied(opened, asked):
        # The model's own continuation in place of some answers: these are right.
        loaded = opened.loaded
        for i, question in enumerate(asked[::3]):
            ids = loaded.tokenizer.encode(question.context)
            steps = generate(loaded.model, [ids], max_tokens=3, vocab_size=loaded.tokenizer.vocab_size, temperature=0.0)
            text = loaded.tokenizer.decode([int(step[0]) for step in steps if step[0] is not None])
            asked[3 * i] = needle.Question(question.length, question.depth, question.needle, question.context, text)
        answers = ask(opened, asked)
        for question, (_, greedy) in zip(asked, answers, strict=True):
            context = [int(i) for i in loaded.tokenizer.encode(question.context)]
            whole = [int(i) for i in loaded.tokenizer.encode(question.context + question.answer)]
            if whole[: len(context)] != context:
                continue
            tokens = torch.tensor([whole])
            logits = loaded.model(tokens)[0, len(context) - 1 : -1, : loaded.model.config.vocab_size]
            assert greedy == bool((logits.argmax(-1) == tokens[0, len(context) :]).all())
        reads.append((opened.lm.scorer.read, opened.lm.asked_tokens))
        return answers

    monkeypatch.setattr(needle, "_ask", spied)
    assert command.main([str(trained_run), *WORDS, "--out", str(out)]) == 0
    results = json.loads(out.read_text())
    assert [(cell["length"], cell["depth"]) for cell in results["cells"]] == [
        (length, depth) for length in (256, 512) for depth in (0, 50, 100)
    ]
    assert any(cell["accuracy"] > 0 for cell in results["cells"])
    assert results["model"]["trained_length"] == 32
    assert out.with_suffix(".png").stat().st_size > 5000
    assert "| depth, % |  256 |  512 |" in capsys.readouterr().out
    assert "| depth, % |  256 |  512 |" in out.with_suffix(".md").read_text()
    # What is before the needles is read once: of depths 0, 50 and 100 about half of all tokens.
    read, asked = reads[0]
    assert read < 0.65 * asked
    assert not (tmp_path / "answers").exists()


def test_an_interrupted_table_goes_on(trained_run: Path, tmp_path: Path, monkeypatch, capsys) -> None:
    words = [str(trained_run), *WORDS, "--out", str(tmp_path / "needle.json")]
    write = needle._write
    monkeypatch.setattr(needle, "_write", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    assert command.main(words) == 130
    assert "the same command goes on" in capsys.readouterr().err
    monkeypatch.setattr(needle, "_write", write)
    monkeypatch.setattr("tools.evaluation.scoring.Scorer._step", None)  # nothing is computed again
    assert command.main(words) == 0
    assert "going on with 12 answers" in capsys.readouterr().err


def test_what_cannot_be_asked(trained_run: Path, masked_run: Path, tmp_path: Path, capsys) -> None:
    def said(*words: object) -> str:
        assert command.main([str(word) for word in words]) == 2
        return capsys.readouterr().err

    assert "percent of the filler" in said(trained_run, *WORDS, "--depths", "0,101")
    short = tmp_path / "short.txt"
    short.write_text("One line.\nTwo lines.\n")
    assert "--lengths 256: the filler has 21 tokens" in said(trained_run, *WORDS, "--filler", short)
    assert "is a masked model" in said(masked_run, *WORDS)
    assert "No such file" in said(trained_run, *WORDS, "--filler", tmp_path / "none.txt")


def test_hugging_face_models_answer_alike(trained_run: Path, tmp_path: Path) -> None:
    from tools.conversion.export import export

    export(trained_run, tmp_path / "export")
    filler = tmp_path / "filler.txt"
    filler.write_text(TEXT)
    common = {
        "lengths": [160],
        "depths": [0, 100],
        "needles": 2,
        "seed": 0,
        "filler": filler,
        "device": "cpu",
        "dtype": "fp32",
        "max_length": None,
        "name": None,
        "batch_tokens": None,
        "progress": False,
        "trust_remote_code": True,
    }
    found = {}
    for name, model in (("ours", trained_run), ("theirs", tmp_path / "export")):
        options = Namespace(**common, checkpoint=str(model), out=tmp_path / name / "needle.json")
        found[name] = needle_command(options)
        assert not (tmp_path / name / "answers").exists()
    for ours, theirs in zip(found["ours"]["cells"], found["theirs"]["cells"], strict=True):
        assert ours["right"] == theirs["right"]
        assert ours["log_likelihood"] == pytest.approx(theirs["log_likelihood"], abs=1e-3)
    options.filler, options.out = None, tmp_path / "x" / "needle.json"
    with pytest.raises(ValueError, match="--filler FILE"):
        needle_command(options)
    assert load_model(trained_run, device="cpu").config["batch"]["sequence_length"] == 32
