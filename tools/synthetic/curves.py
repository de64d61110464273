"""How runs got where they are: accuracy against the epoch, a line a model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from .experiment import Experiment, Run
from .results import Results

# [model, width] -> the history of the best run of every sweep.
Histories = dict[tuple[str, int], list[list[float]]]


def draw_curves(experiment: Experiment, sweeps: Sequence[Sequence[Run]], results: Results, out: Path) -> None:
    """The best run of every sweep, a panel a task; over seeds their mean and range."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    from tools.plot import STYLE

    tasks: dict[str, Histories] = {}
    for sweep in sweeps:
        lines = results.of(sweep)
        if lines:
            best = max(lines, key=lambda line: line["accuracy"])
            of_task = tasks.setdefault(sweep[0].task, {})
            of_task.setdefault((sweep[0].model, sweep[0].width), []).append(best["history"])
    keys = list(dict.fromkeys(key for histories in tasks.values() for key in histories))
    several = len({width for _, width in keys}) > 1
    labels = {key: key[0].replace("_", " ") + (f", d = {key[1]}" if several else "") for key in keys}
    with plt.rc_context(STYLE):
        size = (4.2 * len(tasks) + 1.8, 3.6)
        figure, panels = plt.subplots(1, len(tasks), figsize=size, layout="constrained", sharey=True, squeeze=False)
        for axes, (task, histories) in zip(panels[0], tasks.items(), strict=True):
            for key, runs in histories.items():
                _draw(axes, runs, experiment.evaluate_every, keys.index(key), labels[key])
            length, _, pairs = task.partition("x")
            axes.set(xlabel="epoch", title=f"length {length}, {pairs} pairs" if pairs else experiment.title)
        what = "validation" if experiment.suite == "listops" else "test"
        panels[0, 0].set_ylabel(f"{what} accuracy, percent")
        known: dict[str, Any] = {}
        for axes in panels[0]:
            known |= {label: handle for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)}
        figure.legend(known.values(), known.keys(), loc="outside right upper", fontsize=8)
        out.parent.mkdir(parents=True, exist_ok=True)
        aside = out.with_name(f".{out.stem}.aside{out.suffix}")
        figure.savefig(aside)
        aside.replace(out)
        plt.close(figure)


def _draw(axes: Any, runs: list[list[float]], evaluate_every: int, number: int, label: str) -> None:
    from tools.plot import COLORS

    shortest = min(map(len, runs))
    values = 100 * np.array([run[:shortest] for run in runs])
    epochs = evaluate_every * np.arange(1, shortest + 1)
    style = {"color": COLORS[number % len(COLORS)], "ls": "-" if number < len(COLORS) else "--"}
    # A run that reached its target ends there.
    axes.plot(
        epochs, values.mean(0), label=label, marker="o", markevery=[-1] if shortest >= 10 else None, ms=3, **style
    )
    axes.fill_between(epochs, values.min(0), values.max(0), color=style["color"], alpha=0.15, lw=0)
