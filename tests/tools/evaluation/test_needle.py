"""Needle in a haystack: texts, answers against greedy decoding, merged tables and refused input."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import eval as command
from tests.tools.masked_lm.conftest import masked_run
from tools.evaluation import needle
from tools.evaluation.haystack import split_filler
from tools.evaluation.needle import cells, check_needle, questions, run_needle
from tools.evaluation.open_model import locate_model
from tools.evaluation.request import EvaluationRequest, NeedleRequest
from tools.inference.generation import generate
from tools.loading.model import load_model

__all__ = ["masked_run"]

WORDS = ["--suite", "needle", "--device", "cpu", "--needles", "2", "--depths", "0,50,100", "--lengths", "256,512"]


def encode(text: str) -> list[str]:
    """Return one token per word."""
    return text.split()


TEXT = "".join(f"Sentence {i} says little. And more! A line ends\n" for i in range(200))


def test_texts_contain_one_needle_at_their_depth() -> None:
    filler = split_filler(TEXT, encode, 400)
    assert "".join(filler.pieces) == TEXT[: len("".join(filler.pieces))]
    assert 400 <= filler.total < 410
    texts = questions(filler, 300, [0, 25, 100], 3, seed=7, encode=encode)
    assert [(q.needle, q.depth) for q in texts[:4]] == [(0, 0), (0, 25), (0, 100), (1, 0)]
    bare = set()
    for question in texts:
        text, query = question.context.rsplit("\n\nQuestion: ", 1)
        sentence = next(line for line in text.replace("! ", "!\n").splitlines() if "secret" in line)
        start = text.index("The secret number")
        assert text.count("secret") == 1
        assert sentence.endswith(f"is{question.answer}.")
        city = query.split("secret number of ")[1].split("?")[0]
        assert f"of {city} is{question.answer}." in text
        assert query.endswith(f"The secret number of {city} is")
        # The needle is at most one sentence of six words from its depth.
        position = len(encode(text[:start]))
        whole = len(encode(text)) - 6
        assert abs(position - whole * question.depth / 100) <= 6
        assert 285 <= len(encode(question.context)) + 1 <= 300
        bare.add(" ".join(text.replace(f"The secret number of {city} is{question.answer}.", "").split()))
    assert len(bare) == 1  # the same filler for every needle and depth
    answers = {question.answer for question in texts}
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
    texts = questions(split_filler(TEXT, encode, 200), 100, [0, 100], 4, seed=0, encode=encode)
    right = [question.needle < (1 if question.depth else 3) for question in texts]
    actual = cells(texts, [(-1.0 - question.needle, hit) for question, hit in zip(texts, right, strict=True)])
    assert [(cell["depth"], cell["accuracy"]) for cell in actual] == [(0, 0.75), (100, 0.25)]
    assert actual[0]["log_likelihood"] == -2.5
    assert actual[0]["right"] == [True, True, True, False]


def test_answers_equal_greedy_decoding(trained_run: Path, tmp_path: Path, monkeypatch, capsys) -> None:
    out = tmp_path / "needle.json"
    reads = []
    answer = needle._answers

    def spied(opened, texts):
        # Replace some answers by the model's own continuation: these are right.
        loaded = opened.loaded
        for i, question in enumerate(texts[::3]):
            ids = loaded.tokenizer.encode(question.context)
            steps = generate(loaded.model, [ids], max_tokens=3, vocab_size=loaded.tokenizer.vocab_size, temperature=0.0)
            text = loaded.tokenizer.decode([int(step[0]) for step in steps if step[0] is not None])
            texts[3 * i] = needle.Question(question.length, question.depth, question.needle, question.context, text)
        answers = answer(opened, texts)
        for question, (_, greedy) in zip(texts, answers, strict=True):
            context = [int(i) for i in loaded.tokenizer.encode(question.context)]
            whole = [int(i) for i in loaded.tokenizer.encode(question.context + question.answer)]
            if whole[: len(context)] != context:
                continue
            tokens = torch.tensor([whole])
            logits = loaded.model(tokens)[0, len(context) - 1 : -1, : loaded.model.config.vocab_size]
            assert greedy == bool((logits.argmax(-1) == tokens[0, len(context) :]).all())
        reads.append((opened.lm.scorer.read, opened.lm.counts.tokens))
        return answers

    monkeypatch.setattr(needle, "_answers", spied)
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
    # The text before the needles is read once: for depths 0, 50 and 100 about half of all tokens.
    read, requested = reads[0]
    assert read < 0.65 * requested
    assert not (tmp_path / "answers").exists()


class Recalls(nn.Module):
    """Predict `says[prefix]` after each prefix, with a logit of `sure`. The state holds the ids that were read."""

    def __init__(self, model: Any, says: dict[tuple[int, ...], int], sure: float) -> None:
        super().__init__()
        self.config, self.says, self.sure, self.blocks = model.config, says, sure, ()
        self.places = {len(prefix) for prefix in says}
        self.weight = nn.Parameter(torch.zeros(1))

    def embedding(
        self, tokens: Tensor, mask: Tensor | None = None, state: Any = None, return_state: bool = False
    ) -> Any:
        ids = tokens if mask is None else tokens.masked_fill(~mask, -1)
        ids = ids if state is None else torch.cat([state["ids"], ids], 1)
        logits = torch.zeros(*tokens.shape, self.config.vocab_size)
        for row, line in enumerate(ids.tolist()):
            read = [i for i in line if i >= 0]
            new = sum(i >= 0 for i in line[-tokens.shape[1] :])
            for place in self.places & {*range(len(read) - new + 1, len(read) + 1)}:
                if (token := self.says.get(tuple(read[:place]))) is not None:
                    logits[row, place - 1 - (len(read) - new), token] = self.sure
        return (logits, {"ids": ids}) if return_state else logits

    def head(self, logits: Tensor) -> Tensor:
        return logits.clone()


def test_cells_of_a_model_with_a_window_form_a_staircase(trained_run: Path, tmp_path: Path, monkeypatch) -> None:
    # The model recalls facts at most 200 tokens back, so that it misses shallow needles of long texts.
    window, sure, out = 200, 5.0, tmp_path / "needle.json"
    expected: dict[tuple[int, float], list[tuple[bool, float]]] = {}
    answer, pictures = needle._answers, []

    def answered(opened, texts):
        says = {}
        tokenizer, vocabulary = opened.loaded.tokenizer, opened.loaded.model.config.vocab_size
        for question in texts:
            context, whole = (
                [*map(int, tokenizer.encode(text))] for text in (question.context, question.context + question.answer)
            )
            assert whole[: len(context)] == context
            fact = question.context.index("The secret number")
            recalled = len(context) - len(tokenizer.encode(question.context[:fact])) <= window
            for place in range(len(context), len(whole)):
                says[tuple(whole[:place])] = whole[place] if recalled else (whole[place] + 1) % vocabulary
            total = math.log(math.exp(sure) + vocabulary - 1)
            likely = (len(whole) - len(context)) * (recalled * sure - total)
            expected.setdefault((question.length, question.depth), []).append((recalled, likely))
        model = Recalls(opened.loaded.model, says, sure)
        opened.lm.model = opened.lm.scorer.model = model
        return answer(opened, texts)

    monkeypatch.setattr(needle, "_answers", answered)
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", lambda figure, *_, **__: pictures.append(figure))
    words = [str(trained_run), *WORDS, "--depths", "0,25,50,75,100", "--out", str(out)]
    for lengths in ("640", "256,384"):  # the second table joins the first
        assert command.main([*words, "--lengths", lengths]) == 0
    results = json.loads(out.read_text())
    assert {(cell["length"], cell["depth"]) for cell in results["cells"]} == set(expected)
    right = {}
    for cell in results["cells"]:
        wanted = expected[cell["length"], cell["depth"]]
        right[cell["depth"], cell["length"]] = cell["accuracy"]
        assert cell["right"] == [recalled for recalled, _ in wanted]
        assert cell["accuracy"] == sum(cell["right"]) / 2
        assert cell["log_likelihood"] == pytest.approx(sum(value for _, value in wanted) / 2, abs=1e-4)
    # The longer the text, the deeper the needles that the model finds.
    assert [[right[depth, length] for length in (256, 384, 640)] for depth in (0, 25, 50, 75, 100)] == [
        [0, 0, 0],
        [0, 0, 0],
        [1, 0, 0],
        [1, 1, 0],
        [1, 1, 1],
    ]
    left, likely = pictures[-1].axes
    assert [label.get_text() for label in left.get_xticklabels()] == ["256", "384", "640"]
    assert [label.get_text() for label in left.get_yticklabels()] == ["0", "25", "50", "75", "100"]
    assert left.get_ylim() == (4.5, -0.5)  # depth 0 on top
    cells = {(text.get_position()): text.get_text() for text in left.texts}
    assert [[cells[column, row] for column in range(3)] for row in range(5)] == [
        ["0", "0", "0"], ["0", "0", "0"], ["100", "0", "0"], ["100", "100", "0"], ["100", "100", "100"],
    ]  # fmt: skip
    assert left.images[0].get_array().tolist() == [
        [float(cells[column, row]) for column in range(3)] for row in range(5)
    ]
    assert (left.images[0].get_clim(), likely.images[0].get_clim()[1]) == ((0, 100), 0)
    assert "(trained at 32)" in left.get_xlabel()
    rows = (line.split("|")[1:-1] for line in out.with_suffix(".md").read_text().splitlines() if "|" in line)
    table = [[cell.strip() for cell in row] for row in rows]
    assert table[0] == ["depth, %", "256", "384", "640"]
    assert table[4] == ["50", "100", "0", "0"]
    assert table[7] == ["mean", "60.0", "40.0", "20.0"]


def test_interrupted_table_resumes(trained_run: Path, tmp_path: Path, monkeypatch, capsys) -> None:
    words = [str(trained_run), *WORDS, "--out", str(tmp_path / "needle.json")]
    write = needle.write_cells
    monkeypatch.setattr(needle, "write_cells", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    assert command.main(words) == 130
    assert "the same command resumes" in capsys.readouterr().err
    monkeypatch.setattr(needle, "write_cells", write)
    monkeypatch.setattr("tools.evaluation.scoring.Scorer._step", None)  # no batch is computed
    assert command.main(words) == 0
    assert "resuming with 12 answers" in capsys.readouterr().err


def test_refused_requests(trained_run: Path, masked_run: Path, tmp_path: Path, capsys) -> None:
    def refusal(*words: object) -> str:
        assert command.main([str(word) for word in (*words, "--out", tmp_path / "r" / "needle.json")]) == 2
        assert not (tmp_path / "r").exists()
        return capsys.readouterr().err

    assert "percent of the filler" in refusal(trained_run, *WORDS, "--depths", "0,101")
    binary = tmp_path / "binary.txt"
    binary.write_bytes(b"text\n\xff\xfe")
    assert f"--filler {binary}: no UTF-8 at byte 5" in refusal(trained_run, *WORDS, "--filler", binary)
    short = tmp_path / "short.txt"
    short.write_text("One line.\nTwo lines.\n")
    assert "--lengths 256: the filler has 21 tokens" in refusal(trained_run, *WORDS, "--filler", short)
    assert "is a masked model" in refusal(masked_run, *WORDS)
    assert "No such file" in refusal(trained_run, *WORDS, "--filler", tmp_path / "none.txt")


def test_hugging_face_model_gives_the_same_cells(trained_run: Path, tmp_path: Path) -> None:
    from tools.conversion.export_hf import export

    export(trained_run, tmp_path / "export")
    filler = tmp_path / "filler.txt"
    filler.write_text(TEXT)
    needle, actual = NeedleRequest((160,), (0, 100), needles=2, filler=filler), {}
    for name, model in (("ours", trained_run), ("theirs", tmp_path / "export")):
        request = EvaluationRequest(
            str(model),
            needle=needle,
            device="cpu",
            out=tmp_path / name / "needle.json",
            progress=False,
            trust_remote_code=True,
        )
        actual[name] = run_needle(request, needle, locate_model(request))
        assert not (tmp_path / name / "answers").exists()
    for ours, theirs in zip(actual["ours"]["cells"], actual["theirs"]["cells"], strict=True):
        assert ours["right"] == theirs["right"]
        assert ours["log_likelihood"] == pytest.approx(theirs["log_likelihood"], abs=1e-3)
    with pytest.raises(ValueError, match="--filler FILE"):
        check_needle(NeedleRequest(), huggingface=True)
    assert load_model(trained_run, device="cpu").config["batch"]["sequence_length"] == 32
