"""Results files: refused before the evaluation, or merged with an earlier one."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import eval as command
from megatron_lite.checkpoint.reader import resolve
from tools.evaluation.harness import Prepared, shots_of
from tools.evaluation.request import TaskRequest
from tools.evaluation.results_file import check_output, difference, suite_settings, with_tasks, write_harness_files
from tools.evaluation.tasks import TaskSet

MODEL = "tools.loading.model.read_weights"


@pytest.fixture
def no_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail if weights are read."""

    def read(*_: object) -> None:
        raise AssertionError("weights were read")

    monkeypatch.setattr(MODEL, read)


def test_samples_with_a_score_of_nan_are_json(tmp_path: Path) -> None:
    row = {"doc": {"text": "é"}, "arguments": [("a", "b")], "target": 1}
    row |= {
        "resps": [[(np.float32("nan"), False)]],
        "filtered_resps": [(-1.0, False)],
        "acc": np.int64(1),
        "f1": -math.inf,
    }
    _, path = write_harness_files(tmp_path, {"results": {}, "metalion": {}}, {"copa": [row]})
    (line,) = path.read_text(encoding="utf-8").splitlines()
    sample = json.loads(line, parse_constant=pytest.fail)
    assert (sample["doc"], sample["acc"], sample["f1"], sample["target"]) == ({"text": "é"}, 1, None, "1")
    assert sample["arguments"] == {"gen_args_0": {"arg_0": "a", "arg_1": "b"}}
    assert "é" in line


KINDS = {
    "suites": ({"metalion": {}, "results": {}}, ["--tasks", "copa"]),
    "needle": ({"cells": [], "model": {}}, ["--suite", "needle"]),
    "ruler": ({"tasks": [], "cells": [], "model": {}}, ["--suite", "ruler"]),
    "texts": ({"checkpoint": "", "results": {}}, ["--by-position"]),
}


@pytest.mark.parametrize("there", [*KINDS, "other"])
def test_results_of_another_kind_are_not_replaced(there, trained_run: Path, tmp_path: Path, no_weights, capsys) -> None:
    out = tmp_path / "r.json"
    out.write_text(json.dumps(KINDS[there][0] if there in KINDS else {"private": "notes"}))
    before = out.read_text()
    for kind, (_, words) in KINDS.items():
        if kind != there:
            assert command.main([str(trained_run), "--device", "cpu", *words, "--out", str(out)]) == 2
            assert "name another file with --out, or remove it" in capsys.readouterr().err
    if there in KINDS:
        with pytest.raises(ValueError, match="holds results of"):
            check_output(out)  # as `compare --out`
    assert out.read_text() == before


@pytest.mark.parametrize(
    "words",
    [
        ["--suite", "needle,superglue"],
        ["--suite", "superglue", "--data", "a.txt"],
        ["--suite", "needle", "--by-position"],
    ],
)
def test_one_file_for_several_kinds_is_refused(words, trained_run: Path, tmp_path: Path, no_weights, capsys) -> None:
    assert command.main([str(trained_run), *words, "--out", str(tmp_path / "r.json")]) == 2
    assert "have a results file each: request one of them at a time, or leave --out out" in capsys.readouterr().err


@pytest.mark.parametrize("words", [words for _, words in KINDS.values()])
def test_unwritable_output_is_refused(
    words, trained_run: Path, tmp_path: Path, no_weights, monkeypatch, capsys
) -> None:
    (tmp_path / "file").write_text("")

    def refusal(out: Path) -> str:
        assert command.main([str(trained_run), "--device", "cpu", *words, "--out", str(out)]) == 2
        return capsys.readouterr().err

    assert "file is no folder: name another file with --out" in refusal(tmp_path / "file" / "r.json")
    assert "is a folder: name another file with --out, for example" in refusal(tmp_path)
    for name in ("r.md", "r.txt", "r"):
        expected = f"{tmp_path / name}: the name must end in .json: name {tmp_path / 'r.json'} with --out"
        assert expected in refusal(tmp_path / name)
    monkeypatch.setattr("os.access", lambda *_: False)  # a user who may not; root may always
    assert f"no permission to write in {tmp_path}: name another file with --out" in refusal(tmp_path / "new" / "r.json")
    assert command.main([str(trained_run), "--device", "cpu", *words]) == 2
    assert f"no permission to write in {trained_run}" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("words", [words for _, words in KINDS.values()])
