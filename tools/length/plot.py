"""Plot the results of several models by length."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tools.reporting.run_curves import distinct_names
from tools.reporting.style import GRAY, label_lines, log_axes, saved_figure, series_style


def plot_accuracy(results: dict[str, list[dict[str, float]]], out: Path) -> None:
    """Plot masked-token accuracy against length, one line per run. A dotted line marks the trained length."""
    names = distinct_names([Path(run) for run in results])
    with saved_figure(out) as (_, axes):
        for number, (label, rows) in enumerate(zip(names, results.values(), strict=True)):
            accuracies = [100 * row["accuracy"] for row in rows]
            axes.plot([row["length"] for row in rows], accuracies, label=label, **series_style(number))
        _length_axis(axes, list(results.values()))
        axes.set(ylabel="masked-token accuracy, percent")
        best = max(row["accuracy"] for rows in results.values() for row in rows)
        axes.set_ylim(0, 120 * best or 1)
        label_lines(axes)


def plot_loss(results: dict[str, dict[str, list[dict[str, float]]]], out: Path) -> None:
    """Plot the loss against length, and the change beyond the trained length by position, one line per run.

    A dotted line marks the trained length. Error bars are one standard error.
    """
    names = distinct_names([Path(run) for run in results])
    with saved_figure(out, 1, 2) as (_, (left, right)):
        for number, (label, result) in enumerate(zip(names, results.values(), strict=True)):
            rows, ranges, style = result["by_length"], result["by_position"], series_style(number)
            left.plot([r["length"] for r in rows], [r["loss"] for r in rows], **style)
            changes, errors = ([r[key] for r in ranges] for key in ("change", "change_stderr"))
            right.errorbar([r["to"] for r in ranges], changes, yerr=errors, elinewidth=0.9, label=label, **style)
        by_length = [result["by_length"] for result in results.values()]
        for axes in (left, right):
            _length_axis(axes, by_length)
        right.axhline(0, color=GRAY, lw=0.8)
        left.set(ylabel="loss (nats per token)", title="Loss of the same tokens by context length")
        right.set(
            xlabel="position, up to",
            ylabel="change of the loss (nats per token)",
            title="Full context minus trained length",
        )
        label_lines(right)


def _length_axis(axes: Any, runs: list[list[dict[str, float]]]) -> None:
    lengths = sorted({row["length"] for rows in runs for row in rows})
    for trained in {rows[0]["trained_at"] for rows in runs}:
        axes.axvline(trained, color=GRAY, ls=":", lw=1)
    log_axes(axes, "x", lengths)
    axes.set(xlabel="context length, tokens (dotted: trained length)")
