"""Hold scores by length of the text and by a second property: merge them, tabulate them, draw them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from data.atomic_io import write_text
from tools.evaluation.results_file import write_json

Cells = Sequence[Mapping[str, Any]]


def with_cells(
    earlier: Mapping[str, Any], results: dict[str, Any], row: str, order: Callable[[Any], Any] | None = None
) -> dict[str, Any]:
    """Return the results with the other cells of an earlier table of the same settings.

    Cells are identified by "length" and by the key `row`. The keys "lengths" and `row` + "s" list all of them. order: sorting
    key of the rows.
    """
    cells = {(cell["length"], cell[row]): cell for cell in [*earlier.get("cells", ()), *results["cells"]]}
    lengths, rows = sorted({place[0] for place in cells}), sorted({place[1] for place in cells}, key=order)
    every = [cells[length, value] for length in lengths for value in rows if (length, value) in cells]
    return {**results, "lengths": lengths, f"{row}s": rows, "cells": every}


def by_place(cells: Cells, value: str, row: str, rows: Sequence[Any], lengths: Sequence[int]) -> Any:
    """Return a value of the cells as [rows, lengths], NaN for a missing cell."""
    values = {(cell["length"], cell[row]): cell[value] for cell in cells}
    # A value of None becomes NaN.
    return np.array([[values.get((length, name), np.nan) for length in lengths] for name in rows], np.float64)


def formatted(values: Sequence[float], digits: int) -> list[str]:
    """Return numbers as text; a missing one is a dash."""
    return ["-" if np.isnan(value) else f"{value:.{digits}f}" for value in values]


def draw_cells(
    axes: Any, values: Any, rows: Sequence[str], lengths: Sequence[int], *, limits: tuple[float, float], digits: int
) -> None:
    """Draw values [rows, lengths] as coloured cells with their numbers. A missing one stays empty."""
    low, high = limits
    axes.imshow(values, cmap="viridis", vmin=low, vmax=high, aspect="auto")
    for row, column in np.argwhere(~np.isnan(values)):
        shade = "black" if values[row, column] > low + 0.6 * (high - low) else "white"
        number = f"{values[row, column]:.{digits}f}"
        axes.text(column, row, number, ha="center", va="center", color=shade, fontsize=8)
    axes.set_xticks(range(len(lengths)), [f"{length:,}" for length in lengths])
    axes.set_yticks(range(len(rows)), rows)


def write_cells(out: Path, results: Mapping[str, Any], text: str, draw: Callable[[Any, Path], None]) -> None:
    """Print tables, and write results, tables and picture as `out` with the suffixes .json, .md and .png."""
    print(f"\n{text}")
    write_json(out, results)
    write_text(out.with_suffix(".md"), text)
    draw(results, out.with_suffix(".png"))
    print("\n".join(str(path) for path in (out, out.with_suffix(".md"), out.with_suffix(".png"))))


def length_label(results: Mapping[str, Any]) -> str:
    """Return the label of the axis of lengths, with the trained length if it is known."""
    trained = results["model"].get("trained_length")
    return "tokens of text" + (f" (trained at {trained:,})" if trained else "")
