"""Draw the figures of a comparison: final values and training curves, scaling with size, and loss per source."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tools.compare.results import Result, Row, accuracy_label, loss_label, ranked
from tools.reporting.style import GRAY, label_lines, log_axes, plain_number, saved_figure, series_style


def draw(results: Sequence[Result], rows: Sequence[Row], folder: Path, title: str, reference: str | None) -> list[Path]:
    """Write results.png; with several sizes scaling.png; with several sources sources.png. Return the written files."""
    styles = {model: series_style(i) for i, model in enumerate(dict.fromkeys(row.model for row in rows))}
    written = [_results(results, rows, styles, folder / "results.png", title)]
    if len({row.size for row in rows}) > 1:
        written.append(_scaling(rows, styles, folder / "scaling.png", title))
    largest = max(rows, key=lambda row: row.body).size
    of_size = [row for row in rows if row.size == largest]
    sources = [metric for metric in _sources(of_size[0]) if all(metric in row.values for row in of_size)]
    if len(of_size) > 1 and len(sources) > 1:
        written.append(_by_source(of_size, sources, styles, folder / "sources.png", title, reference))
    return written


def _results(results: Sequence[Result], rows: Sequence[Row], styles: dict[str, Any], out: Path, title: str) -> Path:
    """Draw one column per size: final values of each seed and their mean above, validation curves below.

    Runs of a single validation have no curves, and their figure has no second row.
    """
    sizes = list(dict.fromkeys(row.size for row in rows))
    has_accuracy = all("accuracy" in row.values for row in rows)
    metric, scale = ("accuracy", 100.0) if has_accuracy else ("loss", 1.0)
    label = accuracy_label(rows) if has_accuracy else loss_label(rows)
    # All sizes have one order of models, that of the largest size.
    largest = [row.label for row in ranked(row for row in rows if row.size == sizes[-1])]
    models = list(dict.fromkeys([*largest, *(row.label for row in rows)]))
    # During the training a part of the text is validated, at the end all of it.
    shares = {line.get("evaluated_fraction", 1.0) for result in results for line in result.curve}
    partial = "; the last point is of the whole validation set" if min(shares, default=1.0) < 1 else ""
    curves = {(row.model, row.size): _curve(results, row, metric, scale) for row in rows}
    has_curves = any(curve is not None for curve in curves.values())
    heights = [0.22 * len(models) + 0.4, 3.0][: 1 + has_curves]
    options = {
        "height": sum(heights) + 0.6 * (1 + has_curves),
        "height_ratios": heights,
        "squeeze": False,
        "sharey": "row",
    }
    with saved_figure(out, len(heights), len(sizes), **options) as (figure, axes):
        late: list[float] = []
        for column, size in zip(axes.T, sizes, strict=True):
            top, below = column[0], column[-1]
            for row in (row for row in rows if row.size == size):
                color = styles[row.model]["color"]
                values, place = [scale * value for value in row.values[metric].values()], models.index(row.label)
                top.plot(values, [place] * len(values), ls="", marker="o", ms=4, mfc="none", color=color, alpha=0.7)
                top.plot([scale * row.mean(metric)], [place], ls="", marker="|", ms=13, mew=2.2, color=color)
                if (curve := curves[row.model, row.size]) is not None:
                    tokens, low, mean, high = curve
                    below.plot(tokens, mean, label=row.label, **styles[row.model])
                    below.fill_between(tokens, low, high, color=color, alpha=0.15, lw=0)
                    # The first third falls from the loss of an untrained model and would flatten the rest.
                    first = len(tokens) // 3
                    late += [value for value in (*low[first:], *high[first:]) if math.isfinite(value)]
                    below.set_xlim(left=tokens[first] - 0.02 * (tokens[-1] - tokens[first]))
            top.grid(axis="y", visible=False)
            top.set_title(size)
            if has_curves:
                below.xaxis.set_major_formatter(plain_number)
                below.set_xlabel("tokens")
        axes[0, 0].set_yticks(range(len(models)), models)
        axes[0, 0].set_ylim(len(models) - 0.4, -0.6)
        axes[0, len(sizes) // 2].set_xlabel(label)
        if late:
            margin = 0.05 * max(max(late) - min(late), 1e-6)
            axes[1, 0].set_ylim(min(late) - margin, max(late) + margin)
        if has_curves:
            axes[1, len(sizes) // 2].set_xlabel(f"tokens{partial}")
            axes[1, 0].set_ylabel(label)
            label_lines(axes[1, -1])
        shaded = ", shaded: range of the seeds" if has_curves else ""
        figure.suptitle(f"{title} (circles: seeds, bars: means{shaded})")
    return out


def _curve(results: Sequence[Result], row: Row, metric: str, scale: float) -> tuple[Any, Any, Any, Any] | None:
    """Return tokens and the lowest, mean and highest value over the seeds, at the validations that all seeds have."""
    runs = [r for r in results if (r.run.model, r.run.size) == (row.model, row.size) and r.final is not None]
    points = [{int(line["tokens"]): scale * float(line[metric]) for line in r.curve} for r in runs]
    common = sorted(set.intersection(*(set(p) for p in points))) if points else []
    if len(common) < 2:
        return None
    values = np.array([[p[t] for t in common] for p in points])
    return np.array(common), values.min(0), values.mean(0), values.max(0)


def _scaling(rows: Sequence[Row], styles: dict[str, Any], out: Path, title: str) -> Path:
    """Draw loss against parameters: mean and range over the seeds."""
    with saved_figure(out, height=4.6) as (_, axes):
        for model in dict.fromkeys(row.model for row in rows):
            model_rows = sorted((row for row in rows if row.model == model), key=lambda row: row.body)
            means = [row.mean("loss") for row in model_rows]
            below = [mean - min(row.values["loss"].values()) for mean, row in zip(means, model_rows, strict=True)]
            above = [max(row.values["loss"].values()) - mean for mean, row in zip(means, model_rows, strict=True)]
            sizes = [row.body for row in model_rows]
            label = model_rows[0].label
            axes.errorbar(sizes, means, yerr=[below, above], label=label, elinewidth=0.8, **styles[model])
        log_axes(axes, "x", {row.body for row in rows if row.model == rows[0].model})
        axes.xaxis.set_major_formatter(lambda value, _: plain_number(float(f"{value:.3g}")))
        seeds = " (bars: range of the seeds)" if any(len(row.values["loss"]) > 1 for row in rows) else ""
        axes.set(xlabel="parameters without embeddings", ylabel=loss_label(rows))
        axes.set_title(f"{title}{seeds}")
        label_lines(axes)
    return out


def _by_source(
    rows: Sequence[Row], sources: Sequence[str], styles: dict[str, Any], out: Path, title: str, reference: str | None
) -> Path:
    """Draw each model's loss per source minus the reference's, for one size. Bars are standard errors over the seeds."""
    base = next((row for row in rows if row.model == reference), rows[0])
    others = [row for row in rows if row is not base]
    with saved_figure(out, height=1.2 + min(0.62, 0.2 + 0.1 * len(others)) * len(sources)) as (_, axes):
        has_errors = False
        for number, row in enumerate(others):
            offset = 0.7 * ((number + 0.5) / len(others) - 0.5)
            pairs = [row.difference(base, metric) for metric in sources]
            has_errors |= not all(math.isnan(error) for _, error in pairs)
            axes.errorbar(
                [mean for mean, _ in pairs],
                [place + offset for place in range(len(sources))],
                xerr=[0.0 if math.isnan(error) else error for _, error in pairs],
                elinewidth=0.9,
                label=row.label,
                **{**styles[row.model], "ls": ""},
            )
        axes.axvline(0, color=GRAY, lw=1)
        axes.set_yticks(range(len(sources)), [metric.removeprefix("loss/") for metric in sources])
        axes.set_ylim(len(sources) - 0.4, -0.6)
        axes.set_xlabel(f"loss minus that of {base.label} (nats per token)")
        seeds = " (bars: standard errors over the seeds)" if has_errors else ""
        axes.set_title(f"{title}{base.size and f', {base.size}'}{seeds}")
        axes.legend(loc="center left", bbox_to_anchor=(1.02, 0.5))
    return out


def _sources(row: Row) -> list[str]:
    return sorted(metric for metric in row.values if metric.startswith("loss/"))
