"""Define the style of all figures and write them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from data.atomic_io import atomic_write

# Okabe and Ito (2008): distinguishable with every kind of colour vision, and in print.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#8C6D1F", "#000000")
STYLE: dict[str, Any] = {
    "figure.dpi": 100,
    "savefig.dpi": 160,
    "savefig.bbox": "tight",
    "font.size": 9,
    "axes.titlesize": 9.5,
    "axes.titlelocation": "left",
    "axes.titlepad": 8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e3e3e3",
    "grid.linewidth": 0.7,
    "legend.frameon": False,
    "lines.linewidth": 1.5,
    "pdf.fonttype": 42,
}


def pyplot() -> Any:
    """Return matplotlib.pyplot without a display. It is imported on use, because that takes long."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt


def save_figure(figure: Any, out: Path, **options: Any) -> None:
    """Write a figure whole or not at all, in the format that its name ends with, and close it. Makes its folder.

    options: of `matplotlib.figure.Figure.savefig`.
    """
    out.parent.mkdir(parents=True, exist_ok=True)
    try:
        with atomic_write(out) as file:
            figure.savefig(file, format=out.suffix[1:], **options)
    finally:
        pyplot().close(figure)


@contextmanager
def saved_figure(
    out: Path, rows: int = 1, columns: int = 1, *, style: Mapping[str, Any] | None = None, **options: Any
) -> Iterator[tuple[Any, Any]]:
    """Yield a figure and its axes in the project's style, then write the figure to a file.

    style: entries of `STYLE` to replace. options: of `matplotlib.pyplot.subplots`.
    """
    plt = pyplot()
    with plt.rc_context({**STYLE, **(style or {})}):
        figure, axes = plt.subplots(rows, columns, layout="constrained", **options)
        try:
            yield figure, axes
            save_figure(figure, out)
        finally:
            plt.close(figure)
