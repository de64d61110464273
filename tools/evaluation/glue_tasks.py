"""Define the tasks of fine-tuning: GLUE (Wang et al. 2019, arXiv 1804.07461) and IMDb reviews (Maas et al. 2011)."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from data.corpus.decompression import decompressed
from data.corpus.discovery import check_hub

Row = dict[str, Any]


@dataclass(frozen=True)
class Task:
    """Describe a task.

    Attributes:
        texts: one column, or two for a pair.
        labels: number of classes, 1 for a real number.
        metrics: the official ones.
        splits: evaluated split -> its name in tables.
    """

    texts: tuple[str, ...]
    labels: int
    metrics: tuple[str, ...]
    splits: Mapping[str, str]


_PLAIN = {"validation": ""}
_PAIR = ("sentence1", "sentence2")
TASKS: dict[str, Task] = {
    "mnli": Task(
        ("premise", "hypothesis"),
        3,
        ("accuracy",),
        {"validation_matched": "matched", "validation_mismatched": "mismatched"},
    ),
    "qnli": Task(("question", "sentence"), 2, ("accuracy",), _PLAIN),
    "qqp": Task(("question1", "question2"), 2, ("accuracy", "f1"), _PLAIN),
    "rte": Task(_PAIR, 2, ("accuracy",), _PLAIN),
    "sst2": Task(("sentence",), 2, ("accuracy",), _PLAIN),
    "mrpc": Task(_PAIR, 2, ("accuracy", "f1"), _PLAIN),
    "cola": Task(("sentence",), 2, ("matthews",), _PLAIN),
    "stsb": Task(_PAIR, 1, ("pearson", "spearman"), _PLAIN),
    "imdb": Task(("text",), 2, ("accuracy",), {"test": ""}),
}


def score(task: Task, logits: NDArray, labels: NDArray) -> dict[str, float]:
    """Return the task's metrics, at most 1: accuracy, F1 of class 1, Matthews, Pearson and Spearman correlation.

    logits: [rows, classes], or [rows, 1] for a real number; labels: [rows].
    """
    from scipy import stats
    from sklearn import metrics

    predicted = logits[:, 0] if task.labels == 1 else logits.argmax(-1)
    functions: dict[str, Callable[[], Any]] = {
        "accuracy": lambda: metrics.accuracy_score(labels, predicted),
        "f1": lambda: metrics.f1_score(labels, predicted, zero_division=0),
        "matthews": lambda: metrics.matthews_corrcoef(labels, predicted),
        "pearson": lambda: _correlation(stats.pearsonr, labels, predicted),
        "spearman": lambda: _correlation(stats.spearmanr, labels, predicted),
    }
    return {name: float(functions[name]()) for name in task.metrics}


def read_split(name: str, split: str, folder: Path | None) -> list[Row]:
    """Return the rows of a split of `folder`/name/split.jsonl.gz (or .jsonl.zst, .jsonl), or of the hub.

    Raises FileNotFoundError naming the file; ValueError for a damaged or empty file, a missing column, an unknown label, or
    a hub that cannot be reached.
    """
    rows = _rows_of_hub(name, split) if folder is None else _read_lines(split_file(name, split, folder))
    if not rows:
        raise ValueError(f"{name}, {split}, holds no row: get the split again")
    needed = (*TASKS[name].texts, "label")
    for number, row in enumerate(rows):
        missing = [key for key in needed if key not in row]
        if missing:
            raise ValueError(
                f"{name}, {split}, row {number + 1} has no {missing[0]!r}; it has {', '.join(row)}; get the split again"
            )
        label, classes = row["label"], TASKS[name].labels
        if not isinstance(label, int | float) or (classes > 1 and label not in range(classes)):
            words = "a number" if classes == 1 else f"0 to {classes - 1}"
            raise ValueError(f"{name}, {split}, row {number + 1} has label = {label!r}; allowed: {words}")
    return rows


def _rows_of_hub(name: str, split: str) -> list[Row]:
    advice = f"Without the hub, put {name}/{split}.jsonl.gz into a folder and give --data FOLDER"
    place = ("stanfordnlp/imdb",) if name == "imdb" else ("nyu-mll/glue", name)
    check_hub(f"{name}, {split}", place[0], advice)
    from datasets import load_dataset

    try:
        return [dict(row) for row in load_dataset(*place, split=split)]
    except Exception as error:  # errors of datasets, of the network and of file formats
        raise ValueError(f"{name}, {split}: the library datasets cannot open {place[0]}: {error}. {advice}") from error


def split_file(name: str, split: str, folder: Path) -> Path:
    """Return the file that `read_split` reads. Raises FileNotFoundError naming it."""
    paths = [folder / name / f"{split}.jsonl{suffix}" for suffix in (".gz", ".zst", "")]
    for path in paths:
        if path.is_file():
            return path
    raise FileNotFoundError(f"{paths[0]} does not exist: put the split there, or leave --data out to read the hub")


def _read_lines(path: Path) -> list[Row]:
    content = b"".join(piece for piece, _ in decompressed(path))
    rows = []
    for number, line in enumerate(content.split(b"\n"), 1):
        try:
            if line.strip():
                rows.append(dict(json.loads(line)))
        except (ValueError, TypeError) as error:
            raise ValueError(
                f"{path} is damaged: line {number} is no JSON object ({error}): get the split again"
            ) from error
    return rows


def _correlation(function: Callable[[NDArray, NDArray], Any], labels: NDArray, predicted: NDArray) -> float:
    """Return the correlation, or 0 if one side is constant."""
    return 0.0 if np.ptp(predicted) == 0 or np.ptp(labels) == 0 else function(labels, predicted).statistic
