"""Write tables and a chart of results, with the published rows."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tools.evaluation.document_metrics import metric_value, metrics_of
from tools.evaluation.suites import Column, Suite
from tools.reporting.tables import markdown_table

Results = Mapping[str, Any]


@dataclass(frozen=True)
class Row:
    """Hold one model's numbers by column label: (value, standard error or None)."""

    model: str
    cells: dict[str, tuple[float, float | None]]
    published: bool = False


@dataclass(frozen=True)
class Table:
    """Hold a suite's table for every format. Values are in percent except perplexities."""

    title: str
    columns: tuple[Column, ...]
    average: tuple[str, ...]
    rows: list[Row]
    chance: dict[str, float]
    notes: list[str] = field(default_factory=list)

    def average_of(self, row: Row) -> float | None:
        """Return the mean of the columns of the average, or None if one is missing."""
        if not self.average or not set(self.average) <= row.cells.keys():
            return None
        return sum(row.cells[label][0] for label in self.average) / len(self.average)

    def text_rows(self) -> tuple[list[str], list[list[str]]]:
        """Return header and rows as text. An empty cell is a dash."""
        header = ["model", *(column.label for column in self.columns), *(["average"] if self.average else [])]
        rows = []
        for row in self.rows:
            cells = [_number(row.cells.get(column.label, (None,))[0]) for column in self.columns]
            rows.append([row.model, *cells, *([_number(self.average_of(row))] if self.average else [])])
        if self.chance:
            cells = [_number(self.chance.get(column.label)) for column in self.columns]
            rows.append(["chance", *cells, *(["-"] if self.average else [])])
        return header, rows


def suite_table(suite: Suite, models: Sequence[tuple[str, Results]]) -> Table:
    """Return several models in the columns of a suite, with its published rows below them."""
    columns = _columns(suite, [results for _, results in models])
    rows = []
    for name, results in models:
        cells = {}
        for column in columns:
            score = metric_value(results, column.task, column.metric)
            if score is not None:
                scale = 1.0 if is_raw(column.metric) else 100.0
                cells[column.label] = (scale * score[0], None if score[1] is None else scale * score[1])
        rows.append(Row(name, cells))
    labels = {column.label for column in columns}
    for published in suite.rows:
        numbers = {label: (float(value), None) for label, value in published.items() if label in labels}
        tokens = f", {published['tokens']} tokens" if "tokens" in published else ""
        rows.append(Row(f"{published['model']}{tokens}", numbers, published=True))
    chance = {}
    for column in columns:
        known = [r["metalion"]["chance"][column.task] for _, r in models if column.task in r["metalion"]["chance"]]
        if known and _is_accuracy(column.metric):
            chance[column.label] = 100 * known[0]
    table = Table(suite.title, columns, suite.average, rows, chance, list(suite.notes))
    table.notes.extend(_notes(suite, columns, models))
    return table


def is_raw(metric: str) -> bool:
    """Return whether a metric is no share and has no percent."""
    return "perplexity" in metric or "bits_per_byte" in metric


def _is_accuracy(metric: str) -> bool:
    return metric.partition(",")[0] in ("acc", "acc_norm")


def detail_rows(results: Results) -> tuple[list[str], list[list[str]]]:
    """Return every metric of every task with its split, examples and number of documents."""
    header = ["task", "version", "split", "shots", "documents", "metric", "value", "±", "chance"]
    section, rows = results["metalion"], []
    for task in results["versions"]:
        for metric in metrics_of(results, task):
            value, error = metric_value(results, task, metric) or (float("nan"), None)
            scale = 1.0 if is_raw(metric) else 100.0
            chance = section["chance"].get(task) if _is_accuracy(metric) else None
            rows.append(
                [
                    task,
                    str(results["versions"][task]),
                    section["split"].get(task, "") + ("*" if task in section["other_split"] else ""),
                    str(results["n-shot"].get(task, "")),
                    f"{results['n-samples'][task]['effective']:,}",
                    metric + (" (harness)" if task == "multirc" and metric == "acc" else ""),
                    _number(scale * value),
                    _number(None if error is None else scale * error),
                    _number(None if chance is None else 100 * chance),
                ]
            )
    return header, rows