def test_checkpoint_is_located_once(words, trained_run: Path, eval_data: Path, tmp_path: Path, monkeypatch) -> None:
    located, loaded = [], []

    def located_path(path: Path | str) -> Path:
        located.append(path)
        return resolve(path)

    def read_weights(*_: object) -> None:
        loaded.append(True)
        raise ValueError("no weights")

    monkeypatch.setattr("tools.loading.model.resolve", located_path)
    monkeypatch.setattr(MODEL, read_weights)
    folders = ["--data-dir", str(eval_data)] if "--tasks" in words else []
    folders += ["--out", str(tmp_path / "r.json")]
    assert command.main([str(trained_run), "--device", "cpu", *folders, *words]) == 2
    assert located == [str(trained_run)]
    assert loaded, "the weights were requested"


def test_comparisons_and_tables_refuse_unwritable_output(tmp_path: Path, capsys) -> None:
    (tmp_path / "file").write_text("")
    for word in ("compare", "table"):
        assert command.main([word, "nowhere.json", "nowhere.json", "--out", str(tmp_path / "file" / "x.md")]) == 2
        assert "file is no folder: name another file with --out" in capsys.readouterr().err
    assert command.main(["compare", "nowhere.json", "nowhere.json", "--out", "x.md"]) == 2
    assert "x.md: the name must end in .json: name x.json with --out" in capsys.readouterr().err


def read(path: Path) -> dict:
    return json.loads(path.read_text())


def test_later_evaluation_adds_its_tasks(trained_run: Path, eval_data: Path, tmp_path: Path, capsys) -> None:
    out = tmp_path / "results.json"

    def evaluated(*words: str) -> int:
        place = ["--device", "cpu", "--data-dir", str(eval_data), "--out", str(out), "--max-length", "64"]
        return command.main([str(trained_run), *place, *words])  # the last of two options counts

    assert evaluated("--suite", "superglue", "--without", "copa,boolq,sglue_rte,cb,multirc") == 0
    first = read(out)
    assert evaluated("--tasks", "copa,piqa") == 0
    both = read(out)
    assert set(both["results"]) == {*first["results"], "copa", "piqa"}
    for task, metrics in first["results"].items():
        assert both["results"][task] == metrics
        assert both["metalion"]["documents"][task] == first["metalion"]["documents"][task]
        assert both["versions"][task] == first["versions"][task]
    assert both["metalion"]["suites"] == ["superglue", "tasks"]
    assert both["metalion"]["tokens_asked"] > first["metalion"]["tokens_asked"]
    row = next(line for line in out.with_suffix(".md").read_text().splitlines() if line.startswith("| tiny, step 30"))
    assert "piqa acc" in out.with_suffix(".md").read_text()
    assert row.split(" | ")[6].strip() == "-", "BoolQ is left out"
    assert row.split(" | ")[7].strip() != "-", "COPA has come"
    for words in ([], ["--shots", "0"], []):  # 0 is the task's own number
        assert evaluated("--tasks", "copa", *words) == 0
        assert read(out)["results"] == both["results"]
    text = out.read_text()
    capsys.readouterr()
    for words, message in (
        (["--max-length", "48"], "tokens at once 64, not 48"),
        (["--shots", "1"], "examples in the prompt 0, not 1"),
        (["--dtype", "fp64"], "number format float32, not float64"),
    ):
        assert evaluated("--tasks", "boolq", *words) == 2
        assert message in capsys.readouterr().err
    earlier = trained_run / "checkpoints" / "step_00000010"
    assert command.main([str(earlier), "--tasks", "copa", "--data-dir", str(eval_data), "--out", str(out)]) == 2
    assert f"{out} holds results of weights" in capsys.readouterr().err
    assert out.read_text() == text
    assert not (tmp_path / "answers").exists(), "no request was answered"


