"""Read the results of a comparison's runs from their metrics, average over the seeds and write Markdown tables."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_lite.metrics.logger import FILE_NAME, read_metrics
from megatron_lite.plural import counted
from tools.compare.launcher import steps_done
from tools.compare.spec import Run
from tools.reporting.tables import markdown_table, plain_table

# Fewer runs show neither a correlation nor a scatter.
FEW_RUNS = 5
# A run with more growth of its gradient norm is unstable: see `Result.gradient_growth`.
_UNSTABLE_GROWTH = 3.0
# Fewer logged gradient norms show no growth.
_FEW_NORMS = 8


@dataclass(frozen=True)
class Result:
    """Hold the validations of one run: on part of the validation text during training, on all of it at the end.

    Attributes:
        curve: lines of kind `validation` of the run's metrics.
        final: the last of these lines; None if the run is not complete.
        test: the line of `data.test`; None without one.
        gradient_growth: median gradient norm of the last quarter of the logged steps over that of the second quarter. Steady
            runs have 0.8 to 1.9. nan with few logged steps.
    """

    run: Run
    curve: list[dict[str, Any]]
    final: dict[str, Any] | None
    tokens: int
    seconds: float
    test: dict[str, Any] | None = None
    gradient_growth: float = math.nan

    @property
    def unstable(self) -> bool:
        return is_unstable(self.gradient_growth)


@dataclass(frozen=True)
class Row:
    """Hold the results of a model in one size over its seeds.

    Attributes:
        values: metric -> {seed: value}.
    """

    model: str
    label: str
    size: str
    parameters: int
    body: int
    values: dict[str, dict[int, float]]

    @property
    def unstable_seeds(self) -> dict[int, float]:
        """Return seed -> growth of the gradient norm of the unstable runs."""
        growths = self.values.get("gradient_growth", {})
        return {seed: growth for seed, growth in growths.items() if is_unstable(growth)}

    @property
    def unstable(self) -> bool:
        return bool(self.unstable_seeds)

    @property
    def marked_label(self) -> str:
        return f"{self.label} (unstable)" if self.unstable else self.label

    def mean(self, metric: str) -> float:
        return statistics.mean(self.values[metric].values())

    def deviation(self, metric: str) -> float:
        """Return the sample standard deviation over the seeds; nan for one seed or a diverged run."""
        return _deviation(list(self.values[metric].values()))

    def difference(self, other: Row, metric: str) -> tuple[float, float]:
        """Return mean and standard error of this model minus another, paired by seed (same order of samples)."""
        values, other_values = self.values[metric], other.values[metric]
        pairs = [values[seed] - other_values[seed] for seed in values.keys() & other_values.keys()]
        if not pairs:
            return math.nan, math.nan
        return statistics.mean(pairs), _deviation(pairs) / math.sqrt(len(pairs))


def is_unstable(gradient_growth: float) -> bool:
    """Return whether a run with this growth of its gradient norm is unstable; False for nan."""
    return gradient_growth > _UNSTABLE_GROWTH


def read_results(runs: Iterable[Run]) -> list[Result]:
    """Read the metrics of the runs that have begun."""
    results = []
    for run in runs:
        if not (run.folder / FILE_NAME).is_file():
            continue
        lines = read_metrics(run.folder)
        curve = [line for line in lines if line["kind"] == "validation"]
        train = [line for line in lines if line["kind"] == "train"]
        # The last line is of the whole validation set; an earlier line may have the same step.
        last = curve[-1] if curve and curve[-1]["step"] == run.config.schedule.train_steps else None
        final = last if run.complete else None
        tokens = max((int(line["tokens"]) for line in lines if "tokens" in line), default=0)
        # Steps without a logged time count with the mean of the logged steps.
        seconds = (
            statistics.mean(line["step_seconds"] for line in train) * max(line["step"] for line in lines)
            if train
            else 0.0
        )
        tests = [line for line in lines if line["kind"] == "test"]
        test = tests[-1] if run.complete and tests else None
        results.append(Result(run, curve, final, tokens, seconds, test, _gradient_growth(train)))
    return results


def _gradient_growth(train: Sequence[Mapping[str, Any]]) -> float:
    norms = [norm for line in train if math.isfinite(norm := line.get("gradient_norm", math.nan))]
    quarter = len(norms) // 4
    if len(norms) < _FEW_NORMS or not (early := statistics.median(norms[quarter : 2 * quarter])):
        return math.nan
    return statistics.median(norms[-quarter:]) / early


def rows_of(results: Sequence[Result]) -> list[Row]:
    """Return one row per model and size with the values of its complete runs, in the order of the plan."""
    rows: dict[tuple[str, str], Row] = {}
    for result in results:
        if result.final is None:
            continue
        run = result.run
        empty = Row(run.model, run.label, run.size, run.parameters, run.body, {})
        row = rows.setdefault((run.size, run.model), empty)
        for metric, value in result.final.items():
            if metric in ("loss", "accuracy", "top5_accuracy", "bits_per_byte") or metric.startswith("loss/"):
                row.values.setdefault(metric, {})[run.seed] = float(value)
        if result.test is not None:
            row.values.setdefault("test", {})[run.seed] = float(result.test["loss"])
        row.values.setdefault("gradient_growth", {})[run.seed] = result.gradient_growth
    return list(rows.values())


def tables(rows: Sequence[Row], reference: str | None = None) -> str:
    """Return Markdown: one table per size, lowest loss first, then one with the loss per source if there are several.

    reference: the model that the others are compared with, paired by seed; default: the first.
    """
    parts = []
    for size in dict.fromkeys(row.size for row in rows):
        here = [row for row in rows if row.size == size]
        base = next((row for row in here if row.model == reference), here[0])
        if size:
            parts.append(f"### {size}\n")
        parts.append(_main_table(ranked(here), base))
        sources = sorted({metric for row in here for metric in row.values if metric.startswith("loss/")})
        if len(sources) > 1:
            header = ["model", *(metric.removeprefix("loss/") for metric in sources)]
            body = [[row.label, *(_with_deviation(row, metric, 3) for metric in sources)] for row in ranked(here)]
            parts.append("Loss by source:\n\n" + markdown_table(header, body, aligned=True) + "\n")
    return "\n".join(parts)


def ranked(rows: Iterable[Row]) -> list[Row]:
    """Sort rows by loss, lowest first and diverged models last."""
    return sorted(rows, key=lambda row: (math.isnan(row.mean("loss")), row.mean("loss")))


def difference_text(row: Row, base: Row) -> str:
    """Return the loss of a row minus that of another, ± the standard error if it is known; "-" for the same row."""
    if row is base:
        return "-"
    change, error = row.difference(base, "loss")
    return f"{change:+.4f}" + ("" if math.isnan(error) else f" ± {error:.4f}")


def plan_table(runs: Sequence[Run], *, plain: bool = False) -> str:
    """Return a table of the models in each size with their parameters, tokens and seeds, as Markdown or for a terminal."""
    cells = {(run.size, run.model): run for run in runs}
    rows = []
    for run in cells.values():
        model, batch = run.config.model, run.config.batch
        seeds = [other for other in runs if (other.size, other.model) == (run.size, run.model)]
        tokens = batch.tokens_of(run.config.schedule.train_steps)
        rows.append(
            [
                run.label,
                run.size or "-",
                f"{model.num_layers} x {model.hidden_size}",
                f"{model.mlp_width:,}",
                f"{run.parameters:,}",
                f"{run.body:,}",
                f"{tokens:,}",
                ", ".join(str(other.seed) for other in seeds),
            ]
        )
    columns = ["model", "size", "layers x d", "MLP", "parameters", "without embeddings", "tokens", "seeds"]
    return (plain_table(columns, rows, text_columns=2) if plain else markdown_table(columns, rows, aligned=True)) + "\n"


def progress_note(runs: Sequence[Run]) -> str:
    """Return a sentence about the runs that are not complete, or an empty text."""
    open_runs = [run for run in runs if not run.complete]
    if not open_runs:
        return ""
    steps = [(run, steps_done(run)) for run in open_runs]
    words = [f"{run.name} at step {at:,} of {run.config.schedule.train_steps:,}" for run, at in steps if at]
    if not_begun := sum(not at for _, at in steps):
        words.append(f"{not_begun} not started")
    return f"{len(open_runs)} of {counted(len(runs), 'run')} not complete: {'; '.join(words)}."


def unreadable_note(runs: Sequence[Run], results: Sequence[Result]) -> str:
    """Return a sentence about the complete runs without a last validation, or an empty text. results: of `read_results`."""
    with_final = {result.run.name for result in results if result.final is not None}
    names = [run.name for run in runs if run.complete and run.name not in with_final]
    if not names:
        return ""
    return (
        f"Left out, since {FILE_NAME} lacks the validation after the last step: {', '.join(names)}. Copy the file again, or "
        "remove the folder and train the run again."
    )


def _deviation(values: Sequence[float]) -> float:
    """Return the sample standard deviation; nan for one value or if a value is not finite."""
    return statistics.stdev(values) if len(values) > 1 and all(map(math.isfinite, values)) else math.nan


def accuracy_label(rows: Sequence[Row]) -> str:
    """Return the name of the metric `accuracy`: of image classifiers top-1, else of masked tokens."""
    return f"{'top-1' if _classify(rows) else 'masked-token'} accuracy, %"


def loss_label(rows: Sequence[Row]) -> str:
    """Return the name of the validation loss with its unit."""
    return f"validation loss (nats per {'image' if _classify(rows) else 'token'})"


def _classify(rows: Sequence[Row]) -> bool:
    """Return whether the rows are of image classifiers."""
    return any("top5_accuracy" in row.values for row in rows)


def _main_table(rows: Sequence[Row], base: Row) -> str:
    accuracy = any("accuracy" in row.values for row in rows)
    header = ["model", "parameters", "without embeddings", "seeds", "validation loss", f"minus {base.label}"]
    header += [accuracy_label(rows)] if accuracy else []
    header += ["bits per byte"] if any("bits_per_byte" in row.values for row in rows) else []
    body = []
    for row in rows:
        cells = [row.marked_label, f"{row.parameters:,}", f"{row.body:,}", str(len(row.values["loss"]))]
        cells += [_with_deviation(row, "loss", 4), difference_text(row, base)]
        cells += [_with_deviation(row, "accuracy", 2, 100.0)] if accuracy else []
        cells += [_with_deviation(row, "bits_per_byte", 4)] if "bits per byte" in header else []
        body.append(cells)
    notes = "Mean ± sample standard deviation over the seeds; differences are paired by seed, ± standard error."
    return f"{markdown_table(header, body, aligned=True)}\n\n{notes}{unstable_note(rows)}\n"


def unstable_note(rows: Sequence[Row]) -> str:
    """Return a sentence about the unstable runs, or an empty text."""
    words = "; ".join(
        f"{row.label}, seed {seed}: {growth:.3g} times" for row in rows for seed, growth in row.unstable_seeds.items()
    )
    return (
        f" Unstable, since the gradient norm grows from the second to the last quarter of the run: {words}."
        if words
        else ""
    )


def _with_deviation(row: Row, metric: str, digits: int, scale: float = 1.0) -> str:
    if metric not in row.values:
        return "-"
    deviation = row.deviation(metric)
    text = f"{scale * row.mean(metric):.{digits}f}"
    return text if math.isnan(deviation) else f"{text} ± {scale * deviation:.{digits}f}"
