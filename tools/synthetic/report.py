"""Write tables and figures of the results next to the papers' numbers."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tools.reporting.tables import markdown_table

from .experiment import Experiment, Run
from .results import Line, Results


@dataclass(frozen=True)
class Cell:
    """Hold the best result of a sweep, averaged over the seeds.

    Attributes:
        accuracy: in percent.
        deviation: sample standard deviation over the seeds; None for one seed.
        lr: learning rate of the first seed's best run.
        complete: whether all runs of the sweep are finished, or one has reached the target.
        selection: mean over the seeds of the accuracy by which the best run is selected (`best_line`), a share.
    """

    accuracy: float
    deviation: float | None
    lr: float | None
    complete: bool
    selection: float = 0.0

    def text(self) -> str:
        deviation = "" if self.deviation is None else f" ± {self.deviation:.1f}"
        return f"{self.accuracy:.1f}{deviation}{'' if self.complete else ' *'}"


Cells = dict[tuple[str, str, int], Cell]

_CAPTIONS = {
    "mad": "best test accuracy of a sweep in percent, averaged over the settings of a task",
    "lra": "test accuracy in percent at the best width and learning rate",
}
_SCORED = {
    "last": "after the last epoch",
    "least_perplexity": "after the epoch of least validation perplexity",
    "best_validation": "after the epoch of best validation accuracy",
}
_LABELS = {
    "based": "Based",
    "gated_delta_net": "Gated DeltaNet",
    "gla": "GLA",
    "hgrn2": "HGRN2",
    "kda": "KDA",
    "lion_d": "LION-d",
    "lion_grfa": "LION with the gate of GRFA",
    "lion_complex": "LION with complex decays",
    "metala_complex": "MetaLA with complex decays",
    "lion_lit": "LION-lit",
    "lion_s": "LION-s",
    "mamba": "Mamba",
    "mamba2": "Mamba-2",
    "metala": "MetaLA",
    "retnet": "RetNet",
    "s5": "S5",
}


def model_label(model: str) -> str:
    """Return the published name of a model: "MetaLA, no convolution" for metala_no_convolution."""
    name = next((name for name in _LABELS if f"{model}_".startswith(f"{name}_")), "")
    rest = model[len(name) :].strip("_").replace("_", " ")
    return ", ".join(filter(None, (_LABELS.get(name), rest)))


def task_title(experiment: Experiment, task: str) -> str:
    """Return a task in words: "length 256, 16 pairs" for 256x16 of MQAR, "path x" for path_x."""
    if experiment.suite == "mqar":
        length, _, pairs = task.partition("x")
        return f"length {length}, {pairs} pairs"
    return task.replace("_", " ")


def scores(experiment: Experiment, sweeps: Sequence[Sequence[Run]], results: Results) -> Cells:
    """Return the cells of the suite's table and figure, with averages in MAD and LRA; empty without a finished run."""
    cells = cells_of(sweeps, results)
    if experiment.suite == "mad":
        return mad_scores(experiment, cells, sweeps)
    return lra_scores(experiment, cells) if experiment.suite == "lra" else cells


def cells_of(sweeps: Sequence[Sequence[Run]], results: Results) -> Cells:
    """Return the cell of each (task, model, width) with at least one finished run."""
    best: dict[tuple[str, str, int], list[tuple[Line, float]]] = {}
    incomplete = set()
    for sweep in sweeps:
        first = sweep[0]
        key = (first.task, first.model, first.width)
        if lines := results.of(sweep):
            line = best_line(first, lines)
            best.setdefault(key, []).append((line, _selection(first, line)))
        if results.pending(sweep):
            incomplete.add(key)
    cells = {}
    for key, seeds in best.items():
        accuracies = [100 * line["accuracy"] for line, _ in seeds]
        deviation = statistics.stdev(accuracies) if len(seeds) > 1 else None
        selection = statistics.mean(value for _, value in seeds)
        lr = seeds[0][0]["lr"]
        cells[key] = Cell(statistics.mean(accuracies), deviation, lr, key not in incomplete, selection)
    return cells


def best_line(run: Run, lines: Sequence[Line]) -> Line:
    """Return the result of a sweep: the line of best validation accuracy, or without validation set of best accuracy."""
    return max(lines, key=lambda line: _selection(run, line))


def _selection(run: Run, line: Line) -> float:
    return line["best_accuracy" if run.classifies else "accuracy"]