def test_repeated_task_replaces_its_numbers() -> None:
    def of(longest: int, other: list[str], **chance: float) -> dict:
        keys = ("split", "data", "chance", "requests", "truncated", "documents")
        tables = {key: dict(chance) if key == "chance" else dict.fromkeys(chance, longest) for key in keys}
        counts = {"tokens_asked": 10, "tokens_read": 5, "seconds": 1.0, "longest_request": longest}
        return {"results": dict(chance), "metalion": {**tables, **counts, "suites": ["s"], "other_split": other}}

    first, second = of(7, ["a", "b"], a=0.1, b=0.2), of(4, [], b=0.5, c=0.3)
    actual = with_tasks(first, second)
    assert actual["results"] == actual["metalion"]["chance"] == {"a": 0.1, "b": 0.5, "c": 0.3}
    assert actual["metalion"]["other_split"] == ["a"], "b is on its own split now"
    assert (actual["metalion"]["longest_request"], actual["metalion"]["tokens_asked"]) == (7, 20)
    assert with_tasks(of(7, [], b=0.2), second) == second, "all tasks are replaced"


def test_settings_are_compared_for_common_tasks() -> None:
    def of(**changes: object) -> dict:
        ours = {"split": {"copa": "test"}, "data": {"copa": {"a/test.jsonl": "0" * 64}}, "max_length": 8, "score": "s"}
        return suite_settings({"metalion": {**ours, "shots": 0, **changes}, "config": {"model_dtype": "torch.float32"}})

    assert difference({}, of()) == ""
    assert difference(of(), of(limit=6)) == "limit (--limit) not set, now 6"
    assert difference(of(), of(data={"copa": {"b/test.jsonl": "0" * 64}})) == ""
    assert difference(of(), of(data={"copa": {"a/test.jsonl": "1" * 64}})).startswith("copa's data")
    assert difference(of(), of(split={"copa": "validation"})) == "copa's split test, not validation"
    assert difference(of(), of(split={"piqa": "test"}, data={"piqa": {"a/test.jsonl": "1" * 64}})) == ""


def test_number_of_examples_is_the_tasks_own_by_default() -> None:
    def of(shots: int | None, **own: int | None) -> dict:
        tasks = {
            name: SimpleNamespace(task=SimpleNamespace(get_config={"num_fewshot": n}.get)) for name, n in own.items()
        }
        actual = shots_of(Prepared(TaskRequest(shots=shots), (), TaskSet(tasks, {}, [], None)))
        return suite_settings({"n-shot": actual, "metalion": {"shots": shots}})

    assert difference(of(None, copa=None, gsm8k=5), of(0, copa=None)) == ""
    assert difference(of(0, copa=None), of(None, gsm8k=5)) == ""
    assert difference(of(None, gsm8k=5), of(0, gsm8k=5)) == "gsm8k's examples in the prompt 5, not 0"
    assert difference(of(None, copa=None), of(1, boolq=None)) == "examples in the prompt 0, not 1"
    assert difference(of(3, cot=0), of(3, cot=0)) == ""
    assert of(3, cot=0)["cot's examples in the prompt"] == 0


def test_later_needle_adds_its_cells(trained_run: Path, tmp_path: Path, capsys) -> None:
    out = tmp_path / "needle.json"
    words = [str(trained_run), "--suite", "needle", "--device", "cpu", "--needles", "2", "--out", str(out)]
    assert command.main([*words, "--lengths", "192", "--depths", "0,100"]) == 0
    held = read(out)
    first = held["cells"]
    first[0]["log_likelihood"] = None  # JSON of NaN
    out.write_text(json.dumps(held))
    assert command.main([*words, "--lengths", "192,160", "--depths", "50,100"]) == 0
    actual = read(out)
    places = [(cell["length"], cell["depth"]) for cell in actual["cells"]]
    assert places == [(160, 50), (160, 100), (192, 0), (192, 50), (192, 100)]
    assert (actual["lengths"], actual["depths"]) == ([160, 192], [0, 50, 100])
    assert actual["cells"][2] == first[0]
    table = out.with_suffix(".md").read_text()
    assert re.search(r"^\| 0 +\| +- \| +0 \|$", table, flags=re.M)
    assert "nan" not in table
    capsys.readouterr()
    text = out.read_text()
    for more in (["--needles", "3"], ["--seed", "1"], ["--dtype", "fp64"], ["--filler", str(out)]):
        assert command.main([*words, "--lengths", "160", "--depths", "0", *more]) == 2
        assert f"{out} holds results of" in capsys.readouterr().err
    assert out.read_text() == text
