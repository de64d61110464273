"""Fine-tune a classifier on one task of `glue_tasks` with transformers.Trainer."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from data.atomic_io import atomic_folder
from data.progress import ProgressBar
from megatron_lite.checkpoint.checksums import FILE_NAME
from tools.cli.yaml_file import read_as
from tools.evaluation.glue_tasks import TASKS, Task, read_split, score


class TaskRecipe(BaseModel):
    """Hold a task's epochs, and the task from whose weights it starts."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    epochs: float = Field(gt=0)
    start: str | None = None


class Recipe(BaseModel):
    """Hold the fine-tuning settings, which all tasks share except the epochs."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    lr: float = Field(gt=0)
    max_length: int = Field(ge=8)
    batch_size: int = Field(ge=1)
    schedule: Literal["linear", "cosine", "constant"] = "linear"
    warmup_fraction: float = Field(default=0.0, ge=0, le=1)
    weight_decay: float = Field(default=0.0, ge=0)
    tasks: dict[str, TaskRecipe]


def load_recipe(path: Path, overrides: Sequence[str] = ()) -> Recipe:
    """Read a settings file with overrides. Raises ValueError naming the key."""
    recipe = read_as(Recipe, path, overrides)
    for name, task in recipe.tasks.items():
        for used in (name, task.start or name):
            if used not in TASKS:
                raise ValueError(f"{path}: task {used!r} is unknown; allowed: {', '.join(TASKS)}")
        if task.start is not None and (task.start not in recipe.tasks or recipe.tasks[task.start].start is not None):
            raise ValueError(
                f"{path}: tasks.{name}.start = {task.start}: name a task of the recipe that has no `start` itself"
            )
    return recipe


def finetune(
    name: str,
    recipe: Recipe,
    weights: Path,
    *,
    seed: int,
    data: Path | None,
    hold_out: float | None = None,
    scratch: Path,
    keep: Path | None = None,
) -> dict[str, float]:
    """Train a classifier on one task and return its official metrics, named "METRIC" or "METRIC SPLIT".

    weights: an exported model. hold_out: as in `training_rows`. scratch: a folder for temporary files. keep: a folder for the
    trained weights. Raises as `training_rows`.
    """
    from transformers import AutoTokenizer, DataCollatorWithPadding, PrinterCallback, Trainer, set_seed
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    task = TASKS[name]
    train, evaluated = training_rows(name, data, hold_out)
    tokenizer = AutoTokenizer.from_pretrained(weights, trust_remote_code=False)
    encode = partial(_encoded, tokenizer, task, recipe.max_length)
    set_seed(seed)
    model = _classifier(weights, task)
    steps = recipe.tasks[name].epochs * -(-len(train) // recipe.batch_size)
    trainer = Trainer(
        model,
        training_arguments(recipe, recipe.tasks[name].epochs, steps, seed, scratch / "trainer"),
        train_dataset=encode(train),
        data_collator=DataCollatorWithPadding(tokenizer),
        optimizers=(_optimizer(model, recipe), None),
    )
    trainer.remove_callback(PrinterCallback)
    trainer.add_callback(_progress(f"{name}, seed {seed}"))
    trainer.train()
    metrics: dict[str, float] = {}
    for split, rows in evaluated.items():
        output = trainer.predict(encode(rows))
        metrics |= _named(task, split, score(task, output.predictions, output.label_ids))
    if keep is not None:
        _keep(model, tokenizer, weights, keep)
    return metrics


def training_arguments(recipe: Recipe, epochs: float, steps: float, seed: int, folder: Path) -> Any:
    """Return the arguments of the trainer, which uses one GPU if there is one. steps: of the whole training."""
    import torch
    from transformers import TrainingArguments

    cuda = torch.cuda.is_available()
    if not cuda:
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # otherwise DeepSpeed searches for a GPU and prints a warning
    arguments = TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=recipe.batch_size,
        per_device_eval_batch_size=4 * recipe.batch_size,
        num_train_epochs=epochs,
        learning_rate=recipe.lr,
        lr_scheduler_type=recipe.schedule if recipe.schedule != "constant" else "constant_with_warmup",
        warmup_steps=int(recipe.warmup_fraction * steps),
        max_grad_norm=1.0,
        seed=seed,
        bf16=cuda,
        use_cpu=not cuda,
        save_strategy="no",
        logging_strategy="no",
        report_to=[],
        remove_unused_columns=False,
        dataloader_pin_memory=cuda,
        disable_tqdm=True,
    )
    # The trainer would put a batch on every visible GPU, so that the scores would depend on their number.
    arguments._n_gpu = min(1, arguments.n_gpu)
    return arguments


def _encoded(tokenizer: Any, task: Task, max_length: int, rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    columns = [[row[text] for row in rows] for text in task.texts]
    coded = tokenizer(*columns, truncation=True, max_length=max_length)
    label_type = float if task.labels == 1 else int
    return [
        {"input_ids": ids, "attention_mask": mask, "labels": label_type(row["label"])}
        for ids, mask, row in zip(coded["input_ids"], coded["attention_mask"], rows, strict=True)
    ]


def _classifier(weights: Path, task: Task) -> Any:
    """Return the model with a new classifier, in float32."""
    import torch
    from transformers import AutoModelForSequenceClassification

    from tools.conversion.export_source import model_class
    from tools.conversion.hf_folder import read_config

    kind: Any = AutoModelForSequenceClassification
    if read_config(weights)["model_type"] == "metalion":
        kind = model_class(weights, "SequenceClassification", trust_remote_code=False)
    return kind.from_pretrained(
        weights,
        num_labels=task.labels,
        problem_type="regression" if task.labels == 1 else "single_label_classification",
        trust_remote_code=False,
        dtype=torch.float32,
        ignore_mismatched_sizes=True,
    )


def _optimizer(model: Any, recipe: Recipe) -> Any:
    from megatron_lite.config.optimizer_schema import OptimizerConfig
    from megatron_lite.optim.param_groups import build_optimizer, parameter_kind

    return build_optimizer(
        [(parameter, parameter_kind(model, key)) for key, parameter in model.named_parameters()],
        OptimizerConfig(lr=recipe.lr, betas=(0.9, 0.98), eps=1e-6, weight_decay=recipe.weight_decay),
    )[0]


def _progress(description: str) -> Any:
    """Return the trainer's callback that shows a progress bar."""
    from transformers import TrainerCallback

    class Progress(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            self.bar = ProgressBar(total=state.max_steps, desc=description, unit="step", leave=False)

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            self.bar.update()

        def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            self.bar.close()

    return Progress()


def training_rows(name: str, data: Path | None, hold_out: float | None) -> tuple[list[Any], dict[str, list[Any]]]:
    """Return training rows, and rows to evaluate by split. Raises as `read_split`; ValueError without a training row.

    hold_out: share of the validation split to evaluate, with its other rows for training; None for the official splits.
    """
    first, *others = splits_read(name, hold_out)
    rows = read_split(name, first, data)
    if hold_out is None:
        return rows, {split: read_split(name, split, data) for split in others}
    random.Random(0).shuffle(rows)
    count = max(1, round(hold_out * len(rows)))
    if count == len(rows):
        raise ValueError(
            f"--hold-out {hold_out}: no training row remains of the {count} rows of {name}; give a smaller share"
        )
    return rows[count:], {first: rows[:count]}


def majority_scores(name: str, data: Path | None, hold_out: float | None) -> dict[str, float]:
    """Return the metrics of the most frequent evaluated label, named as by `finetune`; empty for a task of real numbers.

    Raises as `training_rows`.
    """
    task, metrics = TASKS[name], dict[str, float]()
    if task.labels == 1:
        return metrics
    for split, rows in training_rows(name, data, hold_out)[1].items():
        labels = np.array([int(row["label"]) for row in rows])  # JSON may hold 1.0
        chosen = np.eye(task.labels)[np.bincount(labels).argmax()]
        metrics |= _named(task, split, score(task, np.tile(chosen, (len(rows), 1)), labels))
    return metrics


def _named(task: Task, split: str, values: Mapping[str, float]) -> dict[str, float]:
    return {" ".join(filter(None, (key, task.splits[split]))): value for key, value in values.items()}


def splits_read(name: str, hold_out: float | None) -> list[str]:
    """Return the splits that a task reads: training data first, unless a share of the validation split is held out."""
    splits = list(TASKS[name].splits)
    return ["train", *splits] if hold_out is None else splits[:1]


def _keep(model: Any, tokenizer: Any, source: Path, folder: Path) -> None:
    """Write the fine-tuned weights with a copy of the export's source, so that the folder loads as the export.

    Folders in `source` are not copied: `folder` may be inside one of them.
    """
    with atomic_folder(folder, overwrite=True) as temporary:
        for path in source.iterdir():
            if path.is_file() and ".safetensors" not in path.name and path.name != FILE_NAME:
                shutil.copy2(path, temporary)
        model.save_pretrained(temporary)
        tokenizer.save_pretrained(temporary)