def markdown(tables: Sequence[Table], results: Sequence[tuple[str, Results]]) -> str:
    """Return all suites and the details of every model as Markdown."""
    parts = []
    for table in tables:
        parts += [f"## {table.title}", markdown_table(*table.text_rows()), "\n".join(f"- {n}" for n in table.notes)]
    for name, result in results:
        parts += [f"## {name}", _describe(result), markdown_table(*detail_rows(result))]
    return "\n\n".join(part for part in parts if part) + "\n"


def latex(tables: Sequence[Table]) -> str:
    """Return each suite as a booktabs table, with the published rows below a rule."""
    parts = []
    for table in tables:
        header, text = table.text_rows()
        lines = [" & ".join(map(_escape, row)) + r" \\" for row in text]
        evaluated = sum(not row.published for row in table.rows)
        if 0 < evaluated < len(lines):
            lines.insert(evaluated, r"\midrule")
        parts.append(
            "\n".join(
                [
                    r"% needs \usepackage{booktabs}",
                    r"\begin{table}",
                    r"\centering",
                    rf"\caption{{{_escape(table.title)}, zero-shot}}",
                    rf"\begin{{tabular}}{{l{'r' * (len(header) - 1)}}}",
                    r"\toprule",
                    " & ".join(map(_escape, header)) + r" \\",
                    r"\midrule",
                    *lines,
                    r"\bottomrule",
                    r"\end{tabular}",
                    r"\par\medskip\footnotesize",
                    *(_escape(note) for note in table.notes),
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
            axes.set(title=table.title, ylabel="percent")
            axes.set_ylim(bottom=0)
            axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))


def _columns(suite: Suite, results: Sequence[Results]) -> tuple[Column, ...]:
    """Return the suite's columns. A task that is named alone has one column per metric."""
    shown: list[Column] = []
    for column in suite.columns:
        if column.metric:
            shown.append(column)
            continue
        members = next((r["group_subtasks"].get(column.task) for r in results if "group_subtasks" in r), None)
        for task in members or [column.task]:
            metrics = dict.fromkeys(metric for r in results for metric in metrics_of(r, task))
            shown += [Column(task, metric, f"{task} {metric}") for metric in metrics]
    return tuple(shown)


def _notes(suite: Suite, columns: Sequence[Column], models: Sequence[tuple[str, Results]]) -> list[str]:
    tasks, notes = {column.task for column in columns}, []
    if suite.rows:
        notes.append(f"Published rows: {suite.source}; averages are computed from the columns shown.")
    for name, results in models:
        section = results["metalion"]
        if section["score"] != "log-likelihood":
            notes.append(f"{name} is a masked model: choices are ranked by {section['score']}.")
        cut = {task: n for task, n in section["truncated"].items() if task in tasks or not task}
        if cut:
            counts = ", ".join(f"{task or 'all tasks'} {n:,}" for task, n in cut.items())
            limit = f"{section['max_length']:,} tokens"
            notes.append(f"{name}: requests longer than {limit} lost their beginning, as in the harness: {counts}.")
        for key, words in _SPLITS.items():
            if counts := {task: n for task, n in section.get(key, {}).items() if task in tasks}:
                shown = ", ".join(f"{task} {n:,} of {section['requests'].get(task, n):,}" for task, n in counts.items())
                notes.append(f"{name}: {words}: {shown}.")
        if other := [task for task in section["other_split"] if task in tasks]:
            splits = ", ".join(f"{task} ({section['split'][task]})" for task in other)
            notes.append(f"{name}: on another split than the harness's own: {splits}.")
        small = [
            task for task in results["n-samples"] if task in tasks and results["n-samples"][task]["effective"] < 50
        ]
        if small:
            notes.append(
                f"{name}: fewer than 50 documents, no more than a check that the task runs: {', '.join(small)}."
            )
    return notes


# Flags of `request_pairs.Pair`.
_SPLITS = {
    "apart": "context and continuation share a token and were encoded apart (the harness refuses them)",
    "recut": "the context has other tokens in front of its continuation; split as in the harness",
}


def _describe(results: Results) -> str:
    section, config = results["metalion"], results["config"]
    parts = [
        f"{config['model_num_parameters'] / 1e6:,.1f} M parameters" if config.get("model_num_parameters") else "",
        str(config.get("model_dtype", "")).removeprefix("torch."),
        f"{section['max_length']:,} tokens at once" if section.get("max_length") else "",
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
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    **{character: f"\\{character}" for character in "&%$#_{}"},
}


def _number(value: float | None) -> str:
    if value is None or value != value:
        return "-"
    return f"{value:.2f}" if abs(value) < 1e5 else f"{value:.3g}"
