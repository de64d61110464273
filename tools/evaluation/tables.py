"""Build tables of results: one row per model with its standard errors, published rows, majority class and chance."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from megatron_lite.plural import counted
from tools.evaluation.document_metrics import metric_value, metrics_of
from tools.evaluation.suites import Column, Suite
from tools.reporting.tables import FEW_DOCUMENTS

Results = Mapping[str, Any]
# More columns than this become rows.
MOST_COLUMNS = 14


@dataclass(frozen=True)
class Row:
    """Hold one model's numbers by column label: (value, standard error or None).

    partial: labels of the columns whose data are not the whole set.
    """

    model: str
    cells: dict[str, tuple[float, float | None]]
    published: bool = False
    partial: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Table:
    """Hold a suite's table for every format. Values are in percent except perplexities.

    Attributes:
        caption: title, number of examples in the prompt, and the limit of documents.
        majority, chance: label -> score of the most frequent label, and of guessing.
    """

    caption: str
    columns: tuple[Column, ...]
    average: tuple[str, ...]
    rows: list[Row]
    majority: dict[str, float]
    chance: dict[str, float]
    notes: list[str] = field(default_factory=list)

    def average_of(self, row: Row) -> float | None:
        """Return the mean of the columns of the average, or None if one is missing."""
        if not self.average or not set(self.average) <= row.cells.keys():
            return None
        return sum(row.cells[label][0] for label in self.average) / len(self.average)

    def average_error(self, row: Row) -> float | None:
        """Return the standard error of the average, whose columns are independent, or None if one is unknown."""
        errors = [row.cells.get(label, (0.0, None))[1] for label in self.average]
        known = [error for error in errors if error is not None]
        if not errors or len(known) < len(errors):
            return None
        return math.sqrt(sum(error**2 for error in known)) / len(errors)

    def text_rows(self) -> tuple[list[str], list[list[str]]]:
        """Return header and rows as text. An empty cell is a dash. A wide table has its columns as rows."""
        labels = [column.label for column in self.columns]
        average = ["average"] if self.average else []
        header, rows = ["model", *labels, *average], []
        for row in self.rows:
            values = [_marked(row, label) for label in labels]
            rows.append([row.model, *values, *([number(self.average_of(row))] if average else [])])
            if any(error is not None for _, error in row.cells.values()):
                errors = [number(row.cells.get(label, (0.0, None))[1]) for label in labels]
                rows.append(["± standard error", *errors, *([number(self.average_error(row))] if average else [])])
        for name, values_by_label in (("majority class", self.majority), ("chance", self.chance)):
            if values_by_label:
                cells = [number(values_by_label.get(label)) for label in labels]
                rows.append([name, *cells, *(["-"] if average else [])])
        if len(header) > MOST_COLUMNS:
            header, *rows = [list(line) for line in zip(header, *rows, strict=True)]
        return header, rows

    @property
    def evaluated_lines(self) -> int | None:
        """Return the number of lines before the first published row; None without one, or if columns are rows."""
        published = any(row.published for row in self.rows)
        if not published or len(self.columns) + 1 + bool(self.average) > MOST_COLUMNS:
            return None
        evaluated = [row for row in self.rows if not row.published]
        return sum(1 + any(error is not None for _, error in row.cells.values()) for row in evaluated) or None


def suite_table(suite: Suite, models: Sequence[tuple[str, Results]]) -> Table:
    """Return several models in the columns of a suite, with its published rows below them."""
    results = [result for _, result in models]
    columns = _columns(suite, results)
    rows = [_row(name, result, columns) for name, result in models]
    labels = {column.label for column in columns}
    for published in suite.rows:
        numbers = {label: (float(value), None) for label, value in published.items() if label in labels}
        tokens = f", {published['tokens']} tokens" if "tokens" in published else ""
        rows.append(Row(f"{published['model']}{tokens}", numbers, published=True))
    caption = ", ".join(filter(None, (suite.title, shots_words(results, columns), *limits(results))))
    table = Table(caption, columns, suite.average, rows, {}, {}, list(suite.notes))
    for column in columns:
        metric = column.metric.partition(",")[0]
        for section in (result["metalion"] for result in results):
            majority = section.get("majority", {}).get(column.task, {})
            if metric in majority:
                table.majority.setdefault(column.label, 100 * majority[metric])
            if column.task in section["chance"] and metric in ("acc", "acc_norm"):
                table.chance.setdefault(column.label, 100 * section["chance"][column.task])
    table.notes.extend(_notes(suite, columns, models))
    return table


def is_raw(metric: str) -> bool:
    """Return whether a metric is no share and has no percent."""
    return "perplexity" in metric or "bits_per_byte" in metric


def number(value: float | None) -> str:
    """Return a number as text, with two decimals; a dash for None and nan."""
    if value is None or value != value:
        return "-"
    return f"{value:.2f}" if abs(value) < 1e5 else f"{value:.3g}"


def limits(results: Sequence[Results]) -> list[str]:
    """Return the limits of documents, in words, without repetition."""
    words = []
    for limit in dict.fromkeys(result["metalion"].get("limit") for result in results):
        if limit is not None:
            amount = f"{100 * limit:g} % of the documents" if limit < 1 else counted(int(limit), "document")
            words.append(f"only the first {amount} per task")
    return words


def shots_words(results: Sequence[Results], columns: Sequence[Column]) -> str:
    """Return the examples in the prompts of the columns' tasks, such as "zero-shot" or "0- to 5-shot"."""
    shots = {result["n-shot"][c.task] for result in results for c in columns if c.task in result["n-shot"]}
    if not shots:
        return ""
    low, high = min(shots), max(shots)
    return f"{low}- to {high}-shot" if low < high else "zero-shot" if high == 0 else f"{high}-shot"


