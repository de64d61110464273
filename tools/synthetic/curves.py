"""How runs got where they are: validation accuracy against the epoch, a line a model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from .experiment import Experiment, Run
from .results import Results


def draw_curves(experiment: Experiment, sweeps: Sequence[Sequence[Run]], results: Results, out: Path) -> None:
    """The best run of every sweep; over seeds their mean and range."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    from tools.plot import COLORS, STYLE

    histories: dict[tuple[str, int], list[list[float]]] = {}
    for sweep in sweeps:
        lines = results.of(sweep)
        if lines:
            best = max(lines, key=lambda line: line["accuracy"])
            histories.setdefault((sweep[0].model, sweep[0].width), []).append(best["history"])
    several = len({width for _, width in histories}) > 1
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(figsize=(6.0, 3.6), layout="constrained")
        for number, ((model, width), runs) in enumerate(histories.items()):
            shortest = min(map(len, runs))
            values = 100 * np.array([run[:shortest] for run in runs])
            epochs = experiment.evaluate_every * np.arange(1, shortest + 1)
            color = COLORS[number % len(COLORS)]
            label = model.replace("_", " ") + (f", d = {width}" if several else "")
            mark = {"marker": "o", "ms": 3} if shortest < 10 else {}
            axes.plot(epochs, values.mean(0), color=color, label=label, **mark)
            axes.fill_between(epochs, values.min(0), values.max(0), color=color, alpha=0.15, lw=0)
        axes.set(xlabel="epoch", ylabel="validation accuracy, percent", title=experiment.title)
        axes.legend(fontsize=8)
        out.parent.mkdir(parents=True, exist_ok=True)
        aside = out.with_name(f".{out.stem}.aside{out.suffix}")
        figure.savefig(aside)
        aside.replace(out)
        plt.close(figure)
