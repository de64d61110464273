"""Draw the figures of a comparison: final values and training curves, scaling with size, and loss per source."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tools.compare.results import Result, Row, ranked
from tools.reporting.style import COLORS, STYLE, pyplot, save_figure


def draw(results: Sequence[Result], rows: Sequence[Row], folder: Path, title: str, reference: str | None) -> list[Path]:
    """Write results.png; with several sizes scaling.png; with several sources sources.png. Return the written files."""
    plt = pyplot()
    styles = _styles([row.model for row in rows])
    with plt.rc_context(STYLE):
        written = [_results(plt, results, rows, styles, folder / "results.png", title)]
        if len({row.size for row in rows}) > 1:
            written.append(_scaling(plt, rows, styles, folder / "scaling.png", title))
        largest = max(rows, key=lambda row: row.body).size
        here = [row for row in rows if row.size == largest]
        sources = [metric for metric in _sources(here[0]) if all(metric in row.values for row in here)]
        if len(here) > 1 and len(sources) > 1:
            written.append(_by_source(plt, here, sources, styles, folder / "sources.png", title, reference))
    return written


def _styles(models: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Return one style per model: its colour, and another line style and marker after all colours are used."""
    names = dict.fromkeys(models)
    return {
        name: {
            "color": COLORS[i % len(COLORS)],
            "ls": "-" if i < len(COLORS) else "--",
            "marker": "o" if i < len(COLORS) else "s",
        }
        for i, name in enumerate(names)
    }


def _results(
    plt: Any, results: Sequence[Result], rows: Sequence[Row], styles: dict[str, Any], out: Path, title: str
) -> Path:
    """Draw one column per size: final values of each seed and their mean above, validation curves below."""
    sizes = list(dict.fromkeys(row.size for row in rows))
    masked = all("accuracy" in row.values for row in rows)
    metric, scale = ("accuracy", 100.0) if masked else ("loss", 1.0)
    label = "masked-token accuracy, %" if masked else "validation loss (nats per token)"
    most = max(sum(row.size == size for row in rows) for size in sizes)
    figure, axes = plt.subplots(
        2,
        len(sizes),
        figsize=(2.0 + 4.4 * len(sizes), 3.6 + 0.28 * most),
        height_ratios=[0.28 * most + 0.4, 3.0],
        layout="constrained",
        squeeze=False,
    )
    for column, size in enumerate(sizes):
        here = ranked(row for row in rows if row.size == size)
        top, below = axes[0, column], axes[1, column]
        for place, row in enumerate(here):
            color = styles[row.model]["color"]
            values = [scale * value for value in row.values[metric].values()]
            top.plot(values, [place] * len(values), ls="", marker="o", ms=4, mfc="none", color=color, alpha=0.7)
            top.plot([scale * row.mean(metric)], [place], ls="", marker="|", ms=13, mew=2.2, color=color)
        top.set_yticks(range(len(here)), [row.label for row in here])
        top.set_ylim(len(here) - 0.4, -0.6)
        top.grid(axis="y", visible=False)
        top.set(xlabel=f"{label}; circles: seeds", title=size)
        late: list[float] = []
        for row in here:
            curve = _curve(results, row, metric, scale)
            if curve is None:
                continue
            tokens, low, mean, high = curve
            style = styles[row.model]
            below.plot(tokens, mean, color=style["color"], ls=style["ls"], label=row.label, lw=1.3)
            below.fill_between(tokens, low, high, color=style["color"], alpha=0.15, lw=0)
            late += [value for value in mean[len(mean) // 3 :] if math.isfinite(value)]
        if late:
            margin = 0.08 * max(max(late) - min(late), 1e-6)
            below.set_ylim(min(late) - margin, max(late) + margin)
        below.xaxis.set_major_formatter(lambda value, _: f"{value / 1e6:g} M")
        below.set(xlabel="tokens; before the end on part of the validation text", ylabel=label)
    # Some models may not be complete in every size.
    lines = {line.get_label(): line for below in axes[1] for line in below.lines}
    if lines:
        axes[1, -1].legend(list(lines.values()), list(lines), loc="center left", bbox_to_anchor=(1.02, 0.5), fontsize=8)
    figure.suptitle(title, fontsize=10.5)
    save_figure(figure, out)
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


def _scaling(plt: Any, rows: Sequence[Row], styles: dict[str, Any], out: Path, title: str) -> Path:
    """Draw loss against parameters: mean and range over the seeds."""
    figure, axes = plt.subplots(figsize=(6.6, 4.2), layout="constrained")
    for model in dict.fromkeys(row.model for row in rows):
        model_rows = sorted((row for row in rows if row.model == model), key=lambda row: row.body)
        means = [row.mean("loss") for row in model_rows]
        below = [mean - min(row.values["loss"].values()) for mean, row in zip(means, model_rows, strict=True)]
        above = [max(row.values["loss"].values()) - mean for mean, row in zip(means, model_rows, strict=True)]
        axes.errorbar(
            [row.body for row in model_rows],
            means,
            yerr=[below, above],
            label=model_rows[0].label,
            ms=4,
            lw=1.3,
            elinewidth=0.8,
            **styles[model],
        )
    axes.set_xscale("log")
    ticks = sorted({row.body for row in rows if row.model == rows[0].model})
    axes.set_xticks(ticks, [f"{tick / 1e6:.3g} M" for tick in ticks])
    axes.minorticks_off()
    axes.set(xlabel="parameters without embeddings", ylabel="validation loss (nats per token)", title=title)
    axes.legend(loc="center left", bbox_to_anchor=(1.02, 0.5), fontsize=8)
    save_figure(figure, out)
    return out


def _by_source(
    plt: Any,
    rows: Sequence[Row],
    sources: Sequence[str],
    styles: dict[str, Any],
    out: Path,
    title: str,
    reference: str | None,
) -> Path:
    """Draw each model's loss per source minus the reference's, for one size. Bars are standard errors over the seeds."""
    base = next((row for row in rows if row.model == reference), rows[0])
    others = [row for row in rows if row is not base]
    figure, axes = plt.subplots(figsize=(7.2, 1.2 + 0.62 * len(sources)), layout="constrained")
    for number, row in enumerate(others):
        offset = 0.7 * ((number + 0.5) / len(others) - 0.5)
        pairs = [row.difference(base, metric) for metric in sources]
        axes.errorbar(
            [mean for mean, _ in pairs],
            [place + offset for place in range(len(sources))],
            xerr=[0.0 if math.isnan(error) else error for _, error in pairs],
            ms=4,
            elinewidth=0.9,
            label=row.label,
            **{**styles[row.model], "ls": ""},
        )
    axes.axvline(0, color="#555555", lw=1)
    axes.set_yticks(range(len(sources)), [metric.removeprefix("loss/") for metric in sources])
    axes.set_ylim(len(sources) - 0.4, -0.6)
    axes.set(
        xlabel=f"loss minus that of {base.label} (nats per token)", title=f"{title}{base.size and f', {base.size}'}"
    )
    axes.legend(loc="center left", bbox_to_anchor=(1.02, 0.5), fontsize=8)
    save_figure(figure, out)
    return out


def _sources(row: Row) -> list[str]:
    return [metric for metric in row.values if metric.startswith("loss/")]