def mad_scores(experiment: Experiment, cells: Cells, sweeps: Sequence[Sequence[Run]]) -> Cells:
    """Return the MAD scores: per task the mean over its settings; "average" is the mean over all tasks, if complete."""
    settings: dict[tuple[str, str, int], set[str]] = {}
    for sweep in sweeps:
        first = sweep[0]
        settings.setdefault((first.base_task, first.model, first.width), set()).add(first.task)
    means: Cells = {}
    for (task, model, width), expected in settings.items():
        present = [cells[name, model, width] for name in expected if (name, model, width) in cells]
        if present:
            complete = len(present) == len(expected) and all(cell.complete for cell in present)
            means[task, model, width] = Cell(statistics.mean(cell.accuracy for cell in present), None, None, complete)
    return {**means, **_averages(means, list(experiment.mad))}


def lra_scores(experiment: Experiment, cells: Cells) -> Cells:
    """Return per task and model the cell of the best width on validation, as width 0.

    "average" is the mean of a model that has all tasks of the experiment.
    """
    best = {(task, model, 0): cells[task, model, width] for (task, model), width in best_widths(cells).items()}
    return {**best, **_averages(best, experiment.tasks)}


def best_widths(cells: Cells) -> dict[tuple[str, str], int]:
    """Return (task, model) -> the width whose runs are selected: that of best validation accuracy."""
    widths: dict[tuple[str, str], int] = {}
    for (task, model, width), cell in cells.items():
        best = widths.setdefault((task, model), width)
        if cell.selection > cells[task, model, best].selection:
            widths[task, model] = width
    return widths


def _averages(cells: Cells, tasks: Sequence[str]) -> Cells:
    """Return the mean over the tasks of each model and width that has all of several tasks, as the task "average"."""
    averages: Cells = {}
    for model, width in dict.fromkeys((model, width) for _, model, width in cells):
        present = [cells[task, model, width] for task in tasks if (task, model, width) in cells]
        if len(present) == len(tasks) > 1:
            mean = statistics.mean(cell.accuracy for cell in present)
            averages["average", model, width] = Cell(mean, None, None, all(cell.complete for cell in present))
    return averages


def markdown(experiment: Experiment, cells: Cells) -> str:
    """Return the results page: one table per MQAR task, or one table for another suite. A star marks incomplete sweeps."""
    parts = [f"# {experiment.title}"]
    if experiment.suite == "mqar":
        for task in dict.fromkeys(task for task, _, _ in cells):
            of_task = {(model, width): cell for (name, model, width), cell in cells.items() if name == task}
            columns = sorted({width for _, width in of_task})
            title = task_title(experiment, task).capitalize()
            parts.append(f"{title}: test accuracy in percent, best learning rate in brackets.")
            parts.append(
                markdown_table(
                    ["model", *(f"d = {w}" for w in columns)], _mqar_rows(experiment, task, of_task, columns)
                )
            )
    else:
        tasks = _columns(experiment, cells)
        scored = f", {_SCORED[experiment.scored]}" if experiment.suite == "lra" else ""
        parts.append(f"{_CAPTIONS[experiment.suite].capitalize()}{scored}.")
        rows = [
            [_labelled(cells, model, width), *(_text(cells.get((task, model, width))) for task in tasks)]
            for model, width in dict.fromkeys((model, width) for _, model, width in cells)
        ]
        rows += _paper_rows(experiment, tasks)
        parts.append(markdown_table(["model", *(task_title(experiment, task) for task in tasks)], rows))
    if any(not cell.complete for cell in cells.values()):
        parts.append("\\* Some runs of the sweep are not finished.")
    if experiment.paper.source:
        parts.append(f"Paper: {experiment.paper.source}.")
    return "\n\n".join(parts) + "\n"


def draw_results(experiment: Experiment, cells: Cells, out: Path) -> None:
    """Draw the results. MQAR: accuracy against width, one panel per task. MAD and LRA: bars per task and model."""
    from tools.reporting.style import saved_figure

    mqar = experiment.suite == "mqar"
    tasks = list(dict.fromkeys(task for task, _, _ in cells)) if mqar else [""]
    with saved_figure(out, 1, len(tasks), sharey=True, squeeze=False) as (_, panels):
        (_draw_lines if mqar else _draw_bars)(panels[0], experiment, cells)


