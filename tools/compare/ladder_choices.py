"""Choose mixers by purpose from the results of a ladder, and gather the scores of its models."""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from data.atomic_io import read_json
from models.config import ModelConfig
from tools.compare.results import Result, Row
from tools.compare.spec import Run
from tools.evaluation.results_file import RESULTS_FILE
from tools.reporting.runs_page import Section

# Below this number of runs a correlation and a scatter are left out.
_FEW_RUNS = 5
# Names of equally good mixers in a cell.
_SHOWN = 3
# Score of a run: (suite, task, metric).
Key = tuple[str, str, str]


class Score(NamedTuple):
    """Hold a score, its standard error and its baseline, the better of chance and the most frequent answer; None if unknown."""

    value: float
    error: float | None = None
    baseline: float | None = None


class Noise(NamedTuple):
    """Hold the standard deviation of one run's loss, nan if nothing shows it, and where it comes from."""

    deviation: float
    source: str


class LatePositions(NamedTuple):
    """Hold model -> loss of one run at the last positions of a text, in nats per token, and the rung of these runs.

    `losses` is empty if nothing was measured.
    """

    rung: str
    losses: Mapping[str, float]


def choices(rung: str, rows: Sequence[Row], runs: Sequence[Run], noise: Noise, late: LatePositions) -> Section:
    """Return one row per purpose: the best mixer, those as good within the noise, and the next mixer.

    rows: of all rungs. noise: of a run of the rung's size.
    """
    here = [row for row in rows if row.size == rung and math.isfinite(row.mean("loss"))]
    growing = {run.model for run in runs if _grows(run.config.model)}
    constant = [row for row in here if row.model not in growing]
    # The seeds of a rung share the noise.
    error = noise.deviation * math.sqrt(2 / min((len(row.values["loss"]) for row in here), default=1))
    cells = []
    for purpose, among, metric in (
        ("lowest loss", here, "loss"),
        ("lowest loss with a state of constant size", constant if growing else [], "loss"),
        ("text of an unseen source", here, "test"),
    ):
        values = {row.label: row.mean(metric) for row in among if metric in row.values}
        if len(values) > 1:
            cells.append([purpose, *_best(values, error)])
    labels = {row.model: row.label for row in rows}
    if len(positions := {labels[model]: loss for model, loss in late.losses.items() if model in labels}) > 1:
        mixers = {row.model for row in rows if row.size == late.rung}
        where = f" at {late.rung}" if late.rung != rung else ""
        where += "" if len(positions) == len(mixers) else f" ({len(positions)} of {len(mixers)} mixers measured)"
        cells.append([f"last positions of a text{where}", *_best(positions, noise.deviation * math.sqrt(2))])
    cells += _by_source(here)
    note = "Loss in nats per token. "
    if not cells:
        note = f"A choice needs at least two mixers with a complete run of {rung}."
    elif math.isnan(error):
        note += "No rung has several seeds, so the noise of a difference is unknown."
    else:
        note += (
            "As good: within two standard errors of the best. The standard error is that of a difference of validation "
        )
        note += f"losses, for all purposes. It comes from {noise.source}."
    return Section(f"Which mixer for which purpose, at {rung}", _HEADER, cells, note, text_columns=3)


_HEADER = ["purpose", "mixer", "as good within the noise", "loss", "next mixer", "difference ± standard error"]


def _grows(model: ModelConfig) -> bool:
    """Return whether the state grows with the context: softmax attention that reads all earlier tokens, in some layer."""
    if "attention" not in model.mixers:
        return False
    options = model.options_of("attention")
    return options.window is None or bool(options.full_layers)


def noise_of_run(rows: Sequence[Row], same_size: Collection[str], misses: Mapping[str, float]) -> Noise:
    """Return the noise of the loss of one run at a size.

    Seeds of the same size come first. Without them two numbers bound it from above, and the smaller one is returned: the noise
    of other sizes, which are smaller and so have more noise, and the scatter of the predictions.

    Args:
        rows: of all rungs.
        same_size: the rungs of this size.
        misses: model -> predicted minus trained loss at one rung of this size.
    """
    of_size, others = _noise_of_seeds([row for row in rows if row.size in same_size]), _noise_of_seeds(rows)
    if not math.isnan(of_size.deviation):
        return of_size
    bounds = [others._replace(source=f"{others.source}, taken as an upper bound, since noise falls with the size")]
    if len(misses) >= _FEW_RUNS:
        source = f"the scatter of predicted minus trained loss of {len(misses)} mixers"
        source += ", an upper bound: it also holds the errors of the predictions"
        bounds.append(Noise(statistics.stdev(misses.values()), source))
    return min((bound for bound in bounds if not math.isnan(bound.deviation)), default=others)


def _noise_of_seeds(rows: Sequence[Row]) -> Noise:
    """Return the noise of a run's loss, pooled over the rungs with several seeds.

    The means of every model and every seed are subtracted, since the order of samples of a seed is that of all models.
    """
    squares, freedom, rungs = 0.0, 0, []
    for size in dict.fromkeys(row.size for row in rows):
        of_size = [row.values["loss"] for row in rows if row.size == size and len(row.values["loss"]) > 1]
        seeds = sorted(set[int].intersection(*(set(values) for values in of_size))) if of_size else []
        table = np.array([[values[seed] for seed in seeds] for values in of_size])
        table = table[np.isfinite(table).all(1)] if seeds else table
        if min(table.shape) > 1:
            rest = table - table.mean(0) - table.mean(1, keepdims=True) + table.mean()
            squares, freedom = squares + float((rest**2).sum()), freedom + (table.shape[0] - 1) * (table.shape[1] - 1)
            rungs.append(size)
    source = f"the seeds at {', '.join(rungs)} ({freedom} degrees of freedom)"
    return Noise(math.sqrt(squares / freedom), source) if freedom else Noise(math.nan, "")


