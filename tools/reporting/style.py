"""Define the style of all figures: size, colours, markers, axes, labels at the lines, bars.

Start with `saved_figure`. All figures are WIDTH inches wide, so that their text has one size in the documentation.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from data.atomic_io import atomic_write

# Okabe and Ito (2008): distinguishable with every kind of colour vision, and in print.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
MARKERS = "osD^vPX*<>hp"
GRAY = "#555555"
WIDTH = 9.6
ROW_HEIGHT = 3.6
STYLE: dict[str, Any] = {
    "figure.dpi": 100,
    "savefig.dpi": 160,
    "font.size": 9,
    "axes.titlesize": 9.5,
    "axes.titlelocation": "left",
    "axes.titlepad": 8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "figure.titlesize": 10.5,
    "grid.color": "#e3e3e3",
    "grid.linewidth": 0.7,
    "legend.frameon": False,
    "legend.fontsize": 8,
    "lines.linewidth": 1.5,
    "lines.markersize": 4.5,
    "pdf.fonttype": 42,
}


def pyplot() -> Any:
    """Return matplotlib.pyplot without a display. It is imported on use, because that takes long."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt


@contextmanager
def saved_figure(
    out: Path,
    rows: int = 1,
    columns: int = 1,
    *,
    height: float | None = None,
    style: Mapping[str, Any] | None = None,
    **options: Any,
) -> Iterator[tuple[Any, Any]]:
    """Yield a figure and its axes in the project's style, then write the figure to a file.

    rows, columns: of axes; rows = 0 yields no axes. height: in inches; default ROW_HEIGHT per row. style: entries of
    `STYLE` to replace. options: of `matplotlib.pyplot.subplots`.
    """
    plt = pyplot()
    options |= {"figsize": (WIDTH, height or ROW_HEIGHT * max(1, rows)), "layout": "constrained"}
    with plt.rc_context({**STYLE, **(style or {})}):
        figure, axes = plt.subplots(rows, columns, **options) if rows else (plt.figure(**options), None)
        try:
            yield figure, axes
            save_figure(figure, out)
        finally:
            plt.close(figure)


def save_figure(figure: Any, out: Path) -> None:
    """Write a figure atomically, in the format of the file's suffix. Makes its folder."""
    out.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(out) as file:
        figure.savefig(file, format=out.suffix[1:])


def fit_height_to_legend(figure: Any, entries: int) -> None:
    """Raise the height of a figure with a legend at its right, so that all entries of one line each are inside."""
    figure.set_figheight(max(figure.get_figheight(), 0.4 + 0.175 * entries))


