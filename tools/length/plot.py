"""Models over length in one picture."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tools.reporting.style import COLORS, STYLE, pyplot, save_figure


def plot_accuracy(results: dict[str, list[dict[str, float]]], out: Path) -> None:
    """Masked accuracy against length, one line a run; the training length is dotted."""
    plt = pyplot()
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(figsize=(5.2, 3.4))
        for label, rows, color in zip(_labels(results), results.values(), COLORS * len(results), strict=False):
            lengths = [row["length"] for row in rows]
            axes.plot(lengths, [100 * row["accuracy"] for row in rows], marker="o", color=color, label=label)
        _length_axis(axes, list(results.values()))
        axes.set(ylabel="masked tokens found, percent")
        best = max(row["accuracy"] for rows in results.values() for row in rows)
        axes.set_ylim(0, 120 * best or 1)
        axes.legend()
        save_figure(figure, out)


def plot_loss(results: dict[str, dict[str, list[dict[str, float]]]], out: Path) -> None:
    """Loss of the same tokens against the length of the pieces, and what context beyond the trained length changes by
    position; one line a run, the training length dotted, bars of one standard error."""
    plt = pyplot()
    with plt.rc_context(STYLE):
        figure, (left, right) = plt.subplots(1, 2, figsize=(9.6, 3.6), layout="constrained")
        for label, result, color in zip(_labels(results), results.values(), COLORS * len(results), strict=False):
            rows, places = result["by_length"], result["by_position"]
            left.plot([r["length"] for r in rows], [r["loss"] for r in rows], marker="o", color=color)
            right.errorbar(
                [r["to"] for r in places],
                [r["change"] for r in places],
                yerr=[r["change_stderr"] for r in places],
                marker="o",
                elinewidth=0.9,
                color=color,
                label=label,
            )
        by_length = [result["by_length"] for result in results.values()]
        for axes in (left, right):
            _length_axis(axes, by_length)
        right.axhline(0, color="#555555", lw=0.8)
        left.set(ylabel="loss (nats a token)", title="The same tokens, more or less in view")
        right.set(
            xlabel="position, up to",
            ylabel="change of the loss (nats a token)",
            title="Everything before in view, less the trained length",
        )
        right.legend(fontsize=8)
        save_figure(figure, out)


def _labels(results: Iterable[str]) -> list[str]:
    """Names of the runs, or their paths where the names of two are the same, as those of step folders are."""
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
    axes.set(xlabel="tokens in view (dotted: length of training)")
