"""Define the tasks that classify a whole sequence: those of Long Range Arena (Tay et al. 2020, arXiv 2011.04006)."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_type_hints

import numpy as np

from data import long_range_arena
from data.synthetic import listops, pathfinder
from data.synthetic.examples import Examples
from models.options import describe_type, fits_type, nearest_names

Sets = tuple[Examples, ...]


@dataclass(frozen=True)
class Task:
    """Hold a classification task.

    Attributes:
        classes: number of classes.
        vocabulary: number of token ids; the largest one is padding, which images do not have.
        make: returns training, validation and test examples from counts, length, seed and the other keys of `data`.
        arguments: types of the other keys of `data`.
        pairs: each row holds two texts side by side, which are encoded apart.
        images: the tokens are grey pixels.
    """

    classes: int
    vocabulary: int
    make: Callable[..., Sets]
    arguments: Mapping[str, Any]
    pairs: bool = False
    images: bool = False


def make_examples(name: str, length: int, seed: int, data: Mapping[str, Any]) -> Sets:
    """Return the training, validation and test examples of a task.

    data: arguments of the task, the vocabulary and the numbers of examples.

    Raises:
        ValueError: another vocabulary than the task's, an argument that the task does not have or of another type, more
            examples than a data set has, or training examples of one class.
        OSError: data that the task's reader cannot find.
    """
    task, options = TASKS[name], {key: value for key, value in data.items() if not key.endswith("_examples")}
    if (vocabulary := options.pop("vocabulary")) != task.vocabulary:
        raise ValueError(f"vocabulary = {vocabulary}: this task needs {task.vocabulary}, its number of token ids")
    for key, value in options.items():
        if key not in task.arguments:
            raise ValueError(f"{key} is an unknown key; {nearest_names(key, task.arguments)}")
        if not fits_type(value, kind := task.arguments[key]):
            raise ValueError(f"{key} = {json.dumps(value)}: allowed are {describe_type(kind)}")
    counts = [int(data[f"{part}_examples"]) for part in ("train", "validation", "test")]
    sets = task.make(counts, length, seed, **options)
    if has_files(name) and (sets[0].labels == sets[0].labels[0]).all():
        raise ValueError(
            f"all {counts[0]:,} training examples have the label {sets[0].labels[0, 0]}; examples of two classes are required"
        )
    return sets


def has_files(name: str) -> bool:
    """Return whether a task reads a data set, whose number of examples is limited."""
    return "directory" in TASKS[name].arguments


def check_task(name: str) -> None:
    """Raise ValueError for a name that is not in TASKS."""
    if name not in TASKS:
        raise ValueError(f"tasks: {name!r} is unknown; {nearest_names(name, TASKS)}")


def _listops(counts: list[int], length: int, seed: int, **options: Any) -> Sets:
    return tuple(listops.listops(n, length, seed=[seed, i], **options) for i, n in enumerate(counts))


def _paths(counts: list[int], length: int, seed: int, **options: Any) -> Sets:
    if length != (pixels := pathfinder.Pathfinder(**options).size ** 2):
        raise ValueError(f"length = {length}: size * size = {pixels} is required")
    return tuple(pathfinder.pathfinder(n, seed=[seed, i], **options) for i, n in enumerate(counts))


def _text(counts: list[int], length: int, seed: int, directory: str | None = None) -> Sets:
    folder = None if directory is None else Path(directory)
    return _drawn(counts, seed, *(long_range_arena.reviews(folder, split, length) for split in ("train", "test")))


def _image(counts: list[int], length: int, seed: int, directory: str | None = None) -> Sets:
    if length != 1024:
        raise ValueError(f"length = {length}: 1024, the pixels of an image, is required")
    folder = None if directory is None else Path(directory)
    return _drawn(counts, seed, *(long_range_arena.grey_images(folder, split) for split in ("train", "test")))


def _retrieval(counts: list[int], length: int, seed: int, directory: str | None = None) -> Sets:
    folder = None if directory is None else Path(directory)
    parts = [long_range_arena.document_pairs(folder, split, length) for split in ("train", "eval", "test")]
    return tuple(_draw(part, n, [seed, i], 0) for i, (part, n) in enumerate(zip(parts, counts, strict=True)))


def _drawn(counts: list[int], seed: int, train: Examples, test: Examples) -> Sets:
    """Return training and validation examples of one split without overlap, and test examples of the other one."""
    validation = _draw(train, counts[1], [seed, 0], 0)
    return _draw(train, counts[0], [seed, 0], counts[1]), validation, _draw(test, counts[2], [seed, 1], 0)


def _draw(examples: Examples, count: int, seed: list[int], first: int) -> Examples:
    """Return `count` examples in random order, from place `first` of this order on."""
    available = len(examples.tokens)
    if first + count > available:
        raise ValueError(
            f"{first:,} + {count:,} examples of one split are required, which has {available:,}: lower train_examples, "
            "validation_examples or test_examples of the task's `data`"
        )
    rows = np.random.default_rng(seed).permutation(available)[first : first + count]
    return Examples(examples.tokens[rows], examples.labels[rows])


_BYTES = long_range_arena.PAD + 1
_FILES = {"directory": str | None}
_EXPRESSIONS = {"shortest": int, "depth": int, "arguments": int, "nested": float}
_GEOMETRY = get_type_hints(pathfinder.Pathfinder)

TASKS: dict[str, Task] = {
    "listops": Task(listops.CLASSES, len(listops.TOKENS), _listops, _EXPRESSIONS),
    "text": Task(2, _BYTES, _text, _FILES),
    "retrieval": Task(2, _BYTES, _retrieval, _FILES, pairs=True),
    "image": Task(10, _BYTES, _image, _FILES, images=True),
    "pathfinder": Task(pathfinder.CLASSES, _BYTES, _paths, _GEOMETRY, images=True),
    "path_x": Task(pathfinder.CLASSES, _BYTES, _paths, _GEOMETRY, images=True),
}
