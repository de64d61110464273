"""Suites during training: scores in metrics and plots, and failures that do not stop the run."""

from __future__ import annotations

import json
import warnings
from functools import partial
from pathlib import Path

import pytest

import train
from megatron_lite import trainer
from megatron_lite.fault_tolerance.guards import Watchdog
from megatron_lite.metrics.logger import read_metrics
from tests.cli.conftest import arguments, corpus, run_words
from tests.parity.launch import train_in_turn
from tools.evaluation import adapter
from tools.reporting.run_curves import plot_runs
from tools.reporting.run_report import collect

__all__ = ["arguments", "corpus"]

LENGTH = {"batch.sequence_length": 64}  # the longest choice has 39 bytes
SUITES = {"evaluation.suite_interval": 4, "checkpoint.interval": 4, **LENGTH}


def suite_words(arguments, data: Path, name: str = "run", suites: str = "[superglue, piqa]", **changes) -> list[str]:
    values = {"evaluation.suites": suites, "evaluation.data_directory": data, **SUITES, **changes}
    return arguments(name, **values)


def lines(run: Path, kind: str) -> list[dict]:
    return [line for line in read_metrics(run) if line["kind"] == kind]


def losses(run: Path) -> list[float]:
    return [line["loss"] for line in lines(run, "train")]


def test_scores_are_logged_and_do_not_change_training(arguments, eval_data, tmp_path, capsys):
    assert train.main(arguments("plain", **LENGTH, **{"checkpoint.interval": 4})) == 0
    assert train.main(suite_words(arguments, eval_data)) == 0
    assert losses(tmp_path / "run") == losses(tmp_path / "plain"), "the evaluation does not change training"
    actual = lines(tmp_path / "run", "evaluation")
    assert [line["step"] for line in actual] == [4, 8]
    for line in actual:
        assert {"superglue/BoolQ", "superglue/MultiRC", "superglue/average", "tasks/piqa acc", "tokens"} <= line.keys()
        assert all(0 <= value <= 100 for key, value in line.items() if "/" in key)
    assert "superglue/average" in capsys.readouterr().err
    # The last scores equal those of the last checkpoint.
    import eval as command

    out = tmp_path / "out" / "results.json"
    options = ["--suite", "superglue", "--data-dir", str(eval_data), "--device", "cpu", "--out", str(out)]
    assert command.main([str(tmp_path / "run"), *options]) == 0
    separate = json.loads(out.read_text())["results"]
    assert actual[-1]["superglue/COPA"] == pytest.approx(100 * separate["copa"]["acc,none"])
    assert actual[-1]["superglue/CB"] == pytest.approx(100 * separate["cb"]["f1,none"])
    plot_runs([tmp_path / "run"], tmp_path / "one.png")
    plot_runs([tmp_path / "run", tmp_path / "plain"], tmp_path / "two.png")
    assert (tmp_path / "one.png").stat().st_size > (tmp_path / "two.png").stat().st_size / 4
    assert collect(tmp_path / "run")["scores"]["step"] == [4, 8]


def test_failure_does_not_stop_the_run(arguments, eval_data, tmp_path, monkeypatch):
    def broken(*args, **kwargs):
        raise MemoryError("no room")

    monkeypatch.setattr(adapter.Scorer, "score_units", broken)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert train.main(suite_words(arguments, eval_data, suites="[copa]")) == 0
    assert any("evaluation.suites at step 4 failed: no room" in str(w.message) for w in caught)
    assert [(line["step"], line["error"]) for line in lines(tmp_path / "run", "evaluation_error")] == [
        (4, "MemoryError: no room"),
        (8, "MemoryError: no room"),
    ]
    assert len(losses(tmp_path / "run")) == 8
    assert not lines(tmp_path / "run", "evaluation")


def test_watchdog_acts_before_the_timeout_of_collectives(arguments, eval_data, monkeypatch):
    """Compare the limit of the watchdog with the timeout of collectives in the first step, in suites and otherwise."""
    minutes: dict[str, float] = {}
    limits: list[tuple[float, float]] = []
    kick = Watchdog.kick

    def recorded(watchdog: Watchdog, times: float = 1.0) -> None:
        if minutes:  # the first call comes with the start of the watchdog
            limits.append((times * 50, minutes["timeout"]))
        kick(watchdog, times)

    monkeypatch.setattr(trainer, "set_collective_timeout", lambda seconds: minutes.update(timeout=seconds / 60))
    monkeypatch.setattr(Watchdog, "kick", recorded)
    times = {"run.watchdog_minutes": 50, "run.timeout_minutes": 60, "run.save_timeout_minutes": 70}
    assert train.main(suite_words(arguments, eval_data, suites="[copa]", **times)) == 0
    assert set(limits) == {(150, 180), (50, 60)}
    assert limits[0] == (150, 180), "the first step"
    assert limits.count((150, 180)) == 3, "the first step and two evaluations"


@pytest.mark.parametrize(
    ("suites", "message"),
    [
        ("[superglu]", "evaluation.suites: .*superglu"),
        ("[arc_easy, boolq]", "arc_easy: the data folder lacks its file, .*name the other tasks in evaluation.suites"),
    ],
)
def test_wrong_configuration_is_refused_before_the_first_step(
    arguments, tmp_path, suites, message, capsys, monkeypatch
):
    import lm_eval.tasks

    folder = Path(lm_eval.tasks.__file__).parent / "super_glue"  # not the whole index, which takes seconds
    real = lm_eval.tasks.TaskManager
    if "superglu" in suites:
        monkeypatch.setattr(
            lm_eval.tasks, "TaskManager", lambda **_: real(include_defaults=False, include_path=[folder])
        )
    assert train.main(suite_words(arguments, tmp_path, suites=suites)) == 2
    assert not (tmp_path / "run" / "metrics.jsonl").exists()
    import re

    assert re.search(message, capsys.readouterr().err)


LAYOUTS = {
    "data": {},
    "zero 3": {"parallel.zero_stage": 3},
    "tensor and sequence": {"parallel.tensor": 2, "parallel.sequence_parallel": "true"},
}


@pytest.fixture(scope="module")
def runs(corpus, eval_data, tmp_path_factory) -> Path:
    """Train a run of one process, `one`, and runs of two processes in each layout."""
    folder = tmp_path_factory.mktemp("runs")
    words = partial(suite_words, partial(run_words, corpus, folder), eval_data, suites="[copa, boolq]")
    assert train.main(words("one")) == 0
    train_in_turn(words(name, **layout) for name, layout in LAYOUTS.items())
    return folder


@pytest.mark.parametrize("layout", LAYOUTS)
def test_two_processes_log_the_scores_of_one(layout, runs):
    """Data ranks share the requests; with ZeRO 3 every rank answers all of them."""
    actual, wanted = (lines(runs / name, "evaluation") for name in (layout, "one"))
    assert [line["step"] for line in actual] == [line["step"] for line in wanted] == [4, 8]
    for a, b in zip(actual, wanted, strict=True):
        assert {k: v for k, v in a.items() if "/" in k} == pytest.approx(
            {k: v for k, v in b.items() if "/" in k}, abs=1e-6
        )


def test_unreachable_hub_does_not_stop_the_run(arguments, tmp_path, monkeypatch):
    def unreachable(*args, **kwargs):
        raise ConnectionError("Couldn't reach the Hub")

    monkeypatch.setattr("datasets.load_dataset", unreachable)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert train.main(arguments(**{"evaluation.suites": "[copa]"})) == 0
    assert any("not evaluated in this run" in str(w.message) for w in caught)
    assert len(losses(tmp_path / "run")) == 8
