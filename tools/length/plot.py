"""Plot the results of several models by length."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tools.reporting.style import COLORS, STYLE, pyplot, save_figure


def plot_accuracy(results: dict[str, list[dict[str, float]]], out: Path) -> None:
    """Plot masked-token accuracy against length, one line per run. A dotted line marks the trained length."""
    plt = pyplot()
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(figsize=(5.2, 3.4))
        for label, rows, color in zip(_labels(results), results.values(), COLORS * len(results), strict=False):
            lengths = [row["length"] for row in rows]
            axes.plot(lengths, [100 * row["accuracy"] for row in rows], marker="o", color=color, label=label)
        _length_axis(axes, list(results.values()))
        axes.set(ylabel="masked-token accuracy, percent")
        best = max(row["accuracy"] for rows in results.values() for row in rows)
        axes.set_ylim(0, 120 * best or 1)
        axes.legend()
        save_figure(figure, out)


def plot_loss(results: dict[str, dict[str, list[dict[str, float]]]], out: Path) -> None:
    """Plot the loss against length, and the change beyond the trained length by position, one line per run.

    A dotted line marks the trained length. Error bars are one standard error.
    """
    plt = pyplot()
    with plt.rc_context(STYLE):
        figure, (left, right) = plt.subplots(1, 2, figsize=(9.6, 3.6), layout="constrained")
        for label, result, color in zip(_labels(results), results.values(), COLORS * len(results), strict=False):
            rows, ranges = result["by_length"], result["by_position"]
            left.plot([r["length"] for r in rows], [r["loss"] for r in rows], marker="o", color=color)
            right.errorbar(
                [r["to"] for r in ranges],
                [r["change"] for r in ranges],
                yerr=[r["change_stderr"] for r in ranges],
                marker="o",
                elinewidth=0.9,
                color=color,
                label=label,
            )
        by_length = [result["by_length"] for result in results.values()]
        for axes in (left, right):
            _length_axis(axes, by_length)
        right.axhline(0, color="#555555", lw=0.8)
        left.set(ylabel="loss (nats per token)", title="Loss of the same tokens by context length")
        right.set(
            xlabel="position, up to",
            ylabel="change of the loss (nats per token)",
            title="Full context minus trained length",
        )
        right.legend(fontsize=8)
        save_figure(figure, out)


def _labels(results: Iterable[str]) -> list[str]:
    """Return the names of the runs, or their paths if two names are equal, as those of step folders."""
    paths = list(results)
    names = [Path(path).name for path in paths]
    return names if len(set(names)) == len(names) else paths


def _length_axis(axes: Any, runs: list[list[dict[str, float]]]) -> None:
    lengths = sorted({row["length"] for rows in runs for row in rows})
    for trained in {rows[0]["trained_at"] for rows in runs}:
        axes.axvline(trained, color="#777777", ls=":", lw=1)
    axes.set_xscale("log", base=2)
    axes.set_xticks(lengths, [f"{length:g}" for length in lengths])
    axes.minorticks_off()
    axes.set(xlabel="context length, tokens (dotted: trained length)")
