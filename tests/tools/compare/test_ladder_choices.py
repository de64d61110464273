"""The mixers of a ladder by purpose, and the scores of its models."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tests.tools.compare.test_ladder import ladder_results, law
from tools.compare.ladder_choices import choices, scores
from tools.compare.results import Row


def test_mixers_within_the_noise_share_a_purpose() -> None:
    """Three models; two small rungs with two seeds give the noise of a difference: sqrt(0.0002) = 0.0141."""

    def row(model: str, size: str, *losses: float, **more: float) -> Row:
        values = {metric: {1: value} for metric, value in more.items()}
        return Row(model, model.upper(), size, 9, 9, {"loss": dict(enumerate(losses, 1)), **values})

    runs: list[Any] = [
        SimpleNamespace(model=model, config=SimpleNamespace(model=SimpleNamespace(mixers=mixers)))
        for model, mixers in (("a", ("attention",)), ("b", ("gla",)), ("c", ("gla", "attention")))
    ]
    small = [row("a", "s", 5.0, 5.0), row("b", "s", 5.1, 5.12), row("c", "s", 4.9, 4.88)]
    large = [
        row("a", "m", 4.00, test=4.5, **{"loss/x": 3.0, "loss/y": 5.0}),
        row("b", "m", 4.20, test=4.6, **{"loss/x": 3.1, "loss/y": 4.9}),
        row("c", "m", 3.99, test=4.7, **{"loss/x": 2.9, "loss/y": 4.8}),
    ]
    section = choices("m", [*small, *large], runs, {"a": 3.5, "b": 3.4})
    cells = {row[0]: list(row[1:]) for row in section.rows}
    assert cells["lowest loss"] == ["C, A", "3.9900", "B", "+0.2100 ± 0.0141"]
    # One model without softmax layers is no choice. data.test has one seed, so its noise is unknown.
    assert "lowest loss with a state of constant size" not in cells
    assert cells["text of an unseen source"] == ["A", "4.5000", "B", "+0.1000"]
    assert cells["last positions of a text"] == ["B", "3.4000", "A", "+0.1000 ± 0.0141"]
    assert cells["lowest loss in most sources"] == ["C", "2 of 2", "-", "-"]
    assert "two standard errors" in section.note
    assert "the noise of a difference is unknown" in choices("m", large, runs, {}).note


def test_scores_of_the_largest_rung_have_errors_chance_and_their_correlation_with_the_loss(tmp_path: Path) -> None:
    _, runs, results = ladder_results(tmp_path)
    for run, result in zip(runs, results, strict=True):
        if run.model == "softmax":
            value = 10 - (result.final or {})["loss"]
            content = {"results": {"ruler": {"niah": {"score": value}}}, "details": {}}
            content["details"] = {"ruler": {"niah": {"score": {"stderr": 0.125, "chance": 0.25}}}}
            (run.folder / "results.json").write_text(json.dumps(content))
    glue = {"runs": {"imdb": {"pretrained/0": {"accuracy": 0.8}, "pretrained/1": {"accuracy": 0.9}}}}
    (runs[8].folder / "imdb").mkdir()
    (runs[8].folder / "imdb" / "glue.json").write_text(json.dumps(glue))
    section = scores("40m-10x", runs, results)
    assert section.rows[0] == ["imdb after fine-tuning, accuracy", "-", "-", "0.850 ± 0.050"]
    assert list(section.header) == ["task", "chance", "correlation with the loss", "Softmax"]
    row = section.rows[1]
    assert row[:3] == ["niah, score", "0.250", "-1.00"]
    assert row[3] == f"{10 - law(4e7, 4e8):.3f} ± 0.125"
    assert not scores("5m-10x", runs, []).rows
    # A diverged run has no place in the correlation.
    results[0] = replace(results[0], final={"loss": math.nan})
    assert scores("40m-10x", runs, results).rows[1][2] == "-1.00"