def whole_size(results: Results, task: str) -> int | None:
    """Return the documents of a task's whole set if the evaluated ones are fewer, else None."""
    samples = results["n-samples"].get(task)
    whole = results["metalion"].get("whole_set", {}).get(task) or (samples or {}).get("original", 0)
    return whole if samples and samples["effective"] < whole else None


def detail_rows(results: Results) -> tuple[list[str], list[list[str]]]:
    """Return every metric of every task and group with its split, examples and number of documents."""
    header = ["task", "version", "split", "shots", "documents", "metric", "value", "±", "majority", "chance"]
    section, rows = results["metalion"], []
    for task in results["versions"]:
        samples = results["n-samples"].get(task)
        whole = whole_size(results, task)
        documents = f"{samples['effective']:,}" if samples else "group"
        for metric in metrics_of(results, task):
            value, error = metric_value(results, task, metric) or (float("nan"), None)
            scale = 1.0 if is_raw(metric) else 100.0
            name = metric.partition(",")[0]
            chance = section["chance"].get(task) if name in ("acc", "acc_norm") else None
            majority = section.get("majority", {}).get(task, {}).get(name)
            rows.append(
                [
                    task,
                    str(results["versions"][task]),
                    section["split"].get(task, "") + ("*" if task in section["other_split"] else ""),
                    str(results["n-shot"].get(task, "")),
                    documents + (f" of {whole:,}" if whole else ""),
                    metric + (" (harness)" if task == "multirc" and metric == "acc" else ""),
                    number(scale * value),
                    number(None if error is None else scale * error),
                    number(None if majority is None else 100 * majority),
                    number(None if chance is None else 100 * chance),
                ]
            )
    return header, rows


def _row(name: str, results: Results, columns: Sequence[Column]) -> Row:
    cells, partial = {}, set()
    for column in columns:
        score = metric_value(results, column.task, column.metric)
        if score is not None:
            scale = 1.0 if is_raw(column.metric) else 100.0
            cells[column.label] = (scale * score[0], None if score[1] is None else scale * score[1])
            members = results["metalion"].get("members", {}).get(column.task, [column.task])
            if any(whole_size(results, task) for task in members):
                partial.add(column.label)
    return Row(name, cells, partial=frozenset(partial))


def _marked(row: Row, label: str) -> str:
    return number(row.cells.get(label, (None,))[0]) + ("†" if label in row.partial else "")


