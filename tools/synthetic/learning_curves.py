"""How runs got where they are: accuracy against the epoch, a line a model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from .experiment import Experiment, Run
from .results import Results

# model -> the history of the best run of every sweep.
Histories = dict[str, list[list[float]]]


def draw_curves(experiment: Experiment, sweeps: Sequence[Sequence[Run]], results: Results, out: Path) -> None:
    """The best run of every sweep, a panel a task and width; over seeds their mean and range."""
    from tools.reporting.style import STYLE, pyplot, save_figure

    plt = pyplot()

    found: dict[tuple[int, str], Histories] = {}
    for sweep in sweeps:
        lines = results.of(sweep)
        if lines:
            best = max(lines, key=lambda line: line["accuracy"])
            of_panel = found.setdefault((sweep[0].width, sweep[0].task), {})
            of_panel.setdefault(sweep[0].model, []).append(best["history"])
    models = [model for model in experiment.models if any(model in histories for histories in found.values())]
    widths, tasks = sorted({width for width, _ in found}), list(dict.fromkeys(task for _, task in found))
    with plt.rc_context(STYLE):
        size = (4.2 * len(tasks) + 1.8, 3.0 * len(widths) + 0.6)
        figure, panels = plt.subplots(
            len(widths), len(tasks), figsize=size, layout="constrained", sharex="col", sharey=True, squeeze=False
        )
        for row, width in zip(panels, widths, strict=True):
            for axes, task in zip(row, tasks, strict=True):
                for model, runs in found.get((width, task), {}).items():
                    _draw(axes, runs, experiment, models.index(model), model.replace("_", " "))
                length, _, pairs = task.partition("x")
                title = f"length {length}, {pairs} pairs" if pairs else experiment.title
                axes.set(title=title + (f", d = {width}" if len(widths) > 1 else ""))
        what = "validation" if experiment.suite == "listops" else "test"
        figure.supylabel(f"{what} accuracy, percent", fontsize="medium")
        for axes in panels[-1]:
            axes.set_xlabel("epoch")
        known: dict[str, Any] = {}
        for axes in panels.flat:
            known |= {label: handle for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)}
        figure.legend(known.values(), known.keys(), loc="outside right upper", fontsize=8, handlelength=3)
        save_figure(figure, out)


def _draw(axes: Any, runs: list[list[float]], experiment: Experiment, number: int, label: str) -> None:
    from tools.reporting.style import COLORS

    # A run that reached its target stays where it ended, so that the last point is that of the table.
    longest = max(map(len, runs))
    values = 100 * np.array([[*run, *[run[-1]] * (longest - len(run))] for run in runs])
    # The last epoch is evaluated too where evaluate_every does not divide it.
    epochs = np.minimum(experiment.evaluate_every * np.arange(1, longest + 1), experiment.epochs)
    style = {"color": COLORS[number % len(COLORS)], "ls": "-" if number < len(COLORS) else "--"}
    axes.plot(epochs, values.mean(0), label=label, marker="o", markevery=[-1] if longest >= 10 else None, ms=3, **style)
    axes.fill_between(epochs, values.min(0), values.max(0), color=style["color"], alpha=0.15, lw=0)
