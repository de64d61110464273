"""The learning rates of a ladder: tried at the smaller sizes, taken by all."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.tools.compare.test_ladder import laddered
from tests.tools.compare.test_plan import EXPERIMENTS
from tools.compare.__main__ import main
from tools.compare.results import Result
from tools.compare.spec import plan_runs
from tools.compare.tuning import FILE, rates_table, tuning_comparison, with_tuned_rates, write_rates


def test_tuned_rates_become_those_of_every_size(tmp_path: Path, monkeypatch) -> None:
    """Try two factors at the smaller size; the best one scales the rate of both sizes."""
    sizes = {"s": {"optimizer": {"lr": 1e-3}}, "m": {"model": {"hidden_size": 128}, "optimizer": {"lr": 5e-4}}}
    tuning = {"sizes": ["s"], "models": ["metala"], "factors": [1, 2]}
    monkeypatch.chdir(tmp_path)
    planned = laddered(tuning=tuning, tokens_per_parameter={"s": [2, 1], "m": [1]})
    planned = planned.model_copy(update={"sizes": sizes})
    runs = plan_runs(tuning_comparison(planned))
    assert [run.name for run in runs] == ["metala-s_1lr-1x-seed1", "metala-s_2lr-1x-seed1"]
    assert [run.config.optimizer.lr for run in runs] == [1e-3, 2e-3]
    assert {run.folder.parent for run in runs} == {Path(f"runs/{planned.name}_tuning")}
    assert (
        len({run.config.model.mlp_width for run in (*runs, *plan_runs(planned, models=["metala"], sizes=["s"]))}) == 1
    )
    losses = {runs[0].name: 3.0, runs[1].name: 2.5}
    results = {name: Result(run, [], {"loss": losses[name]}, 9, 1.0) for run in runs for name in [run.name]}
    monkeypatch.setattr("tools.compare.tuning.read_results", lambda chosen: [results[run.name] for run in chosen])
    assert write_rates(planned, runs, []) is None
    assert with_tuned_rates(planned) == planned
    table = write_rates(planned, runs, list(losses))
    assert table is not None
    assert [list(row) for row in table.rows] == [
        ["s", "0.001", "3.0000", "3.0000", ""],
        ["s", "0.002", "2.5000", "2.5000", "chosen"],
    ]
    assert table.note.endswith(
        " Rates: s 0.002, m 0.001. The best factor is at the higher end of the grid: add a higher one to `ladder.tuning.factors`."
    )
    tuned = plan_runs(with_tuned_rates(planned), models=["metala"], seeds=[1])
    assert {run.size: run.config.optimizer.lr for run in tuned} == {"s-1x": 2e-3, "s-2x": 2e-3, "m-1x": 1e-3}
    # A rate on the command line has precedence.
    (given,) = plan_runs(
        with_tuned_rates(planned), models=["metala"], sizes=["m"], seeds=[1], overrides=["optimizer.lr=0.3"]
    )
    assert given.config.optimizer.lr == 0.3
    # A model that has left the comparison keeps its name in the table.
    others = {name: model for name, model in planned.models.items() if name != "metala"}
    assert rates_table(planned.model_copy(update={"models": others})).header[3] == "metala"
    results[runs[1].name] = replace(results[runs[1].name], final={"loss": math.nan})
    table = write_rates(planned, runs, [])
    assert table is None
    table = write_rates(planned, runs, list(losses))
    assert table is not None
    assert [list(row)[2:] for row in table.rows] == [["3.0000", "3.0000", "chosen"], ["-", "-", ""]]
    smaller = laddered(tuning={**tuning, "sizes": ["m"]}, parameters={"m": 300_000}, tokens_per_parameter={"m": [1]})
    with pytest.raises(ValueError, match=r"learning_rates.json has the size s, which ladder.parameters lacks: remove"):
        with_tuned_rates(smaller.model_copy(update={"sizes": sizes}))
    for content, problem in (
        ({"factor": "2", "losses": {"s": losses}}, "has the factor '2'; a number > 0 is allowed"),
        ({"factor": 2.0, "losses": {}}, "holds no losses of sizes"),
    ):
        (planned.folder / FILE).write_text(json.dumps(content))
        with pytest.raises(ValueError, match=f"learning_rates.json {problem}: remove it; --tune writes it again"):
            with_tuned_rates(planned)


def test_table_of_rates_names_models_whose_own_best_rate_is_another_one(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    tuning = {"sizes": ["s"], "models": ["metala", "retnet"], "factors": [1, 2]}
    sizes = {"s": {"optimizer": {"lr": 1e-3}}, "m": {"optimizer": {"lr": 5e-4}}}
    planned = laddered(tuning=tuning).model_copy(update={"sizes": sizes})
    losses = {"1.0": {"metala": 3.0, "retnet": 2.9}, "2.0": {"metala": 2.5, "retnet": 2.95}}
    planned.folder.mkdir(parents=True)
    (planned.folder / FILE).write_text(json.dumps({"factor": 2.0, "losses": {"s": losses}}))
    note = rates_table(with_tuned_rates(planned)).note
    label = planned.models["retnet"].label or "retnet"
    assert f" s: loss above that of the model's own best rate: {label} +0.0500." in note


def test_one_factor_is_chosen_for_all_sizes(tmp_path: Path, monkeypatch) -> None:
    """Choose twice the rate, with which the larger size gains 0.3 and the smaller one loses 0.1."""
    monkeypatch.chdir(tmp_path)
    sizes = {"s": {"optimizer": {"lr": 1e-3}}, "m": {"optimizer": {"lr": 5e-4}}}
    tuning = {"sizes": ["s", "m"], "models": ["metala"], "factors": [0.5, 2]}
    planned = laddered(tuning=tuning).model_copy(update={"sizes": sizes})
    runs = plan_runs(tuning_comparison(planned))
    losses = {"s_0.5lr": 3.0, "s_2lr": 3.1, "m_0.5lr": 2.9, "m_2lr": 2.6}
    results = {run.name: Result(run, [], {"loss": losses[run.size.rpartition("-")[0]]}, 9, 1.0) for run in runs}
    monkeypatch.setattr("tools.compare.tuning.read_results", lambda chosen: [results[run.name] for run in chosen])
    table = write_rates(planned, runs, [run.name for run in runs])
    assert table is not None
    assert [row[0] for row in table.rows if row[-1] == "chosen"] == ["s", "m"]
    assert json.loads((planned.folder / FILE).read_text())["factor"] == 2.0
    assert "s: loss above that of the model's own best rate: metala +0.1000." in table.note
    tuned = plan_runs(with_tuned_rates(planned), models=["metala"], seeds=[1])
    assert {run.size.partition("-")[0]: run.config.optimizer.lr for run in tuned} == {"s": 2e-3, "m": 1e-3}
    changed = planned.model_copy(update={"sizes": {**sizes, "s": {"optimizer": {"lr": 2e-3}}}})
    with pytest.raises(
        ValueError, match=r"factor 2 was measured with sizes.s.optimizer.lr = 0.001, which is 0.002 now: "
    ):
        with_tuned_rates(changed)
    for name in (runs[0].name, runs[-1].name):  # one run of every factor
        results[name] = replace(results[name], final={"loss": math.inf})
    with pytest.raises(
        ValueError,
        match=r"a run failed or diverged \(metala-s_0.5lr-.* in runs/tiny_tuning\).*diverged runs, lower ladder.tun",
    ):
        write_rates(planned, runs, [run.name for run in runs])
    assert json.loads((planned.folder / FILE).read_text())["factor"] == 2.0


def note_of(tmp_path: Path, monkeypatch, tuning: dict[str, Any], best: float, losses: dict[str, Any]) -> str:
    """Return the note below the rates of a ladder, whose section is `tuning` now."""
    tmp_path.mkdir(exist_ok=True)
    monkeypatch.chdir(tmp_path)
    sizes = {"s": {"optimizer": {"lr": 1e-3}}, "m": {"optimizer": {"lr": 5e-4}}}
    planned = laddered(tuning=tuning).model_copy(update={"sizes": sizes})
    planned.folder.mkdir(parents=True)
    (planned.folder / FILE).write_text(json.dumps({"factor": best, "losses": losses}))
    return rates_table(with_tuned_rates(planned)).note


@pytest.mark.parametrize(
    ("factors", "measured", "best", "end"),
    [
        ([1 / 3, 2], ("0.333333", "2"), 0.333333, "lower"),
        ([1, 2, 4], ("1", "2"), 2, "higher"),
        ([1, 2, 4], ("4", "1", "2"), 2, ""),
    ],
)
def test_end_of_the_grid_is_that_of_the_measured_factors(
    tmp_path: Path, monkeypatch, factors: list[float], measured: tuple[str, ...], best: float, end: str
) -> None:
    tuning = {"sizes": ["s"], "models": ["metala"], "factors": factors}
    losses = {"s": {factor: {"metala": abs(float(factor) - best)} for factor in measured}}
    note = note_of(tmp_path, monkeypatch, tuning, best, losses)
    sentence = f" The best factor is at the {end} end of the grid: add a {end} one to `ladder.tuning.factors`."
    assert sentence in note if end else "grid" not in note
    assert ("other sizes, models or factors" in note) is (len(measured) < len(factors))


def test_sizes_with_different_best_factors_ask_for_a_larger_size(tmp_path: Path, monkeypatch) -> None:
    tuning = {"sizes": ["s", "m"], "models": ["metala"], "factors": [0.5, 1]}
    losses = {"s": {"0.5": {"metala": 3.2}, "1": {"metala": 3.0}}, "m": {"0.5": {"metala": 2.8}, "1": {"metala": 2.9}}}
    sentence = " The sizes alone have different best factors (s 1, m 0.5): add a larger size to `ladder.tuning.sizes`."
    assert sentence in note_of(tmp_path / "a", monkeypatch, tuning, 1, losses)
    losses["m"]["1"]["metala"] = 2.7
    assert "sizes alone" not in note_of(tmp_path / "b", monkeypatch, tuning, 1, losses)


@pytest.mark.parametrize(
    "changes", [{}, {"sizes": ["s", "m"]}, {"models": ["metala", "retnet"]}, {"factors": [1, 2, 4]}]
)
def test_a_section_that_changed_after_the_tuning_is_named(tmp_path: Path, monkeypatch, changes: dict[str, Any]) -> None:
    tuning = {"sizes": ["s"], "models": ["metala"], "factors": [1, 2], **changes}
    losses = {"s": {"1": {"metala": 3.0}, "2": {"metala": 3.1}}}
    sentence = "`ladder.tuning` has other sizes, models or factors now: give `--tune` again."
    assert (sentence in note_of(tmp_path, monkeypatch, tuning, 1, losses)) is bool(changes)


def test_one_rate_with_several_factors_is_refused(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    words = [str(EXPERIMENTS / "ladder_small.yml"), "--tune", "--dry-run", "--models", "metala", "model.vocab_size=512"]
    assert main(words) == 0
    assert main([*words, "optimizer.lr=1e-3"]) == 2
    assert "--tune: metala has optimizer.lr = 0.001 with several factors of 600k" in capsys.readouterr().err


def test_sizes_of_the_ladder_select_their_rates(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    words = [str(EXPERIMENTS / "ladder_small.yml"), "--tune", "--dry-run", "--models", "metala", "model.vocab_size=512"]

    def planned(sizes: str) -> set[str]:
        assert main([*words, "--sizes", sizes]) == 0
        return set(re.findall(r"MetaLA +(\S+)", capsys.readouterr().out))

    assert planned("600k") == {"600k_0.5lr-20x", "600k_1lr-20x", "600k_2lr-20x"}
    assert planned("600k_2lr,2500k_1lr-10x") == {"600k_2lr-20x", "2500k_1lr-10x"}
    assert main([*words, "--sizes", "600k,22m"]) == 2
    message = "--tune --sizes 22m: ladder.tuning.sizes allows 600k, 2500k; add 22m to it"
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("tuning", "sizes", "message"),
    [
        (None, {}, "tiny has no section ladder.tuning; give its sizes, models and factors"),
        ({}, {"s": {}}, r"ladder.tuning scales sizes.s.optimizer.lr, which is missing"),
        (
            {},
            {"s": {"optimizer": {"lr": 1e-3}}, "m": {}},
            r"ladder.tuning scales sizes.m.optimizer.lr, which is missing",
        ),
        ({}, {"s": {"optimizer": {"lr": "fast"}}}, r"sizes.s.optimizer.lr = fast: a number > 0 is allowed"),
        ({}, {"s": {"optimizer": {"lr": -1e-3}}}, r"sizes.s.optimizer.lr = -0.001: a number > 0 is allowed"),
        ({}, {"s": {"optimizer": {"lr": math.inf}}}, r"sizes.s.optimizer.lr = inf: a number > 0 is allowed"),
        ({}, {"s": {"optimizer": None}}, r"sizes.s.optimizer.lr, which is missing"),
        ({"sizes": ["l"]}, {}, r"ladder.tuning.sizes has the size l; allowed are s, m"),
    ],
)
def test_tuning_that_cannot_be_is_refused(tuning: Any, sizes: dict[str, Any], message: str) -> None:
    section = None if tuning is None else {"sizes": ["s"], "models": ["metala"], "factors": [1, 2], **tuning}
    with pytest.raises(ValueError, match=message):
        tuning_comparison(laddered(tuning=section).model_copy(update={"sizes": sizes} if sizes else {}))
