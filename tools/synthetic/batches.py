"""A task's examples on the device, with what is asked: generated once, read in batches without a host in between."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from data.synthetic.examples import UNLABELLED, Examples
from data.synthetic.listops import TOKENS, listops
from data.synthetic.mad import TASKS
from data.synthetic.mqar import mqar

from .experiment import Run

Batch = tuple[Tensor, Tensor | None, Tensor]


def prepare(run: Run, device: torch.device) -> tuple[Asked, ...]:
    """The examples of a run on the device, in whole batches but for those that training drops. Raises as `generate`."""
    train, *evaluated = generate(run)
    size = batch_size(run)
    return (
        on_device(train, device, multiple=1 if run.drop_last else size),
        *(on_device(part, device, multiple=size) for part in evaluated),
    )


def check_data(run: Run) -> None:
    """Draws one example of each kind. ValueError for numbers of examples that are none, and for what the generator refuses."""
    counts = ["train_examples", "test_examples", *(["validation_examples"] if run.suite == "listops" else [])]
    for key in [*counts, "vocabulary"]:
        value = run.data.get(key)
        if not isinstance(value, int | float) or value != int(value) or value < 1:
            raise ValueError(f"data.{key} = {json.dumps(value)}: whole number >= 1 is allowed")
    try:
        generate(replace(run, data={**run.data, **dict.fromkeys(counts, 1)}))
    except (TypeError, ValueError) as error:
        raise ValueError(f"tasks: {run.task}: {error}; the keys of `data` are those of the task's generator") from None


def batch_size(run: Run) -> int:
    """Examples of a batch, of which there is one at least."""
    return min(run.batch_size, int(run.data["train_examples"]))


def data_key(run: Run) -> tuple[Any, ...]:
    """Equal where `prepare` gives equal examples."""
    return (run.suite, run.task, run.length, run.seed, run.batch_size, tuple(sorted(run.data.items())))


def generate(run: Run) -> tuple[Examples, ...]:
    """Training and test examples of a run; of ListOps training, validation and test examples.

    Raises as the generators, and TypeError for an argument that they lack.
    """
    data: dict[str, Any] = {key: value for key, value in run.data.items() if not key.endswith("_examples")}
    counts = (int(run.data["train_examples"]), int(run.data["test_examples"]))
    if run.suite == "mqar":
        train, test = (mqar(n, run.length, seed=[run.seed, i], **data) for i, n in enumerate(counts))
        return train, test
    if run.suite == "listops":
        if (vocabulary := data.pop("vocabulary")) != len(TOKENS):
            raise ValueError(f"vocabulary = {vocabulary}: this task has {len(TOKENS)} ids")
        counts = (counts[0], int(run.data["validation_examples"]), counts[1])
        return tuple(listops(n, run.length, seed=[run.seed, i], **data) for i, n in enumerate(counts))
    task = run.task.partition("/")[0]
    if task == "memorization":
        data["table_seed"] = run.seed
    train, test = (
        TASKS[task](n, length=run.length, training=not i, seed=[run.seed, i], **data) for i, n in enumerate(counts)
    )
    return train, test


class Asked(NamedTuple):
    """Examples on a device.

    tokens: [examples, length], integers of any size. positions: [examples, asked] int64, or None where all positions may be
    asked; labels: [examples, asked or length] int64, UNLABELLED counts nothing.
    """

    tokens: Tensor
    positions: Tensor | None
    labels: Tensor

    def batch(self, rows: Tensor) -> Batch:
        """The examples `rows` [batch] int64: tokens [batch, length], positions, labels."""
        positions = None if self.positions is None else self.positions.index_select(0, rows)
        return self.tokens.index_select(0, rows).long(), positions, self.labels.index_select(0, rows)


def joined(parts: list[Asked]) -> Asked:
    """Several sets one after the other."""
    if len(parts) == 1:
        return parts[0]
    tokens, labels = (torch.cat([getattr(part, key) for part in parts]) for key in ("tokens", "labels"))
    positions = [part.positions for part in parts if part.positions is not None]
    return Asked(tokens, torch.cat(positions) if positions else None, labels)


def on_device(examples: Examples, device: torch.device, multiple: int = 1) -> Asked:
    """Examples with the asked positions set apart where these are fewer than half of all.

    Rows without labels are added up to a multiple of `multiple` examples.
    """
    tokens, labels = examples
    short = -len(tokens) % multiple
    tokens = np.pad(tokens, ((0, short), (0, 0)))
    labels = np.pad(labels, ((0, short), (0, 0)), constant_values=UNLABELLED)
    asked = labels != UNLABELLED
    counts = asked.sum(1)
    most = int(counts.max())
    positions = None
    if 2 * most <= tokens.shape[1]:
        if (counts == most).all():
            order = np.nonzero(asked)[1].reshape(len(tokens), most)
        else:
            # The asked positions in their order, then others to fill the row.
            order = np.argsort(~asked, axis=1, kind="stable")[:, :most]
        labels = np.take_along_axis(labels, order, 1)
        positions = torch.from_numpy(order).to(device)
    return Asked(torch.from_numpy(tokens).to(device), positions, torch.from_numpy(labels).long().to(device))