def _columns(suite: Suite, results: Sequence[Results]) -> tuple[Column, ...]:
    """Return the suite's columns. A task without a metric has one column per metric.

    A group has its own scores and those of its subgroups, or without them those of its tasks, like a tag.
    """
    columns: list[Column] = []
    for column in suite.columns:
        if column.metric:
            columns.append(column)
            continue
        names = dict.fromkeys(name for r in results for name in _scored_names(r, column.task))
        for name in names:
            metrics = dict.fromkeys(metric for r in results for metric in metrics_of(r, name))
            columns += [Column(name, metric, f"{name} {metric}") for metric in metrics]
    return tuple(dict.fromkeys(columns))


def _scored_names(results: Results, name: str) -> list[str]:
    """Return the names with scores that a requested task, tag or group stands for."""
    if metrics_of(results, name):
        children = results.get("group_subtasks", {}).get(name, ())
        groups = [child for child in children if child in results.get("group_subtasks", {})]
        return [name, *(group for group in groups if metrics_of(results, group))]
    return list(results["metalion"].get("members", {}).get(name, [name]))


def _notes(suite: Suite, columns: Sequence[Column], models: Sequence[tuple[str, Results]]) -> list[str]:
    tasks, notes = {*suite.tasks, *(column.task for column in columns)}, []
    for _, results in models:
        members = results["metalion"].get("members", {})
        tasks |= {task for name in suite.tasks for task in members.get(name, ())}
    if suite.rows:
        notes.append(f"Published rows: {suite.source}; averages are computed from the columns shown.")
        if shots_words([results for _, results in models], columns) != "zero-shot":
            notes.append("The published rows are zero-shot, the others are not.")
    for name, results in models:
        notes += _notes_of_model(name, results, tasks)
    return notes


def _notes_of_model(name: str, results: Results, tasks: Collection[str]) -> list[str]:
    """Return sentences on how a model's scores of these tasks were measured, where that is not the usual way."""
    section, notes = results["metalion"], []
    if section["score"] != "log-likelihood":
        notes.append(f"{name} is a masked model: choices are ranked by {section['score']}.")
    if section.get("limit") is not None:
        (words,) = limits([results])
        notes.append(f"{name}: {words} (--limit): no score of the whole sets.")
    samples = {task: counts["effective"] for task, counts in results["n-samples"].items() if task in tasks}
    if partial := [(task, whole) for task in samples if (whole := whole_size(results, task))]:
        counts = _listed([f"{task} {samples[task]:,} of {whole:,}" for task, whole in partial])
        notes.append(f"{name}: † not the whole set: {counts} documents.")
    if truncated := {task: n for task, n in section["truncated"].items() if task in tasks or not task}:
        counts = ", ".join(f"{task or 'all tasks'} {n:,}" for task, n in truncated.items())
        limit = f"{section['max_length']:,} tokens"
        notes.append(
            f"{name}: prompts lost their beginning, as in the harness, where prompt and answer together were longer than "
            f"{limit}: {counts}."
        )
    for key, words in _SPLITS.items():
        if by_task := {task: n for task, n in section.get(key, {}).items() if task in tasks}:
            shown = ", ".join(f"{t} {n:,} of {section['requests'].get(t, n):,}" for t, n in by_task.items())
            notes.append(f"{name}: {words}: {shown}.")
    if other := [task for task in section["other_split"] if task in tasks]:
        splits = ", ".join(f"{task} ({section['split'][task]})" for task in other)
        notes.append(f"{name}: on another split than the harness's own: {splits}.")
    if small := [task for task, count in samples.items() if count < FEW_DOCUMENTS]:
        notes.append(
            f"{name}: fewer than {FEW_DOCUMENTS} documents, no more than a check that the task runs: {_listed(small)}."
        )
    return notes


def _listed(words: Sequence[str]) -> str:
    """Return the first 16 words with commas, and the number of the others."""
    most = 16
    rest = len(words) - most
    return ", ".join(words[:most]) + (f" and {rest} more" if rest > 0 else "")


# Flags of `request_pairs.Pair`.
_SPLITS = {
    "apart": "context and continuation share a token and were encoded apart (the harness refuses them)",
    "recut": "the whole text begins with other tokens than its context alone; split as in the harness",
}