def _draw_lines(panels: Sequence[Any], experiment: Experiment, cells: Cells) -> None:
    from tools.reporting.style import GRAY, log_axes, series_style

    models = list(dict.fromkeys(model for _, model, _ in cells))
    for axes, task in zip(panels, dict.fromkeys(task for task, _, _ in cells), strict=True):
        widths = sorted({width for name, _, width in cells if name == task})
        for number, model in enumerate(models):
            points = [(w, cells[task, model, w]) for w in widths if (task, model, w) in cells]
            axes.errorbar(
                [w for w, _ in points],
                [cell.accuracy for _, cell in points],
                yerr=[c.deviation or 0.0 for _, c in points] if any(c.deviation for _, c in points) else None,
                label=model_label(model),
                capsize=2,
                **series_style(number),
            )
        for row in experiment.paper.rows:
            if row.task == task and row.width in widths:
                axes.plot(row.width, row.accuracy, "x", color=GRAY, ms=6, zorder=5)
                axes.annotate(row.model, (row.width, row.accuracy), (4, 4), textcoords="offset points", fontsize=6)
        log_axes(axes, "x", widths)
        axes.set(title=task_title(experiment, task), xlabel="width d")
        low, high = axes.get_ylim()
        axes.set_ylim(min(-3, low), max(104, high))
    panels[0].set_ylabel("test accuracy, percent")
    # A legend with markers: accuracies meet at 100 %, where labels at the lines would overlap.
    panels[-1].legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))


def _draw_bars(panels: Sequence[Any], experiment: Experiment, cells: Cells) -> None:
    from tools.reporting.style import fit_height_to_legend, grouped_bars

    tasks = _columns(experiment, cells)
    series: dict[str, dict[str, tuple[float, float | None]]] = {}
    for (task, model, width), cell in cells.items():
        of_label = series.setdefault(_labelled(cells, model, width), {})
        of_label[task_title(experiment, task)] = cell.accuracy, cell.deviation
    published = [row for row in experiment.paper.rows if row.task in tasks]
    if experiment.suite == "lra":
        # Its papers have more models than a figure can show. LION with a gate or with complex decays has all of LION's.
        shown = {"Transformer", *(model_label(model).replace(",", " ").split()[0] for _, model, _ in cells)}
        words = [row.model.partition(" ")[0] for row in published]
        published = [row for row, word in zip(published, words, strict=True) if {word, word.partition("-")[0]} & shown]
    for row in published:
        series.setdefault(row.model, {})[task_title(experiment, row.task)] = row.accuracy, None
    (axes,) = panels
    labels = [task_title(experiment, task) for task in tasks]
    grouped_bars(axes, labels, list(series.items()), faint=[row.model for row in published])
    axes.set(title=f"{experiment.title}: {_CAPTIONS[experiment.suite]}", ylabel="test accuracy, percent", ylim=(0, 104))
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))
    fit_height_to_legend(axes.figure, len(series))


def _mqar_rows(
    experiment: Experiment, task: str, cells: dict[tuple[str, int], Cell], columns: Sequence[int]
) -> list[list[str]]:
    rows = []
    for model in dict.fromkeys(model for model, _ in cells):
        row_cells = [cells.get((model, width)) for width in columns]
        rows.append([model_label(model), *("-" if c is None else f"{c.text()} ({c.lr:.2g})" for c in row_cells)])
    for name in dict.fromkeys(row.model for row in experiment.paper.rows if row.task == task):
        values = {row.width: row.accuracy for row in experiment.paper.rows if (row.model, row.task) == (name, task)}
        rows.append([name, *(f"{values[width]:.1f}" if width in values else "-" for width in columns)])
    return rows


def _paper_rows(experiment: Experiment, tasks: Sequence[str]) -> list[list[str]]:
    rows = []
    for name in dict.fromkeys(row.model for row in experiment.paper.rows):
        values = {row.task: row.accuracy for row in experiment.paper.rows if row.model == name}
        if not values.keys().isdisjoint(tasks):
            rows.append([name, *(f"{values[task]:.2f}" if task in values else "-" for task in tasks)])
    return rows


def _columns(experiment: Experiment, cells: Cells) -> list[str]:
    """Return the tasks with results in the order of the experiment, and "average"."""
    names = list(experiment.mad) if experiment.suite == "mad" else list(experiment.tasks)
    return [task for task in [*names, "average"] if any(name == task for name, _, _ in cells)]


def _labelled(cells: Cells, model: str, width: int) -> str:
    """Return the model's name, with its width if the results have several widths."""
    several = len({w for _, _, w in cells}) > 1
    return model_label(model) + (f", d = {width}" if several else "")


def _text(cell: Cell | None) -> str:
    return "-" if cell is None else cell.text()