def series_style(index: int) -> dict[str, Any]:
    """Return colour, marker and line style of a series. 18 series differ in colour or line style, 12 in their marker."""
    return {
        "color": COLORS[index % len(COLORS)],
        "marker": MARKERS[index % len(MARKERS)],
        "ls": ("-", "--", ":")[index // len(COLORS) % 3],
    }


def log_axes(axes: Any, axis: Literal["x", "y"], ticks: Sequence[float] | None = None) -> None:
    """Make the x or y axis logarithmic, with plain numbers at the given ticks or at 1, 2 and 5 times powers of 10."""
    from matplotlib.ticker import FixedLocator, LogLocator, MaxNLocator, NullLocator

    axes.set(**{f"{axis}scale": "log"})
    ruler = getattr(axes, f"{axis}axis")
    low, high = ruler.get_view_interval()
    # An axis of less than a decade holds too few of the numbers 1, 2 and 5.
    default = LogLocator(subs=(1, 2, 5)) if high > 8 * low else MaxNLocator(6, steps=[1, 2, 5, 10])
    ruler.set_major_locator(default if ticks is None else FixedLocator(sorted(ticks)))
    ruler.set_minor_locator(NullLocator())
    ruler.set_major_formatter(plain_number)


def plain_number(value: float, _position: int | None = None) -> str:
    """Return a number for an axis: 0.25, 512, 20 k, 2.5 M, 10 P; powers of two from 16,384 on as 16 Ki."""
    if value >= 2**14 and math.log2(value).is_integer():
        return f"{value / 2**20:g} Mi" if value >= 2**20 else f"{value / 2**10:g} Ki"
    if abs(value) >= 1e4:
        for unit, suffix in ((1e15, " P"), (1e12, " T"), (1e9, " B"), (1e6, " M"), (1e3, " k")):
            if abs(value) >= unit:
                return f"{value / unit:.4g}{suffix}"
    return f"{value:.4g}"


def label_lines(axes: Any, *, size: float = 8) -> None:
    """Write the label of each line beside its last finite point, without overlaps, in place of a legend.

    Call it when the lines and limits of the figure are complete. A line without finite points has no label.
    """
    from scipy.optimize import isotonic_regression

    if engine := axes.figure.get_layout_engine():
        engine.execute(axes.figure)
    box = axes.get_window_extent()
    gap = 1.25 * size * axes.figure.dpi / 72 / box.height
    lines = {line.get_label(): line for line in axes.lines if not line.get_label().startswith("_")}
    lines |= {bars.get_label(): bars[0] for bars in axes.containers if bars[0] is not None}  # of `errorbar`
    points = {label: [p for p in line.get_xydata() if all(map(math.isfinite, p))] for label, line in lines.items()}
    ends = {label: finite[-1] for label, finite in points.items() if finite}
    # A logarithmic axis has no place for 0, so heights are limited to the axis.
    heights = {
        label: min(1.0, max(0.0, (axes.transData.transform(end)[1] - box.y0) / box.height))
        for label, end in ends.items()
    }
    order = sorted(ends, key=heights.__getitem__)
    if not order:
        return
    # The nearest heights with at least `gap` between neighbours.
    places = isotonic_regression([heights[label] - number * gap for number, label in enumerate(order)]).x
    for number, label in enumerate(order):
        color = lines[label].get_color()
        # A leader from a line that ends early crosses the axes, where a solid one looks like data.
        end = (axes.transData.transform(ends[label])[0] - box.x0) / box.width
        axes.annotate(
            label,
            ends[label],
            xytext=(1.03, places[number] + number * gap),
            textcoords="axes fraction",
            color=color,
            fontsize=size,
            va="center",
            arrowprops={
                "arrowstyle": "-",
                "color": color,
                "lw": 0.5,
                "ls": ":" if end < 0.85 else "-",
                "shrinkA": 1,
                "shrinkB": 2,
                "relpos": (0, 0.5),
            },
        )


Bars = Mapping[str, tuple[float, float | None]]


def grouped_bars(
    axes: Any, labels: Sequence[str], series: Sequence[tuple[str, Bars]], faint: Collection[str] = ()
) -> None:
    """Draw series of {label: (height, error or None)}. The bars of a label are centred on its tick. faint: pale series."""
    width = 0.84 / max(1, len(series))
    for index, (name, bars) in enumerate(series):
        places, heights, errors = [], [], []
        for tick, label in enumerate(labels):
            if label in bars:
                present = [number for number, (_, others) in enumerate(series) if label in others]
                places.append(tick + (present.index(index) - (len(present) - 1) / 2) * width)
                heights.append(bars[label][0])
                errors.append(bars[label][1] or 0.0)
        if places:
            axes.bar(
                places,
                heights,
                0.92 * width,
                yerr=errors if any(errors) else None,
                label=name,
                color=COLORS[index % len(COLORS)],
                hatch=("", "//", "xx")[index // len(COLORS) % 3],
                alpha=0.45 if name in faint else 1.0,
                error_kw={"lw": 0.9, "ecolor": "#444444"},
            )
    axes.set_xticks(range(len(labels)), labels, fontsize=8 if len(labels) < 9 else 7)
    axes.grid(axis="x", visible=False)
