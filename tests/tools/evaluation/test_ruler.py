"""RULER: scores against cases by hand, tables, resumed and merged results, refused input, Hugging Face models."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from torch import nn

import eval as command
from data.synthetic.ruler import TASKS, RulerExample
from tests.tools.masked_lm.conftest import masked_run
from tools.evaluation import ruler
from tools.evaluation.cells import with_cells
from tools.evaluation.haystack import Filler, position_limit
from tools.evaluation.open_model import locate_model
from tools.evaluation.options import parse_evaluation
from tools.evaluation.prefix_tree import shared_order
from tools.evaluation.request import EvaluationRequest, RulerRequest
from tools.evaluation.ruler import Text, check_ruler, run_ruler, score_cells, string_match, table, task_names
from tools.inference import generation

__all__ = ["masked_run"]


def text(task: str, length: int, *answers: str, depth: float | None = None) -> Text:
    return Text(task, length, RulerExample("", "", "", answers, depth), 8)


@pytest.mark.parametrize(
    ("output", "answers", "score"),
    [
        (" 1234567.", ["1234567"], 1),
        (" 123456", ["1234567"], 0),
        ("AB12-cd, and more", ["ab12-CD"], 1),
        (" 1, 2,\n\n 3", ["1", "2", "3", "4"], 0.75),
        ("", ["1"], 0),
    ],
)
def test_score_is_the_share_of_answers_in_the_output(output: str, answers: list[str], score: float) -> None:
    assert string_match(output, answers) == score


def test_cells_and_tables_hold_means() -> None:
    texts = [
        text("niah_single_1", 512, "1", depth=0.0),
        text("niah_single_1", 512, "2", depth=1.0),
        text("vt", 512, "A", "B"),
        text("vt", 512, "C", "D"),
        text("vt", 256, "C", "D"),
    ]
    cells = score_cells(texts, ["1", "none", "A", "c d", ""])
    assert [(cell["task"], cell["length"], cell["score"]) for cell in cells] == [
        ("niah_single_1", 512, 0.5),
        ("vt", 512, 0.75),
        ("vt", 256, 0),
    ]
    assert [cell["stderr"] for cell in cells] == [0.5, 0.25, None]
    results = with_cells({}, {"title": "m", "samples": 2, "cells": cells}, "task", list(TASKS).index)
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table(results).splitlines() if "|" in line]
    assert lines[0] == ["task", "256", "512", "average"]
    assert lines[2:5] == [
        ["niah_single_1", "-", "50.0", "-"],
        ["vt", "0.0", "75.0", "37.5"],
        ["average", "-", "62.5", "-"],
    ]
    assert lines[5] == ["depth, %", "256", "512", "average"]
    assert lines[7:] == [["0", "-", "100.0", "-"], ["100", "-", "0.0", "-"], ["average", "-", "50.0", "-"]]


WORDS = ["--suite", "ruler", "--device", "cpu", "--samples", "2", "--tasks", "niah_single_1,niah_multiquery"]


def test_run_answers_resumes_and_merges(trained_run: Path, tmp_path: Path, monkeypatch, capsys) -> None:
    out, pictures = tmp_path / "ruler.json", []
    words = [str(trained_run), *WORDS, "--lengths", "1000", "1100", "--out", str(out)]
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", lambda figure, *_, **__: pictures.append(figure))
    write = ruler.write_cells
    monkeypatch.setattr(ruler, "write_cells", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    assert command.main(words) == 130
    assert "the same command resumes with the cached answers" in capsys.readouterr().err
    monkeypatch.setattr(ruler, "write_cells", write)
    monkeypatch.setattr("tools.evaluation.adapter.generate", None)  # nothing is generated
    assert command.main([*words, "--log-samples"]) == 0
    printed = capsys.readouterr()
    assert "resuming with 8 answers" in printed.err
    assert "was trained at 32 tokens: longer texts measure extrapolation" in printed.err
    first = json.loads(out.read_text())
    assert (first["tasks"], first["lengths"]) == (["niah_single_1", "niah_multiquery"], [1000, 1100])
    assert [row["depth"] for row in first["cells"][0]["examples"]] == [0.0, 0.7]
    for cell in first["cells"]:
        for row in cell["examples"]:
            assert row["score"] == string_match(row["output"], row["answers"])
    assert "| task            | 1,000 | 1,100 | average |" in out.with_suffix(".md").read_text()
    assert "| task            | 1,000 | 1,100 | average |" in printed.out
    left, right = pictures[-1].axes
    assert [label.get_text() for label in left.get_yticklabels()] == first["tasks"]
    assert [label.get_text() for label in right.get_yticklabels()] == ["0", "70"]
    assert "(trained at 32)" in left.get_xlabel()
    assert not (tmp_path / "answers").exists()
    scores = json.loads((trained_run / "results.json").read_text())["results"]["ruler"]
    assert set(scores["niah_single_1"]) == {"score at 1,000 tokens", "score at 1,100 tokens"}

    monkeypatch.undo()
    assert command.main([*words[:-4], "1000", "--out", str(out), "--tasks", "fwe"]) == 0
    merged = json.loads(out.read_text())
    assert (merged["tasks"], merged["lengths"]) == (["niah_single_1", "niah_multiquery", "fwe"], [1000, 1100])
    assert [cell for cell in merged["cells"] if cell["task"] != "fwe"] == first["cells"]
    for more, message in (
        (["--samples", "3"], "--samples 2, not 3"),
        (["--seed", "1"], "--seed 0, not 1"),
        (["--filler", str(out)], "filler generated prose, not"),
    ):
        assert command.main([*words, *more]) == 2
        assert f"{out} holds results of {message}" in capsys.readouterr().err
    assert json.loads(out.read_text()) == merged
    out.write_text(json.dumps({key: value for key, value in merged.items() if key != "texts_version"}))
    assert command.main(words) == 2
    assert f"{out} holds results of texts of version 1, not 2" in capsys.readouterr().err


def test_refused_requests(trained_run: Path, masked_run: Path, tmp_path: Path, monkeypatch, capsys) -> None:
    def refusal(*words: object) -> str:
        assert command.main([str(word) for word in (*words, "--out", tmp_path / "r" / "ruler.json")]) == 2
        assert not (tmp_path / "r").exists()
        return capsys.readouterr().err

    run = (trained_run, *WORDS)
    assert (
        "--tasks piqa: there is no such task of RULER (evaluate other tasks without --suite ruler); allowed are"
        in refusal(*run, "--tasks", "piqa")
    )
    close = "did you mean niah_single_3 or niah_single_2 or niah_single_1?\n"
    assert refusal(*run, "--tasks", "niah_single").endswith(f"(evaluate other tasks without --suite ruler); {close}")
    assert "--without leaves no task of RULER" in refusal(*run, "--tasks", "vt", "--without", "vt")
    assert "--without cew: there is no such task of RULER; did you mean cwe" in refusal(*run, "--without", "cew")
    short = refusal(*run, "--lengths", "100", "600")
    assert "length 100: the shortest example of niah_single_1 takes" in short
    assert "length 100: the shortest example of niah_multiquery takes" in short
    assert "with --lengths, or leave out what does not fit: --without niah_single_1,niah_multiquery\n" in short
    filler = tmp_path / "filler.txt"
    filler.write_text("One line.\nTwo lines.\n")
    short = refusal(*run, "--lengths", "600", "--filler", filler)
    long = tmp_path / "long.txt"
    long.write_text("One line.\n" * 120)
    with monkeypatch.context() as unanswered:
        unanswered.setattr(ruler, "_outputs", lambda *_: pytest.fail("texts are answered"))
        assert "length 9000: the filler has" in refusal(*run, "--lengths", "1000,9000", "--filler", long)
    assert "length 600: the filler has 21 tokens; name a longer text with --filler" in short
    assert short.endswith("--without niah_multiquery\n"), "the other task has no prose"
    assert "is a masked model" in refusal(masked_run, *WORDS)
    monkeypatch.setattr(ruler, "position_limit", lambda _: 512)
    assert "--lengths 600: tiny, step 30 has 512 positions; name 512 or less" in refusal(*run, "--lengths", "600")


def test_filler_of_any_sentences_is_long_enough_if_its_tokens_are() -> None:
    opened, request = (
        SimpleNamespace(lm=SimpleNamespace(tok_encode=str.split)),
        RulerRequest(("niah_single_2",), samples=1),
    )
    pieces = ["One line. "] * 40 + ["word " * 60] * 16
    filler = Filler(pieces, [len(piece.split()) for piece in pieces])
    assert filler.total == 1040
    (text,) = ruler._texts(opened, request, filler, 1024)
    assert 1024 - 128 - 60 < len(text.example.prompt.split()) <= 1024 - 128


def test_without_may_name_tasks_of_another_suite() -> None:
    check_ruler(RulerRequest(without=("boolq",)), alone=False)


def test_learned_positions_of_a_hugging_face_model_are_a_limit() -> None:
    tokens, positions = nn.Embedding(8, 4), nn.Embedding(64, 4)
    limits = []
    for modules in ({"wte": tokens, "wpe": positions}, {"embed_tokens": tokens}):  # as GPT-2 and as Llama
        model = nn.ModuleDict(modules)
        model.config = SimpleNamespace(max_position_embeddings=64)
        limits.append(position_limit(model))
    assert limits == [64, None]


def test_common_beginning_of_prompts_is_read_once(trained_run: Path, tmp_path: Path, monkeypatch) -> None:
    read: list[int] = []
    forward = generation._last_logits

    def counted(model, tokens, mask, state):
        read.append(tokens.numel() if mask is None else int(mask.sum()))
        return forward(model, tokens, mask, state)

    monkeypatch.setattr(generation, "_last_logits", counted)
    wanted = RulerRequest(("niah_single_2",), (), (1000,), samples=11)
    request = EvaluationRequest(str(trained_run), ruler=wanted, device="cpu", progress=False, save_samples=True)
    located = locate_model(request)
    actual = []
    for name, order in (("shared", None), ("apart", lambda prompts: (list(range(len(prompts))), [0] * len(prompts)))):
        if order:
            monkeypatch.setattr("tools.evaluation.adapter.shared_order", order)
        read.clear()
        results = run_ruler(replace(request, out=tmp_path / f"{name}.json"), wanted, located)
        actual.append((results["cells"], sum(number for number in read if number > 11)))
    assert actual[0][0] == actual[1][0]
    # Eleven needles at depths from 0 to 100 %: two batches, each with the common beginning of its prompts.
    assert actual[0][1] < 0.8 * actual[1][1]


def test_prompts_are_ordered_by_growing_common_beginnings() -> None:
    text = np.arange(1000)
    prompts = [np.concatenate([text[:place], [5000 + place], text[place:600]]) for place in (400, 5, 150, 560)]
    order, shared = shared_order([*prompts, np.array([7])])
    assert order == [1, 4, 2, 0, 3]
    assert shared == [0, 0, 150, 400, 600]
    assert shared_order([]) == ([], [])
    assert shared_order([prompts[0], prompts[0]]) == ([0, 1], [600, 600])
    assert shared_order([prompts[0]]) == ([0], [600])


def test_tasks_of_the_command_line_belong_to_ruler() -> None:
    words = ["run", "--suite", "ruler,superglue", "--tasks", "vt,fwe", "--lengths", "1024", "2,048", "--without", "fwe"]
    request = EvaluationRequest.from_options(parse_evaluation([*words, "--samples", "7", "--seed", "3", "--samples"]))
    assert request.ruler == RulerRequest(("vt", "fwe"), ("fwe",), (1024, 2, 48), 7, 3)
    assert (request.tasks.suites, request.tasks.tasks, request.save_samples) == (("superglue",), (), True)
    assert task_names(request.ruler) == ["vt"]
    assert task_names(RulerRequest()) == list(TASKS)


def test_prompt_ends_where_a_token_of_the_text_ends() -> None:
    def spaces_begin(text: str) -> list[int]:
        return [hash(part) for part in re.findall(r" ?[^ ]+| +", text)]

    def spaces_end(text: str) -> list[int]:
        return [hash(part) for part in re.findall(r"[^ ]+ ?| +", text)]

    example = RulerExample("", "", " the number is", ("1",))
    encoders = (spaces_begin, spaces_end, lambda text: list(text.encode()), lambda text: [*spaces_begin(text), 0])
    assert [ruler.space_before_answer(encode, example) for encode in encoders] == ["", " ", "", ""]


@pytest.mark.parametrize(
    ("words", "samples"), [(["--limit", "7"], 7), (["--limit", "0.015"], 2), (["--limit", "7", "--samples", "5"], 5)]
)
def test_limit_is_the_number_of_texts_per_cell(words: list[str], samples: int) -> None:
    request = EvaluationRequest.from_options(parse_evaluation(["run", "--suite", "ruler", *words]))
    assert request.ruler is not None
    assert request.ruler.samples == samples


def test_hugging_face_model_gives_the_same_outputs(trained_run: Path, tmp_path: Path) -> None:
    from tools.conversion.export_hf import export

    export(trained_run, tmp_path / "export")
    wanted, actual = RulerRequest(("niah_single_2", "fwe"), (), (900,), samples=2), {}
    for name, model in (("ours", trained_run), ("theirs", tmp_path / "export")):
        request = EvaluationRequest(
            str(model),
            ruler=wanted,
            device="cpu",
            out=tmp_path / name / "ruler.json",
            progress=False,
            save_samples=True,
            trust_remote_code=True,
        )
        actual[name] = run_ruler(request, wanted, locate_model(request))
        assert not (tmp_path / name / "answers").exists()
    assert actual["ours"]["cells"] == actual["theirs"]["cells"]
    assert actual["ours"]["model"]["trained_length"] == actual["theirs"]["model"]["trained_length"] == 32
