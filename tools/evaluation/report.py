"""Write tables of results as Markdown, LaTeX and a chart."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tools.evaluation.tables import Table, detail_rows, is_raw, limits
from tools.reporting.tables import markdown_table

Results = Mapping[str, Any]


def markdown(tables: Sequence[Table], results: Sequence[tuple[str, Results]]) -> str:
    """Return all suites and the details of every model as Markdown."""
    parts = []
    for table in tables:
        parts += [f"## {table.caption}", markdown_table(*table.text_rows()), "\n".join(f"- {n}" for n in table.notes)]
    for name, result in results:
        parts += [f"## {name}", _describe(result), markdown_table(*detail_rows(result))]
    return "\n\n".join(part for part in parts if part) + "\n"


def latex(tables: Sequence[Table]) -> str:
    """Return each suite as a booktabs table that is scaled to the line width, with a rule above the published rows."""
    parts = []
    for table in tables:
        header, text = table.text_rows()
        lines = [" & ".join(map(_escape, row)) + r" \\" for row in text]
        if table.evaluated_lines:
            lines.insert(table.evaluated_lines, r"\midrule")
        parts.append(
            "\n".join(
                [
                    r"% needs \usepackage{booktabs,graphicx}",
                    r"\begin{table}",
                    r"\centering",
                    rf"\caption{{{_escape(table.caption)}}}",
                    r"\resizebox{\ifdim\width>\linewidth\linewidth\else\width\fi}{!}{%",
                    rf"\begin{{tabular}}{{l{'r' * (len(header) - 1)}}}",
                    r"\toprule",
                    " & ".join(map(_escape, header)) + r" \\",
                    r"\midrule",
                    *lines,
                    r"\bottomrule",
                    r"\end{tabular}}",
                    r"\par\medskip",
                    r"\begin{minipage}{\linewidth}\footnotesize",
                    *(_escape(note) for note in table.notes),
                    r"\end{minipage}",
                    r"\end{table}",
                ]
            )
        )
    return "\n\n".join(parts) + "\n"


def bar_chart(tables: Sequence[Table], out: Path) -> None:
    """Draw one panel per suite, one group per column and one bar per model. A line across a group marks chance."""
    from tools.reporting.style import grouped_bars, saved_figure

    with saved_figure(out, len(tables), squeeze=False) as (_, panels):
        for axes, table in zip(panels[:, 0], tables, strict=True):
            labels = [column.label for column in table.columns if not is_raw(column.metric)]
            published = [row.model for row in table.rows if row.published]
            grouped_bars(axes, labels, [(row.model, row.cells) for row in table.rows], faint=published)
            for i, label in enumerate(labels):
                if label in table.chance:
                    axes.hlines(
                        table.chance[label], i - 0.45, i + 0.45, color="black", lw=1.1, ls=(0, (3, 2)), zorder=4
                    )
            axes.plot([], [], color="black", lw=1.1, ls=(0, (3, 2)), label="chance")
            axes.set(title=table.caption, ylabel="percent")
            axes.set_ylim(bottom=0)
            axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))


def _describe(results: Results) -> str:
    section, config = results["metalion"], results["config"]
    parts = [
        f"{config['model_num_parameters'] / 1e6:,.1f} M parameters" if config.get("model_num_parameters") else "",
        str(config.get("model_dtype", "")).removeprefix("torch."),
        f"{section['max_length']:,} tokens at once" if section.get("max_length") else "",
        *limits([results]),
        f"lm-eval {results.get('lm_eval_version', '')}",
        f"weights {section['model']['sha256'][:16]}" if section.get("model", {}).get("sha256") else "",
        f"{section['seconds']:,.0f} s",
    ]
    return ", ".join(part for part in parts if part) + ". A star marks a split that is not the harness's own."


def _escape(text: str) -> str:
    text = "".join(_LATEX.get(character, character) for character in text)
    return re.sub("`([^`]*)`", r"\\texttt{\1}", text)


_LATEX = {
    "\\": r"\textbackslash{}",
    "±": r"$\pm$",
    "†": r"$^\dagger$",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    **{character: f"\\{character}" for character in "&%$#_{}"},
}