def scores(reached: Sequence[str], runs: Sequence[Run], results: Sequence[Result]) -> Section:
    """Return the scores of the largest rung that has any, and their correlation with the loss over the runs of every rung.

    Tasks in which the runs are at the baseline are only named. reached: the rungs with a complete run, in ascending order.
    """
    losses = {result.run.folder: result.final["loss"] for result in results if result.final}
    losses = {folder: loss for folder, loss in losses.items() if math.isfinite(loss)}
    measured = {run.folder: _scores_of(run) for run in runs if run.folder in losses}
    scored = {run.size for run in runs if measured.get(run.folder)}
    rung = next((rung for rung in reversed(reached) if rung in scored), reached[-1])
    of_rung: dict[str, list[Run]] = {}
    for run in runs:
        if run.size == rung and measured.get(run.folder):
            of_rung.setdefault(run.label, []).append(run)
    keys = dict.fromkeys(key for group in of_rung.values() for run in group for key in measured[run.folder])
    cells, left_out = [], []
    for key in keys:
        groups = [
            [measured[run.folder][key] for run in group if key in measured[run.folder]] for group in of_rung.values()
        ]
        every_score = [score for group in groups for score in group]
        name, baseline = f"{key[1]}, {key[2]}", every_score[0].baseline
        if not _above_baseline(every_score):
            left_out.append(name)
            continue
        pairs = [(losses[folder], values[key].value) for folder, values in measured.items() if key in values]
        row = [name, "-" if baseline is None else f"{baseline:.3f}", _correlation(pairs)]
        cells.append([*row, *(_mean_score(group) if group else "-" for group in groups)])
    note = (
        "Score ± standard error over the examples, of fine-tuned models over the seeds. Baseline: the better of chance "
        f"and the most frequent answer. Correlation: of score and validation loss over all runs with the score, from {_FEW_RUNS} "
        "runs on."
    )
    if seeds := sorted({run.seed for group in of_rung.values() for run in group}):
        note += f" Seeds with scores: {', '.join(map(str, seeds))}."
    if left_out:
        note += f" Left out, since the mean of the models is within two standard errors of the baseline: {'; '.join(left_out)}."
    complete = dict.fromkeys(run.label for run in runs if run.size == rung and run.folder in losses)
    if without := ", ".join(label for label in complete if label not in of_rung):
        note += f" Not measured: {without}."
    header = ["task", "baseline", "correlation with the loss", *of_rung]
    causal = all(run.causal for run in runs)
    commands = "`--recall`, and `eval.py` with a run, write" if causal else "`tools.finetune_glue` with a run writes"
    missing = f"Not measured: {commands} scores to the runs' folders."
    title = f"Zero-shot scores and recall at {rung}" if causal else f"Scores after fine-tuning at {rung}"
    return Section(title, header, cells, note if keys else missing)


def _best(values: Mapping[str, float], error: float) -> list[str]:
    """Return the cells of a purpose. error: standard error of a difference."""
    best, *others = sorted(values, key=lambda label: values[label])
    equal = [label for label in others if values[label] - values[best] <= 2 * error]
    rest = others[len(equal) :]
    shown = ", ".join(equal[:_SHOWN]) + (f" and {len(equal) - _SHOWN} more" if len(equal) > _SHOWN else "")
    written = "" if math.isnan(error) else f" ± {error:.4f}"
    difference = f"{values[rest[0]] - values[best]:+.4f}{written}" if rest else "-"
    return [best, shown or "-", f"{values[best]:.4f}", rest[0] if rest else "-", difference]


def _by_source(here: Sequence[Row]) -> list[list[str]]:
    """Return the row of the mixer that has the lowest loss in most sources."""
    sources = sorted({metric for row in here for metric in row.values if metric.startswith("loss/")})
    with_all = [row for row in here if all(source in row.values for source in sources)]
    if len(sources) < 2 or len(with_all) < 2:
        return []
    firsts = [min(with_all, key=lambda row: row.mean(source)).label for source in sources]
    first, *others = sorted(set(firsts), key=lambda label: (-firsts.count(label), label))
    counts = [f"{firsts.count(label)} of {len(sources)}" for label in (first, *others)]
    after = [others[0], counts[1]] if others else ["-", "-"]
    return [["lowest loss in most sources", first, "-", counts[0], *after]]


def _scores_of(run: Run) -> dict[Key, Score]:
    """Return the scores by suite, task and metric; empty without a results file."""
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


def _fine_tuned(run: Run) -> dict[Key, Score]:
    """Return mean and standard error over the seeds that `tools.finetune_glue` wrote for a run."""
    scores_by_key: dict[Key, Score] = {}
    for path in sorted(run.folder.glob("*/glue.json")):
        content = read_json(path, f"remove it; tools.finetune_glue {run.folder} writes it again", "runs")
        for task, seeds in content["runs"].items():
            for metric in dict.fromkeys(metric for values in seeds.values() for metric in values):
                of_seeds = [values[metric] for values in seeds.values() if values.get(metric) is not None]
                if of_seeds:
                    error = statistics.stdev(of_seeds) / math.sqrt(len(of_seeds)) if len(of_seeds) > 1 else None
                    baseline = content.get("majority", {}).get(task, {}).get(metric)
                    key = "fine-tuned", f"{task} after fine-tuning", metric
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
    losses, values = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
    if len(pairs) < _FEW_RUNS or len(set(losses)) < 2 or len(set(values)) < 2:
        return "-"
    return f"{statistics.correlation(losses, values):+.2f}"
