"""The task scores of a ladder's runs."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from tests.tools.compare.test_ladder_report import ladder_results, law
from tools.compare.ladder_scores import _correlation, scores


def test_scores_of_the_largest_rung_have_errors_chance_and_their_correlation_with_the_loss(tmp_path: Path) -> None:
    _, runs, results = ladder_results(tmp_path)
    for run, result in zip(runs, results, strict=True):
        if run.model == "softmax":
            value = 10 - (result.final or {})["loss"]
            content = {"results": {"tasks": {"boolq": {"acc": value}, "copa": {"acc": 0.6}}}, "details": {}}
            detail = {"stderr": 0.125, "chance": 0.25}
            content["details"] = {"tasks": {"boolq": {"acc": detail}, "copa": {"acc": {**detail, "majority": 0.4}}}}
            content["results"]["ruler"] = {"niah": {"score": 0}}
            content["details"]["ruler"] = {"niah": {"score": {"stderr": 0.0}}}
            (run.folder / "results.json").write_text(json.dumps(content))
    glue = {"runs": {"imdb": {"pretrained/0": {"accuracy": 0.8}, "pretrained/1": {"accuracy": 0.9}}}}
    glue["runs"]["rte"] = {"pretrained/0": {"accuracy": 0.5}, "pretrained/1": {"accuracy": 0.6}}
    glue["majority"] = {"rte": {"accuracy": 0.52}}
    (runs[8].folder / "imdb").mkdir()
    (runs[8].folder / "imdb" / "glue.json").write_text(json.dumps(glue))
    section = scores(["40m-10x"], runs, results)
    assert section.rows[0] == ["imdb after fine-tuning, accuracy", "-", "-", "0.850 ± 0.050"]
    assert list(section.header) == ["task", "baseline", "correlation with the loss", "Softmax"]
    row = section.rows[1]
    assert row[:3] == ["boolq, acc", "0.250", "-1.00"]
    assert row[3] == f"{10 - law(4e7, 4e8):.3f} ± 0.125"
    # Of the better of chance and the most frequent answer, 0.6 is within two standard errors of 0.125.
    assert len(section.rows) == 2
    assert (
        "two standard errors of the baseline: rte after fine-tuning, accuracy; copa, acc; niah, score." in section.note
    )
    assert f"Seeds with scores: {runs[8].seed}." in section.note
    assert not scores(["5m-10x"], runs, []).rows
    for run in runs:
        run.causal = False
    empty = scores(["5m-10x"], runs, [])
    assert empty.title == "Scores after fine-tuning at 5m-10x"
    assert empty.note == "Not measured: `tools.finetune_glue` with a run writes scores to the runs' folders."
    # A diverged run has no place in the correlation.
    results[0] = replace(results[0], final={"loss": math.nan})
    assert scores(["40m-10x"], runs, results).rows[1][2] == "-1.00"


@pytest.mark.parametrize(
    ("losses", "values", "expected"),
    [
        ([1, 2, 3, 4, 5], [5, 4, 3, 2, 1], "-1.00"),
        ([1, 1, 1, 2, 2], [5, 5, 5, 4, 4], "-1.00"),
        ([1, 2, 3, 4, 5], [5, 5, 5, 5, 5], "-"),
        ([1, 1, 1, 1, 1], [5, 4, 3, 2, 1], "-"),
        ([1, 2, 3, 4], [4, 3, 2, 1], "-"),
    ],
)
def test_correlation_needs_five_runs_and_differences(losses: list[float], values: list[float], expected: str) -> None:
    assert _correlation(list(zip(losses, values, strict=True))) == expected


def test_tasks_after_fine_tuning_with_one_seed_have_no_error(tmp_path: Path) -> None:
    _, runs, results = ladder_results(tmp_path)
    (runs[8].folder / "rte").mkdir()
    (runs[8].folder / "rte" / "glue.json").write_text(json.dumps({"runs": {"rte": {"0": {"accuracy": 0.6}}}}))
    ruler = {
        "results": {"ruler": {"niah": {"score": 0.05}}},
        "details": {"ruler": {"niah": {"score": {"stderr": 0.01}}}},
    }
    (runs[8].folder / "results.json").write_text(json.dumps(ruler))
    section = scores(["40m-10x"], runs, results)
    assert section.rows == [
        ["rte after fine-tuning, accuracy", "-", "-", "0.600"],
        ["niah, score", "0.000", "-", "0.050 ± 0.010"],
    ]
    assert section.note.endswith(" Not measured: Metala.")


def test_starts_and_trials_of_fine_tuning_are_not_averaged(tmp_path: Path) -> None:
    _, runs, results = ladder_results(tmp_path)
    starts = {"pretrained/0": 0.6, "pretrained/1": 0.7, "mnli/0": 0.9, "mnli/1": 0.8}
    for folder, hold_out in (("glue", None), ("trial", 0.5)):
        (runs[8].folder / folder).mkdir()
        content = {"hold_out": hold_out, "runs": {"rte": {key: {"accuracy": value} for key, value in starts.items()}}}
        (runs[8].folder / folder / "glue.json").write_text(json.dumps(content))
        starts = {"pretrained/0": 0.5}
    assert [[row[0], row[3]] for row in scores(["40m-10x"], runs, results).rows] == [
        ["rte after fine-tuning, accuracy", "0.650 ± 0.050"],
        ["rte after fine-tuning from mnli, accuracy", "0.850 ± 0.050"],
        ["rte after fine-tuning (trial), accuracy", "0.500"],
    ]
