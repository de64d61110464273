"""Choose mixers by purpose from the results of a ladder, and gather the scores of its models."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence

from data.atomic_io import read_json
from tools.compare.results import Result, Row
from tools.compare.spec import Run
from tools.evaluation.results_file import RESULTS_FILE
from tools.reporting.runs_page import Section

# Mixers with a state that grows with the context.
_GROWING = "attention"
# Below this number of runs a correlation is left out.
_FEW_RUNS = 5
# Score of a run: (suite, task, metric).
Key = tuple[str, str, str]


def choices(rung: str, rows: Sequence[Row], runs: Sequence[Run], late: Mapping[str, float]) -> Section:
    """Return one row per purpose: the best mixer with those within the noise, and the next mixer.

    Args:
        rows: of all rungs; several seeds of one rung give the noise.
        late: model -> loss at the last positions; empty if it was not measured.
    """
    here = [row for row in rows if row.size == rung and math.isfinite(row.mean("loss"))]
    growing = {run.model for run in runs if any(_GROWING in mixer for mixer in run.config.model.mixers)}
    constant = [row for row in here if row.model not in growing]
    cells = []
    for purpose, among, metric in (
        ("lowest loss", here, "loss"),
        ("lowest loss with a state of constant size", constant if growing else [], "loss"),
        ("text of an unseen source", here, "test"),
    ):
        values = {row.label: row.mean(metric) for row in among if metric in row.values}
        noise = noise_of_difference(rows, metric)
        if len(values) > 1:
            cells.append([purpose, *_best(values, noise)])
    labels = {row.model: row.label for row in here}
    if len(positions := {labels[model]: loss for model, loss in late.items() if model in labels}) > 1:
        cells.append(["last positions of a text", *_best(positions, noise_of_difference(rows, "loss"))])
    cells += _by_source(here)
    noise = noise_of_difference(rows, "loss")
    note = "Loss in nats per token. The standard error is that of the difference of two runs with one seed each. It comes from "
    note += "the rungs with several seeds. Mixers within two standard errors of the best share its cell."
    if math.isnan(noise):
        note = "Loss in nats per token. No rung has several seeds, so the noise of a difference is unknown."
    return Section(f"Which mixer for which purpose, at {rung}", _HEADER, cells, note, text_columns=2)


_HEADER = ["purpose", "mixer", "loss", "next mixer", "difference ± standard error"]


def noise_of_difference(rows: Sequence[Row], metric: str) -> float:
    """Return the standard deviation of the difference of two models with the same seed, pooled over rungs.

    It is nan if no rung has several seeds.
    """
    variances = []
    for size in dict.fromkeys(row.size for row in rows):
        of_size = [row for row in rows if row.size == size and metric in row.values]
        for row in of_size[1:]:
            seeds = sorted(row.values[metric].keys() & of_size[0].values[metric].keys())
            pairs = [row.values[metric][seed] - of_size[0].values[metric][seed] for seed in seeds]
            if len(pairs) > 1 and all(map(math.isfinite, pairs)):
                variances.append(statistics.variance(pairs))
    return math.sqrt(statistics.mean(variances)) if variances else math.nan


def scores(rung: str, runs: Sequence[Run], results: Sequence[Result]) -> Section:
    """Return the scores of a rung's runs, with chance and the correlation with the loss over the runs of every rung."""
    losses = {result.run.folder: result.final["loss"] for result in results if result.final}
    losses = {folder: loss for folder, loss in losses.items() if math.isfinite(loss)}
    measured = {run.folder: _scores_of(run) for run in runs if run.folder in losses}
    of_rung: dict[str, list[Run]] = {}
    for run in runs:
        if run.size == rung and measured.get(run.folder):
            of_rung.setdefault(run.label, []).append(run)
    keys = dict.fromkeys(key for group in of_rung.values() for run in group for key in measured[run.folder])
    cells = []
    for key in keys:
        pairs = [(losses[folder], values[key][0]) for folder, values in measured.items() if key in values]
        chance = next(values[key][2] for values in measured.values() if key in values)
        row = [f"{key[1]}, {key[2]}", "-" if chance is None else f"{chance:.3f}", _correlation(pairs)]
        for group in of_rung.values():
            found = [measured[run.folder][key] for run in group if key in measured[run.folder]]
            row.append(_score(found) if found else "-")
        cells.append(row)
    note = (
        "Score ± standard error over the examples, of fine-tuned models over the seeds. Scores within two standard errors of "
        f"chance show nothing. Correlation: of score and validation loss over all runs with the score, from {_FEW_RUNS} runs on."
    )
    header = ["task", "chance", "correlation with the loss", *of_rung]
    missing = "Not measured: `--recall`, and `eval.py` and `tools.finetune_glue` with a run, write scores to the runs' folders."
    return Section(f"Zero-shot scores and recall at {rung}", header, cells, note if cells else missing)


