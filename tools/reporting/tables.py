"""Tables as Markdown and as plain text."""

from __future__ import annotations

from collections.abc import Sequence


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


def plain_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return aligned columns under a rule; the first holds text, the others numbers."""
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]
    lines = [
        "  ".join(
            cell.ljust(w) if i == 0 else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=True))
        )
        for row in [header, *rows]
    ]
    return "\n".join([lines[0], "  ".join("-" * w for w in widths), *lines[1:]])
