"""Read suites of tasks from YAML: columns of a table, notes and published rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from pydantic import TypeAdapter, ValidationError

from megatron_lite.config.files import ConfigError, read_sources
from megatron_lite.config.other_program import other_program
from models.options import nearest_names
from tools.evaluation.request import NEEDLE, RULER

FOLDER = Path(__file__).parents[2] / "configs" / "eval"
_SUFFIXES = (".yml", ".yaml")

# Key of a suite's file -> its type, and the type in words.
_KINDS: dict[str, tuple[Any, str]] = {
    "title": (str, "a text"),
    "columns": (list, "a list"),
    **dict.fromkeys(("average", "notes", "local", "folders"), (list[str], "a list of texts")),
    "paper": (dict, "a mapping"),
    "fields": (dict[str, list[str]], "a mapping of tasks to lists of fields"),
    "documents": (dict[str, int], "a mapping of tasks to numbers of documents"),
}


class UnknownNameError(ValueError):
    """An unknown suite or task. The message names the nearest ones."""


@dataclass(frozen=True)
class Column:
    """Hold a task's metric and its label, which is unique in the suite."""

    task: str
    metric: str
    label: str


@dataclass(frozen=True)
class Suite:
    """Describe a table of tasks.

    Attributes:
        name: of the file; title: of the table.
        columns: in the order of the table.
        average: labels of the columns whose mean is the last column; empty for none.
        notes: sentences under the table.
        rows: published results, {"model", "tokens", label: value}, in percent except perplexities.
        source: of the published results.
        fields: task -> fields that every row of its data must have; "a.b" for a nested field.
        documents: task -> number of documents of the whole set.
        local: tasks whose data the hub cannot provide.
        folders: the harness's folders of the tasks, so that the other folders are not read.
    """

    name: str
    title: str
    columns: tuple[Column, ...]
    average: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    rows: tuple[dict[str, Any], ...] = ()
    source: str = ""
    fields: dict[str, tuple[str, ...]] = field(default_factory=dict)
    documents: dict[str, int] = field(default_factory=dict)
    local: tuple[str, ...] = ()
    folders: tuple[str, ...] = ()

    @property
    def tasks(self) -> tuple[str, ...]:
        """Return each task once, in the order of the columns."""
        return tuple(dict.fromkeys(column.task for column in self.columns))


def suite_names() -> list[str]:
    """Return the names of the suites of this project."""
    return sorted(path.stem for path in FOLDER.glob("*.yml"))


def check_suite_name(name: str, more: Sequence[str] = ()) -> None:
    """Raise UnknownNameError unless `name` is that of a suite, is in `more`, or is the path of a YAML file."""
    known = [*suite_names(), NEEDLE, RULER, *more]
    if name not in known and not name.endswith(_SUFFIXES):
        nearest = nearest_names(name, known)
        raise UnknownNameError(f"there is no suite {name!r} (a .yml file of your own is also allowed); {nearest}")


def read_suite(name: str) -> Suite:
    """Read a suite by name (a file of configs/eval), or by the path of a YAML file.

    Raises UnknownNameError, or ValueError for a file that is no suite, naming the key.
    """
    check_suite_name(name)
    path = Path(name) if name.endswith(_SUFFIXES) else FOLDER / f"{name}.yml"
    if not path.is_file():
        raise UnknownNameError(f"the suite {name} does not exist; give the path of a .yml file")
    content = _read_keys(path)
    columns = _columns(path, content.get("columns", ()))
    paper = content.get("paper", {})
    rows = paper.get("rows") or []
    if not isinstance(rows, list) or not all(isinstance(row, dict) and "model" in row for row in rows):
        raise ValueError(f"{path}: paper.rows = {rows!r}: a list of {{model, tokens, LABEL: value}} is expected")
    labels = [column.label for column in columns]
    for key in [*content.get("average", ()), *(key for row in rows for key in row)]:
        if key not in (*labels, "model", "tokens"):
            raise ValueError(f"{path}: {key!r} is no column label; {nearest_names(str(key), labels)}")
    for label, value in ((label, row[label]) for row in rows for label in row.keys() & set(labels)):
        if not isinstance(value, int | float):
            raise ValueError(f"{path}: paper.rows: {label} = {value!r}: a number is expected")
    return Suite(
        name=path.stem,
        title=content.get("title", path.stem),
        columns=columns,
        average=tuple(content.get("average", ())),
        notes=tuple(" ".join(note.split()) for note in content.get("notes", ())),
        rows=tuple(rows),
        source=paper.get("source", ""),
        fields={task: tuple(names) for task, names in content.get("fields", {}).items()},
        documents=content.get("documents", {}),
        local=tuple(content.get("local", ())),
        folders=tuple(content.get("folders", ())),
    )


def _read_keys(path: Path) -> dict[str, Any]:
    """Return the keys of a suite's file that have a value. Raises ValueError for an unknown key or a wrong type."""
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        words = " ".join(str(error).split())
        raise ValueError(
            f"{path} is no YAML ({words}): correct it; configs/eval/superglue.yml is an example"
        ) from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} is no suite: it holds {type(content).__name__}, not keys and values")
    for key, value in content.items():
        if key not in _KINDS:
            if problems := other_program(read_sources([path]), _KINDS):
                raise ConfigError(problems)
            raise ValueError(f"{path}: unknown key {key!r}; {nearest_names(str(key), _KINDS)}")
        kind, words = _KINDS[key]
        try:
            TypeAdapter(kind | None).validate_python(value, strict=True)
        except ValidationError:
            raise ValueError(f"{path}: {key} = {value!r}: {words} is expected") from None
    return {key: value for key, value in content.items() if value is not None}


def _columns(path: Path, entries: Sequence[Any]) -> tuple[Column, ...]:
    """Return the columns of {task, metric, label}. Raises ValueError for another entry, no column, or a repeated label."""
    columns = []
    for number, entry in enumerate(entries):
        if not isinstance(entry, dict) or "task" not in entry or entry.keys() - {"task", "metric", "label"}:
            raise ValueError(
                f"{path}: columns[{number}] = {entry!r}: {{task, metric, label}} is expected, task at least"
            )
        if wrong := [f"{key} = {value!r}" for key, value in entry.items() if not isinstance(value, str)]:
            raise ValueError(f"{path}: columns[{number}]: {wrong[0]}: text is expected")
        columns.append(Column(entry["task"], entry.get("metric", "acc"), entry.get("label", entry["task"])))
    if not columns or len({column.label for column in columns}) < len(columns):
        raise ValueError(f"{path}: columns must name at least one task, each under a unique label")
    return tuple(columns)


def task_suite(tasks: Sequence[str]) -> Suite:
    """Return tasks as one table. Its columns are the metrics that the harness reports."""
    return Suite("tasks", "Tasks", tuple(Column(task, "", task) for task in tasks))
