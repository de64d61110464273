"""Format tables as Markdown and as plain text."""

from __future__ import annotations

import math
import shutil
import sys
from collections.abc import Sequence

# Keys of a measurement that are no metrics.
NO_METRICS = ("tokens", "bytes", "documents", "sequence_length", "stride", "seconds")
# A score on fewer documents shows only that the task runs.
FEW_DOCUMENTS = 50


def markdown_table(
    header: Sequence[str], rows: Sequence[Sequence[str]], *, text_columns: int = 1, aligned: bool = False
) -> str:
    """Return a Markdown table.

    text_columns: the first columns, set to the left; the others are set to the right.
    aligned: pad the cells, so that the columns line up as plain text too.
    """
    cells = [[cell.replace("|", r"\|").replace("\n", " ") for cell in row] for row in (header, *rows)]
    widths = [max(1, *(len(row[i]) for row in cells)) if aligned else 1 for i in range(len(header))]

    def line(row: Sequence[str]) -> str:
        if aligned:
            row = [
                cell.ljust(w) if i < text_columns else cell.rjust(w)
                for i, (cell, w) in enumerate(zip(row, widths, strict=True))
            ]
        return f"| {' | '.join(row)} |"

    rule = "|".join("-" * (w + 2) if i < text_columns else "-" * (w + 1) + ":" for i, w in enumerate(widths))
    return "\n".join([line(cells[0]), f"|{rule}|", *map(line, cells[1:])])


def plain_table(header: Sequence[str], rows: Sequence[Sequence[str]], *, text_columns: int = 1) -> str:
    """Return aligned columns under a rule; the first `text_columns` hold text, the others numbers.

    A table wider than the terminal continues in further tables below, which repeat the first columns.
    """
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]
    limit = terminal_width()
    text = range(text_columns)
    tables = [[*text]]
    for column in range(text_columns, len(header)):
        if tables[-1] != [*text] and sum(widths[i] + 2 for i in [*tables[-1], column]) - 2 > limit:
            tables.append([*text])
        tables[-1].append(column)

    def line(row: Sequence[str], columns: Sequence[int]) -> str:
        return "  ".join(row[i].ljust(widths[i]) if i in text else row[i].rjust(widths[i]) for i in columns)

    rule = ["-" * w for w in widths]
    return "\n\n".join("\n".join(line(row, columns) for row in (header, rule, *rows)) for columns in tables)


def printed_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table for standard output: plain and within its width on a terminal, Markdown if it is redirected."""
    return plain_table(header, rows) if sys.stdout.isatty() else markdown_table(header, rows)


def terminal_width() -> float:
    """Return the columns of the terminal, or infinity if standard output is none."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else math.inf
