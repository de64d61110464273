"""Generate a task's examples once and keep them on the device, so that batches need no copy from the host."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from data.synthetic import mad
from data.synthetic.examples import UNLABELLED, Examples
from data.synthetic.mqar import mqar

from .classification import has_files, make_examples
from .experiment import Run, whole_number

Batch = tuple[Tensor, Tensor | None, Tensor]


def prepare(run: Run, device: torch.device) -> tuple[DeviceExamples, ...]:
    """Return the training and evaluation examples of a run on the device.

    Each set is padded to whole batches, except a training set whose incomplete last batch is dropped. Raises as `generate`.
    """
    train, *evaluation_sets = generate(run)
    size = batch_size(run)
    return (
        to_device(train, device, multiple=1 if run.drop_last else size),
        *(to_device(examples, device, multiple=size) for examples in evaluation_sets),
    )


def check_data(run: Run) -> None:
    """Generate one example per set, or read all examples of a data set.

    Raises ValueError for an invalid number of examples or generator argument.
    """
    section = f"settings.{run.task}.data" if run.suite == "lra" else "data"
    counts = ["train_examples", "test_examples", *(["validation_examples"] if run.classifies else [])]
    for key in [*counts, "vocabulary"]:
        whole_number(f"{section}.{key}", run.data.get(key))
    # All examples of a data set: their number is limited, and reading takes most of the time.
    fewest = {} if run.classifies and has_files(run.task) else dict.fromkeys(counts, 1)
    try:
        generate(replace(run, data={**run.data, **fewest}))
    except (TypeError, ValueError) as error:
        raise ValueError(f"tasks: {run.task}: {error}; `{section}` holds the arguments of the task") from None


def batch_size(run: Run) -> int:
    """Return the examples per batch: at most as many as there are training examples."""
    return min(run.batch_size, int(run.data["train_examples"]))


def data_key(run: Run) -> tuple[Any, ...]:
    """Return a key that is equal for runs with equal examples."""
    return (run.suite, run.task, run.length, run.seed, run.batch_size, tuple(sorted(run.data.items())))


def generate(run: Run) -> tuple[Examples, ...]:
    """Return the training and test examples of a run; if it classifies, training, validation and test examples.

    Raises what the task's generator or reader raises, and TypeError for an argument that it does not have.
    """
    if run.classifies:
        return make_examples(run.task, run.length, run.seed, run.data)
    data: dict[str, Any] = {key: value for key, value in run.data.items() if not key.endswith("_examples")}
    counts = (int(run.data["train_examples"]), int(run.data["test_examples"]))
    if run.suite == "mqar":
        train, test = (mqar(n, run.length, seed=[run.seed, i], **data) for i, n in enumerate(counts))
        return train, test
    if run.base_task == "memorization":
        data["table_seed"] = run.seed
    make = mad.TASKS[run.base_task]
    train, test = (make(n, length=run.length, training=not i, seed=[run.seed, i], **data) for i, n in enumerate(counts))
    return train, test


class DeviceExamples(NamedTuple):
    """Hold examples on a device.

    Attributes:
        tokens: [examples, length], any integer type.
        positions: [examples, labelled] int64, the positions to predict, or None for all positions.
        labels: [examples, labelled or length] int64; labels equal to UNLABELLED are ignored.
    """

    tokens: Tensor
    positions: Tensor | None
    labels: Tensor

    def batch(self, rows: Tensor) -> Batch:
        """Return tokens [batch, length], positions and labels of the examples `rows` ([batch] int64)."""
        positions = None if self.positions is None else self.positions.index_select(0, rows)
        return self.tokens.index_select(0, rows).long(), positions, self.labels.index_select(0, rows)


def concatenate(parts: list[DeviceExamples]) -> DeviceExamples:
    """Concatenate several sets along the examples."""
    if len(parts) == 1:
        return parts[0]
    tokens, labels = (torch.cat([getattr(part, key) for part in parts]) for key in ("tokens", "labels"))
    positions = [part.positions for part in parts if part.positions is not None]
    return DeviceExamples(tokens, torch.cat(positions) if positions else None, labels)


def to_device(examples: Examples, device: torch.device, multiple: int = 1) -> DeviceExamples:
    """Copy examples to the device. Store positions separately if at most half of the positions are labelled.

    Rows without labels are appended until the number of examples is a multiple of `multiple`.
    """
    tokens, labels = examples
    short = -len(tokens) % multiple
    tokens = np.pad(tokens, ((0, short), (0, 0)))
    labels = np.pad(labels, ((0, short), (0, 0)), constant_values=UNLABELLED)
    labelled = labels != UNLABELLED
    counts = labelled.sum(1)
    most = int(counts.max())
    positions = None
    if 2 * most <= tokens.shape[1]:
        if (counts == most).all():
            order = np.nonzero(labelled)[1].reshape(len(tokens), most)
        else:
            # Labelled positions first, in their order; other positions fill the row.
            order = np.argsort(~labelled, axis=1, kind="stable")[:, :most]
        labels = np.take_along_axis(labels, order, 1)
        positions = torch.from_numpy(order).to(device)
    return DeviceExamples(torch.from_numpy(tokens).to(device), positions, torch.from_numpy(labels).long().to(device))
