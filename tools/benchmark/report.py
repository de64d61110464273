"""Write measurements as a Markdown table, a CSV file and a plot."""

from __future__ import annotations

import csv
import datetime
import io
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from data.atomic_io import write_text
from megatron_lite.plural import counted
from tools.reporting.style import COLORS, label_lines, log_axes, plain_number, saved_figure, series_style
from tools.reporting.tables import printed_table


def machine() -> str:
    """Return the device and the versions of torch and triton."""
    if not torch.cuda.is_available():
        threads = counted(torch.get_num_threads(), "thread")
        return f"{platform.processor() or platform.machine()}, {threads}, torch {torch.__version__}"
    import triton

    return f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}"


def table(rows: Sequence[Mapping[str, Any]], title: str) -> str:
    """Return a table for standard output under title, machine and date. Rows have the same keys; None is shown as "-"."""
    columns = list(rows[0])
    cells = [[_text(row[column]) for column in columns] for row in rows]
    return f"\n{title}: {machine()}, {datetime.date.today()}\n\n{printed_table(columns, cells)}"


def write_csv(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write rows with the same keys atomically, so that a kill does not lose measured rows."""
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]))
    writer.writeheader()
    writer.writerows(rows)
    write_text(path, text.getvalue())


def plot_lines(
    path: Path,
    rows: Sequence[Mapping[str, Any]],
    panels: Mapping[str, str],
    title: str,
    *,
    linear: bool = False,
    batches: bool = False,
) -> None:
    """Plot columns against length: one panel per column, one line per method. None values are left out.

    panels: {column: axis label}. linear: start the axis at 0 instead of using a logarithmic axis. batches: rows also differ
    in "batch"; plot points at LENGTHxBATCH without lines.
    """
    shapes = sorted({(row["length"], row["batch"]) for row in rows}) if batches else []
    with saved_figure(path, 1, len(panels), squeeze=False) as (figure, grid):
        for number, method in enumerate(dict.fromkeys(row["method"] for row in rows)):
            style = series_style(number) | ({"ls": ""} if batches else {})
            for axis, column in zip(grid[0], panels, strict=True):
                points = [
                    (shapes.index((row["length"], row["batch"])) if batches else row["length"], row[column])
                    for row in rows
                    if row["method"] == method and row[column] is not None
                ]
                if points:
                    axis.plot(*zip(*points, strict=True), label=method, **style)
        for axis, label in zip(grid[0], panels.values(), strict=True):
            if linear:
                axis.set_ylim(0, 1.08 * axis.dataLim.ymax)
                axis.yaxis.set_major_formatter("{x:,.0f}")
            else:
                log_axes(axis, "y")
            axis.set_ylabel(label)
            if batches:
                axis.set_xlabel("length x batch")
                axis.set_xticks(range(len(shapes)), [f"{length}\nx {batch}" for length, batch in shapes])
                axis.margins(x=0.15)
            else:
                axis.set_xlabel("length")
                log_axes(axis, "x", {row["length"] for row in rows})
        label_lines(grid[0][-1])
        figure.suptitle(title)


def plot_bars(path: Path, rows: Sequence[Mapping[str, Any]], columns: Mapping[str, str], title: str) -> None:
    """Plot horizontal bars: one panel per column, one bar per method, sorted by the first column."""
    first = next(iter(columns))
    rows = sorted((row for row in rows if row[first] is not None), key=lambda row: row[first])
    options = {"height": 1 + 0.22 * len(rows), "squeeze": False, "sharey": True}
    with saved_figure(path, 1, len(columns), **options) as (figure, axes):
        for axis, (column, label) in zip(axes[0], columns.items(), strict=True):
            colors = [COLORS[row["method"] == "attention"] for row in rows]
            axis.barh([row["method"] for row in rows], [row[column] or 0 for row in rows], color=colors)
            axis.set_xlabel(label)
            axis.xaxis.set_major_formatter(plain_number)
            axis.grid(axis="y", visible=False)
        figure.suptitle(title)


def _text(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.1e}" if 0 < abs(value) < 0.01 else f"{value:,.0f}" if abs(value) >= 1e3 else f"{value:.3f}"
    return f"{value:,}" if isinstance(value, int) and value >= 1e5 else str(value)
