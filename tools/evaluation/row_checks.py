"""Read and check the rows of a task's data files: the harness would score wrong rows, or end with a traceback."""

from __future__ import annotations

import ast
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from data.corpus.decompression import decompressed

Row = Mapping[str, Any]

# Task -> fields that must hold text.
_TEXTS = {
    "lambada_openai": ("text",),
    "logiqa": ("context", "question", "label"),
    "wsc273": ("text", "pronoun"),
    "boolq": ("passage", "question"),
    "piqa": ("goal", "sol1", "sol2"),
    "hellaswag": ("activity_label", "ctx_a", "ctx_b"),
    "winogrande": ("sentence", "option1", "option2"),
    "arc_easy": ("question", "answerKey"),
    "arc_challenge": ("question", "answerKey"),
    "openbookqa": ("question_stem", "answerKey"),
    "wsc": ("text", "span1_text", "span2_text"),
    "wic": ("sentence1", "sentence2"),
    "sglue_rte": ("premise", "hypothesis"),
    "cb": ("premise", "hypothesis"),
    "multirc": ("paragraph", "question", "answer"),
    "copa": ("premise", "choice1", "choice2", "question"),
}


def check_rows(name: str, path: Path, fields: Sequence[str]) -> None:
    """Raise ValueError with task, file, row and field for the first row that the harness cannot score (`row_problem`).

    A missing field, a row that is no JSON object, and a file without rows are refused too.
    """
    number, advice = 0, remedy(name)
    for number, row in _rows(name, path):
        if not isinstance(row, dict):
            raise ValueError(f"{name}: {path}, row {number} is {type(row).__name__}, not a JSON object: {advice}")
        for field in fields:
            value: Any = row
            for part in field.split("."):
                value = value.get(part) if isinstance(value, dict) else None
            if value is None:
                present = ", ".join(row) or "nothing"
                raise ValueError(
                    f"{name}: {path}, row {number} lacks the field {field!r}; it holds {present}: {advice}"
                )
        if fields and (problem := row_problem(name, row)):
            raise ValueError(f"{name}: {path}, row {number} {problem}: {advice}")
    if not number:
        raise ValueError(f"{name}: {path} holds no row: {advice}")


def template_fields(config: Mapping[str, Any]) -> list[str]:
    """Return the fields in the templates of a task. The fields that its functions read are unknown."""
    import jinja2
    import jinja2.meta

    environment, names = jinja2.Environment(), set()
    if config.get("process_docs"):
        return []
    for key in ("doc_to_text", "doc_to_target", "doc_to_choice"):
        template = config.get(key)
        if isinstance(template, str) and "{{" in template:
            names |= jinja2.meta.find_undeclared_variables(environment.parse(template))
        elif isinstance(template, str) and template.isidentifier():
            names.add(template)
    return sorted(names)


def remedy(name: str) -> str:
    """Return the advice for a data file that cannot be used."""
    return f"get the file again, or leave the task out (--without {name})"


def first_line(error: Exception) -> str:
    """Return the type of an error and its first line."""
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"


def row_problem(task: str, row: Row) -> str:
    """Return what is wrong with a row that has all its fields, in words; empty for a sound row or an unknown task."""
    for field in _TEXTS.get(task, ()):
        if not isinstance(row[field], str):
            return f"has {field} = {row[field]!r}, where text is expected"
    check = _CHECKS.get(task)
    return "" if check is None else check(row)


def _rows(name: str, path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield rows with their line, or their place in a JSON list. Raises ValueError as `check_rows`."""
    if path.suffix == ".parquet":
        yield from enumerate(_parquet_rows(name, path), start=1)
        return
    try:
        text = b"".join(piece for piece, _ in decompressed(path)).decode()
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        raise ValueError(f"{name}: {path}, row {line} is no UTF-8 ({error.reason}): {remedy(name)}") from error
    whole = path.suffix == ".json" and text.lstrip().startswith("[")
    lines = [text] if whole else text.split("\n")
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            content = json.loads(line)
        except ValueError as error:
            raise ValueError(f"{name}: {path}, row {number} is no JSON ({error}): {remedy(name)}") from error
        yield from enumerate(content, start=1) if whole else [(number, content)]


def _parquet_rows(name: str, path: Path) -> list[dict[str, Any]]:
    import pyarrow
    import pyarrow.parquet

    try:
        return pyarrow.parquet.read_table(path).to_pylist()
    except (pyarrow.ArrowException, OSError) as error:
        raise ValueError(f"{name}: {path} is no whole Parquet file ({first_line(error)}): {remedy(name)}") from error


def _labelled_choices(row: Row) -> str:
    choices = row["choices"]
    texts, labels = choices["text"], choices["label"]
    if problem := _texts("choices.text", texts) or _texts("choices.label", labels):
        return problem
    if len(texts) != len(labels):
        return f"has {len(texts)} texts and {len(labels)} labels in choices, where equal numbers are expected"
    if row["answerKey"].strip() not in labels:
        return f"has answerKey = {row['answerKey']!r}, where one of its labels is expected: {', '.join(labels)}"
    return ""


def _pronoun(row: Row) -> str:
    text, pronoun, place = row["text"], row["pronoun"], row["pronoun_loc"]
    inside = _is_place(place, len(text)) and text.startswith(pronoun, place)
    problem = "" if inside else f"has pronoun_loc = {place!r}, where the place of {pronoun!r} in its text is expected"
    return problem or _texts("options", row["options"], 2)


def _spans(row: Row) -> str:
    words = len(row["text"].split())
    for field in ("span1_index", "span2_index"):
        if field in row and not _is_place(row[field], words):
            return (
                f"has {field} = {row[field]!r}, where the number of a word of its text is expected (0 to {words - 1})"
            )
    return ""


def _word_in_sentences(row: Row) -> str:
    for number in "12":
        size, start, end = len(row[f"sentence{number}"]), row.get(f"start{number}", 0), row.get(f"end{number}", 1)
        if not (_is_place(start, size) and _is_place(end, size + 1) and start < end):
            return (
                f"has start{number} = {start!r} and end{number} = {end!r}, where places inside sentence{number} "
                f"({size} characters) are expected"
            )
    return ""


def _quotable(row: Row) -> str:
    """Check an answer that the harness writes between three apostrophes and reads as Python."""
    try:
        ast.literal_eval(f"'''{row['answer']}\\nIs the answer correct? yes'''")
    except (SyntaxError, ValueError):
        return f"has answer = {row['answer']!r}, whose apostrophes or backslashes the harness's template cannot quote"
    return ""


def _texts(field: str, value: Any, count: int | None = None) -> str:
    if not isinstance(value, list) or not value or not all(isinstance(text, str) for text in value):
        return f"has {field} = {value!r}, where a list of texts is expected"
    if count is not None and len(value) != count:
        return f"has {len(value)} {field}, where {count} are expected"
    return ""


def _is_place(value: Any, size: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < size


_CHECKS: dict[str, Callable[[Row], str]] = {
    "arc_easy": _labelled_choices,
    "arc_challenge": _labelled_choices,
    "openbookqa": _labelled_choices,
    "hellaswag": lambda row: _texts("endings", row["endings"], 4),
    "logiqa": lambda row: _texts("options", row["options"], 4),
    "wsc273": _pronoun,
    "wsc": _spans,
    "wic": _word_in_sentences,
    "winogrande": lambda row: (
        "" if "_" in row["sentence"] else "has no _ in its sentence, where the options would stand"
    ),
    "multirc": _quotable,
}
