"""Plot the learning curves of the sweeps' best runs: accuracy against epoch or step, one line per model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from .experiment import Experiment, Run
from .report import best_line, best_widths, cells_of, model_label, task_title
from .results import Results

# Model name -> a run, and the accuracy history of the best run of each sweep.
Histories = dict[str, tuple[Run, list[list[float]]]]


def draw_curves(experiment: Experiment, sweeps: Sequence[Sequence[Run]], results: Results, out: Path) -> None:
    """Plot the best run of each sweep, one panel per task and width. Several seeds are shown as mean and range."""
    from tools.reporting.style import fit_height_to_legend, saved_figure

    lra = experiment.suite == "lra"
    selected = best_widths(cells_of(sweeps, results)) if lra else {}
    panels_data: dict[tuple[int, str], Histories] = {}
    for sweep in sweeps:
        first = sweep[0]
        # Models of Long Range Arena have widths of their own: a panel shows each at its best width.
        if (lines := results.of(sweep)) and selected.get((first.task, first.model), first.width) == first.width:
            panel = panels_data.setdefault((0 if lra else first.width, first.task), {})
            panel.setdefault(first.model, (first, []))[1].append(best_line(first, lines)["history"])
    models = [model for model in experiment.models if any(model in histories for histories in panels_data.values())]
    widths, tasks = sorted({width for width, _ in panels_data}), list(dict.fromkeys(task for _, task in panels_data))
    shared = {"sharex": "col", "sharey": True, "squeeze": False}
    with saved_figure(out, len(widths), len(tasks), **shared) as (figure, panels):
        for row, width in zip(panels, widths, strict=True):
            for axes, task in zip(row, tasks, strict=True):
                for model, (run, histories) in panels_data.get((width, task), {}).items():
                    _draw_model(axes, histories, run, models.index(model), model_label(model))
                axes.set(title=task_title(experiment, task) + (f", d = {width}" if len(widths) > 1 else ""))
        split = "validation" if experiment.classifies else "test"
        figure.supylabel(f"{split} accuracy, percent", fontsize="medium")
        for axes in panels[-1]:
            axes.set_xlabel("step" if lra else "epoch")
            axes.xaxis.get_major_locator().set_params(integer=True, min_n_ticks=1)
        # A legend: labels at the ends of lines that stop early would be far from them.
        handles: dict[str, Any] = {}
        for axes in panels.flat:
            handles |= {label: handle for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)}
        figure.legend(handles.values(), handles.keys(), loc="outside right upper", handlelength=3)
        fit_height_to_legend(figure, len(handles))


def _draw_model(axes: Any, histories: list[list[float]], run: Run, number: int, label: str) -> None:
    """Draw the mean and range of accuracy histories, one per seed. run: of one of them. number: of the line's style."""
    from tools.reporting.style import series_style

    # Extend a run that stopped at its target by its last value, so that the last point equals the table's value.
    longest = max(map(len, histories))
    values = 100 * np.array([[*history, *[history[-1]] * (longest - len(history))] for history in histories])
    # The last epoch is evaluated even if evaluate_every does not divide it.
    epochs = np.minimum(run.evaluate_every * np.arange(1, longest + 1), run.epochs)
    # Epochs of Long Range Arena's models have different lengths.
    places = epochs * (run.steps_per_epoch if run.suite == "lra" else 1)
    style = series_style(number)
    axes.plot(places, values.mean(0), label=label, markevery=[-1] if longest >= 10 else None, **style)
    axes.fill_between(places, values.min(0), values.max(0), color=style["color"], alpha=0.15, lw=0)