def _best(values: Mapping[str, float], noise: float) -> list[str]:
    """Return the cells of a purpose: the lowest mixers, their loss, the next mixer and the difference from it."""
    ordered = sorted(values, key=lambda label: values[label])
    lowest = values[ordered[0]]
    equal = [label for label in ordered if values[label] - lowest <= (0.0 if math.isnan(noise) else 2 * noise)]
    rest = ordered[len(equal) :]
    error = "" if math.isnan(noise) else f" ± {noise:.4f}"
    difference = f"+{values[rest[0]] - lowest:.4f}{error}" if rest else "-"
    return [", ".join(equal), f"{lowest:.4f}", rest[0] if rest else "-", difference]


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
    return [["lowest loss in most sources", first, counts[0], *after]]


def _scores_of(run: Run) -> dict[Key, tuple[float, float | None, float | None]]:
    """Return score, standard error and chance by suite, task and metric; empty without a results file."""
    path, found = run.folder / RESULTS_FILE, _fine_tuned(run)
    if not path.is_file():
        return found
    content = read_json(path, f"remove it; python eval.py {run.folder} writes it again", "results")
    for suite, tasks in content["results"].items():
        for task, metrics in tasks.items():
            details = content.get("details", {}).get(suite, {}).get(task, {})
            for metric, value in metrics.items():
                if isinstance(value, int | float) and metric in details:
                    detail = details[metric]
                    found[suite, task, metric] = float(value), detail.get("stderr"), detail.get("chance")
    return found


def _fine_tuned(run: Run) -> dict[Key, tuple[float, float | None, float | None]]:
    """Return mean and standard error over the seeds that `tools.finetune_glue` wrote for a run."""
    found: dict[Key, tuple[float, float | None, float | None]] = {}
    for path in sorted(run.folder.glob("*/glue.json")):
        tasks = read_json(path, f"remove it; tools.finetune_glue {run.folder} writes it again", "runs")["runs"]
        for task, seeds in tasks.items():
            for metric in dict.fromkeys(metric for values in seeds.values() for metric in values):
                values = [values[metric] for values in seeds.values() if values.get(metric) is not None]
                if values:
                    error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None
                    found["fine-tuned", f"{task} after fine-tuning", metric] = statistics.mean(values), error, None
    return found


def _score(found: Sequence[tuple[float, float | None, float | None]]) -> str:
    errors = [error for _, error, _ in found if error is not None]
    # The seeds share the examples, so their mean has the error of one run.
    return f"{statistics.mean(value for value, _, _ in found):.3f}" + (
        f" ± {statistics.mean(errors):.3f}" if errors else ""
    )


def _correlation(pairs: Sequence[tuple[float, float]]) -> str:
    losses, values = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
    if len(pairs) < _FEW_RUNS or len(set(losses)) < 2 or len(set(values)) < 2:
        return "-"
    return f"{statistics.correlation(losses, values):+.2f}"
