"""Read the task scores of a ladder's runs and compare them with the loss."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import NamedTuple

from data.atomic_io import read_json
from tools.compare.results import FEW_RUNS, Result
from tools.compare.spec import Run
from tools.evaluation.results_file import RESULTS_FILE
from tools.reporting.runs_page import Section


class Score(NamedTuple):
    """Hold a score, its standard error and its baseline, the better of chance and the most frequent answer; None if unknown."""

    value: float
    error: float | None = None
    baseline: float | None = None


# (suite, task, metric) -> score of a run.
Scores = dict[tuple[str, str, str], Score]


class CompleteRun(NamedTuple):
    """Hold a run, its validation loss and its scores, which are empty if nothing was evaluated."""

    run: Run
    loss: float
    scores: Scores


def scores(reached: Sequence[str], runs: Sequence[Run], results: Sequence[Result]) -> Section:
    """Return the scores of the largest rung that has any, and their correlation with the loss over the runs of every rung.

    Tasks in which the runs are at the baseline are only named. reached: the rungs with a complete run, in ascending order.
    """
    losses = {result.run.folder: result.final["loss"] for result in results if result.final}
    complete = [
        CompleteRun(run, losses[run.folder], _scores_of(run))
        for run in runs
        if math.isfinite(losses.get(run.folder, math.nan))
    ]
    scored = [entry for entry in complete if entry.scores]
    sizes = {entry.run.size for entry in scored}
    rung = next((rung for rung in reversed(reached) if rung in sizes), reached[-1])
    scored_here = [entry for entry in scored if entry.run.size == rung]
    by_model: dict[str, list[Scores]] = {}
    for entry in scored_here:
        by_model.setdefault(entry.run.label, []).append(entry.scores)
    keys = dict.fromkeys(key for seeds in by_model.values() for of_seed in seeds for key in of_seed)
    cells, at_baseline = [], []
    for key in keys:
        groups = [[of_seed[key] for of_seed in seeds if key in of_seed] for seeds in by_model.values()]
        of_runs = [score for group in groups for score in group]
        name, baseline = f"{key[1]}, {key[2]}", of_runs[0].baseline
        if not _above_baseline(of_runs):
            at_baseline.append(name)
            continue
        pairs = [(entry.loss, entry.scores[key].value) for entry in scored if key in entry.scores]
        row = [name, "-" if baseline is None else f"{baseline:.3f}", _correlation(pairs)]
        cells.append([*row, *(_mean_score(group) if group else "-" for group in groups)])
    labels = dict.fromkeys(entry.run.label for entry in complete if entry.run.size == rung)
    unmeasured = [label for label in labels if label not in by_model]
    note = _note(sorted({entry.run.seed for entry in scored_here}), at_baseline, unmeasured)
    header = ["task", "baseline", "correlation with the loss", *by_model]
    causal = all(run.causal for run in runs)
    commands = "`--recall`, and `eval.py` with a run, write" if causal else "`tools.finetune_glue` with a run writes"
    missing = f"Not measured: {commands} scores to the runs' folders."
    title = f"Zero-shot scores and recall at {rung}" if causal else f"Scores after fine-tuning at {rung}"
    return Section(title, header, cells, note if keys else missing)


def _note(seeds: Sequence[int], at_baseline: Sequence[str], unmeasured: Sequence[str]) -> str:
    """Return the text below the table.

    seeds: of the runs with scores. at_baseline: tasks without a row. unmeasured: models without scores.
    """
    note = (
        "Score ± standard error over the examples, of fine-tuned models over the seeds. Baseline: the better of chance "
        f"and the most frequent answer. Correlation: of score and validation loss over all runs with the score, from {FEW_RUNS} "
        "runs on."
    )
    if seeds:
        note += f" Seeds with scores: {', '.join(map(str, seeds))}."
    if at_baseline:
        names = "; ".join(at_baseline)
        note += f" Left out, since the mean of the models is within two standard errors of the baseline: {names}."
    if unmeasured:
        note += f" Not measured: {', '.join(unmeasured)}."
    return note


def _scores_of(run: Run) -> Scores:
    """Return the scores of `tools.finetune_glue`, and those of the results file of `eval.py`, which may be missing."""
    path, scores_by_key = run.folder / RESULTS_FILE, _fine_tuned(run)
    if not path.is_file():
        return scores_by_key
    content = read_json(path, f"remove it; python eval.py {run.folder} writes it again", "results")
    for suite, tasks in content["results"].items():
        for task, metrics in tasks.items():
            details = content.get("details", {}).get(suite, {}).get(task, {})
            for metric, value in metrics.items():
                if isinstance(value, int | float) and metric in details:
                    detail = details[metric]
                    baselines = [detail[key] for key in ("chance", "majority") if detail.get(key) is not None]
                    # Retrieval tasks have no chance: an answer of many digits is never guessed.
                    baseline = 0.0 if suite in ("ruler", "needle") else max(baselines, default=None)
                    scores_by_key[suite, task, metric] = Score(float(value), detail.get("stderr"), baseline)
    return scores_by_key


def _fine_tuned(run: Run) -> Scores:
    """Return mean and standard error over the seeds that `tools.finetune_glue` wrote for a run.

    Runs from the weights of another task, and trials on a part of the validation split, are scores of their own.
    """
    scores_by_key: Scores = {}
    for path in sorted(run.folder.glob("*/glue.json")):
        content = read_json(path, f"remove it; tools.finetune_glue {run.folder} writes it again", "runs")
        trial = "" if content.get("hold_out") is None else " (trial)"
        groups: dict[tuple[str, str, str], list[float]] = {}
        for task, runs in content["runs"].items():
            for number, values in runs.items():  # START/SEED
                start = number.rpartition("/")[0]
                words = "" if start in ("", "pretrained") else f" from {start}"
                for metric, value in values.items():
                    if value is not None:
                        groups.setdefault((task, f"{words}{trial}", metric), []).append(value)
        for (task, words, metric), of_seeds in groups.items():
            error = statistics.stdev(of_seeds) / math.sqrt(len(of_seeds)) if len(of_seeds) > 1 else None
            baseline = content.get("majority", {}).get(task, {}).get(metric)
            key = "fine-tuned", f"{task} after fine-tuning{words}", metric
            scores_by_key[key] = Score(statistics.mean(of_seeds), error, baseline)
    return scores_by_key


def _above_baseline(of_runs: Sequence[Score]) -> bool:
    """Return whether the mean is more than two standard errors above the baseline; True if there is none."""
    baseline = of_runs[0].baseline
    if baseline is None:
        return True
    # The runs share the examples, so their mean has the error of one run.
    error = statistics.mean(score.error or 0.0 for score in of_runs)
    return statistics.mean(score.value for score in of_runs) > baseline + 2 * error


def _mean_score(of_seeds: Sequence[Score]) -> str:
    value = statistics.mean(score.value for score in of_seeds)
    errors = [score.error for score in of_seeds if score.error is not None]
    # The seeds share the examples, so their mean has the error of one run.
    numbers = [value, *([statistics.mean(errors)] if errors else [])]
    return " ± ".join(f"{number:,.0f}" if value >= 100 else f"{number:.3f}" for number in numbers)


def _correlation(pairs: Sequence[tuple[float, float]]) -> str:
    """Return the correlation of losses and scores; a dash for few runs and without variation."""
    losses, values = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
    if len(pairs) < FEW_RUNS or len(set(losses)) < 2 or len(set(values)) < 2:
        return "-"
    return f"{statistics.correlation(losses, values):+.2f}"
