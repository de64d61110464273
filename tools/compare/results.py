"""What the runs of a comparison reached: read from their metrics, joined over the seeds, as Markdown tables."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_lite.metrics.logger import FILE_NAME, read_metrics
from tools.compare.launcher import steps_done
from tools.compare.spec import Run
from tools.reporting.tables import markdown_table


@dataclass(frozen=True)
class Result:
    """One run as it was validated: on the way (a part of the text), and at its end (the whole of it).

    Attributes:
        course: lines of kind `validation` of the run's metrics. final: the last of a complete run.
    """

    run: Run
    course: list[dict[str, Any]]
    final: dict[str, Any] | None
    tokens: int
    seconds: float


@dataclass(frozen=True)
class Row:
    """A model in a size, over its seeds.

    Attributes:
        values: metric -> its value of every seed, by seed.
    """

    model: str
    label: str
    size: str
    parameters: int
    body: int
    values: dict[str, dict[int, float]]

    def mean(self, metric: str) -> float:
        return statistics.mean(self.values[metric].values())

    def spread(self, metric: str) -> float:
        """Sample standard deviation over the seeds; nan for one, and where one diverged."""
        return _deviation(list(self.values[metric].values()))

    def less(self, other: Row, metric: str) -> tuple[float, float]:
        """This model less another, paired by seed (the same order of samples): mean and standard error."""
        mine, its = self.values[metric], other.values[metric]
        pairs = [mine[seed] - its[seed] for seed in mine.keys() & its.keys()]
        if not pairs:
            return math.nan, math.nan
        return statistics.mean(pairs), _deviation(pairs) / math.sqrt(len(pairs))


def read_results(runs: Iterable[Run]) -> list[Result]:
    """What the runs have logged so far; those that never began are left out."""
    found = []
    for run in runs:
        if not (run.folder / FILE_NAME).is_file():
            continue
        lines = read_metrics(run.folder)
        course = [line for line in lines if line["kind"] == "validation"]
        train = [line for line in lines if line["kind"] == "train"]
        # The whole set was read at the end; a line before it may stand at the same step.
        final = course[-1] if run.complete and course else None
        tokens = max((int(line["tokens"]) for line in lines if "tokens" in line), default=0)
        # Of steps that were not logged, the mean of those that were.
        seconds = (
            statistics.mean(line["step_seconds"] for line in train) * max(line["step"] for line in lines)
            if train
            else 0.0
        )
        found.append(Result(run, course, final, tokens, seconds))
    return found


def rows_of(results: Sequence[Result]) -> list[Row]:
    """The complete runs, joined over the seeds, in the order of the plan."""
    rows: dict[tuple[str, str], Row] = {}
    for result in results:
        if result.final is None:
            continue
        run = result.run
        empty = Row(run.model, run.label, run.size, run.parameters, run.body, {})
        row = rows.setdefault((run.size, run.model), empty)
        for metric, value in result.final.items():
            if metric in ("loss", "accuracy", "bits_per_byte") or metric.startswith("loss/"):
                row.values.setdefault(metric, {})[run.seed] = float(value)
    return list(rows.values())


def tables(rows: Sequence[Row], reference: str | None = None) -> str:
    """Markdown: a table a size, the lowest loss first, then the loss by source where it is known.

    reference: the model whose difference from every other is shown, paired by seed; the first by default.
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
            body = [[row.label, *(_with_spread(row, metric, 3) for metric in sources)] for row in ranked(here)]
            parts.append("Loss by source:\n\n" + markdown_table(header, body, aligned=True) + "\n")
    return "\n".join(parts)


def ranked(rows: Iterable[Row]) -> list[Row]:
    """The lowest loss first, those that diverged last."""
    return sorted(rows, key=lambda row: (math.isnan(row.mean("loss")), row.mean("loss")))


def plan_table(runs: Sequence[Run]) -> str:
    """What is trained: every model in every size with its parameters."""
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
                f"{tokens / 1e6:,.1f} M",
                ", ".join(str(other.seed) for other in seeds),
            ]
        )
    columns = ["model", "size", "layers x d", "MLP", "parameters", "without embeddings", "tokens", "seeds"]
    return markdown_table(columns, rows, aligned=True) + "\n"


def progress_note(runs: Sequence[Run]) -> str:
    """What is not complete, in words; empty where all is."""
    open_runs = [run for run in runs if not run.complete]
    if not open_runs:
        return ""
    steps = [(run, steps_done(run)) for run in open_runs]
    words = [f"{run.name} at step {at:,} of {run.config.schedule.train_steps:,}" for run, at in steps if at]
    if not_begun := sum(not at for _, at in steps):
        words.append(f"{not_begun} not begun")
    return f"{len(open_runs)} of {len(runs)} runs are not complete: {', '.join(words)}."


def _deviation(values: Sequence[float]) -> float:
    """Sample standard deviation; nan for one value, and where one is not finite."""
    return statistics.stdev(values) if len(values) > 1 and all(map(math.isfinite, values)) else math.nan


def _main_table(rows: Sequence[Row], base: Row) -> str:
    masked = any("accuracy" in row.values for row in rows)
    header = ["model", "parameters", "without embeddings", "seeds", "validation loss", f"less {base.label}"]
    header += ["tokens found, %"] if masked else []
    header += ["bits per byte"] if any("bits_per_byte" in row.values for row in rows) else []
    body = []
    for row in rows:
        change, error = row.less(base, "loss")
        shown = "-" if row is base else f"{change:+.4f}" + ("" if math.isnan(error) else f" ± {error:.4f}")
        cells = [row.label, f"{row.parameters:,}", f"{row.body:,}", str(len(row.values["loss"]))]
        cells += [_with_spread(row, "loss", 4), shown]
        cells += [_with_spread(row, "accuracy", 2, 100.0)] if masked else []
        cells += [_with_spread(row, "bits_per_byte", 4)] if "bits per byte" in header else []
        body.append(cells)
    notes = "Mean ± sample standard deviation over the seeds; differences are paired by seed, ± standard error.\n"
    return markdown_table(header, body, aligned=True) + "\n\n" + notes


def _with_spread(row: Row, metric: str, digits: int, scale: float = 1.0) -> str:
    if metric not in row.values:
        return "-"
    spread = row.spread(metric)
    text = f"{scale * row.mean(metric):.{digits}f}"
    return text if math.isnan(spread) else f"{text} ± {scale * spread:.{digits}f}"
