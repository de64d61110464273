"""Provide data, validation and summary of a run that trains an image classifier."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from data.atomic_io import write_json
from data.images.dataset import ImageDataset
from data.images.reading import LabelledImages
from data.loader import MicroBatch
from megatron_lite.config.schema import Config
from megatron_lite.fault_tolerance.rank_consistency import file_facts, require_agreement
from megatron_lite.parallel.collectives import all_reduce_async, on_main
from megatron_lite.parallel.grid import Grid
from megatron_lite.trainer import Steps, TrainState
from megatron_lite.validation import ValidationSet
from models.config import ModelConfig
from models.language_model import LanguageModel
from tools.loading.image_data import CLASSES, augmentation_of, class_difference, image_files, open_images
from tools.pretraining.data import PREPARATION_HOURS, EvenSubset, num_samples, training_steps, validation_batches
from tools.pretraining.teacher import TaughtSteps, Teacher
from tools.reporting.image_figures import CONFUSIONS, PREDICTIONS, draw_confusions, draw_predictions

_PARTS = ("train", "validation", "test")
_SHOWN = 32  # images in the picture of predictions


class ImageObjective:
    """An image classifier: `Objective` over labelled images.

    The constructor opens the images, which writes their caches at the first start. All ranks must have the same files.
    """

    def __init__(self, config: Config[ModelConfig], grid: Grid) -> None:
        self._config, self._grid = config, grid
        assert config.model.image_size is not None
        self._augmentation = augmentation_of(config.data.images, config.model.image_size)
        # One process writes the caches.
        on_main(grid, lambda: [self._open(part) for part in _PARTS] and None, timeout_hours=PREPARATION_HOURS)
        files = [image_files(config.data.images, part) for part in _PARTS]
        paths = [path for one in files if one is not None for path in one.parquet]
        require_agreement({"data": file_facts(paths)}, grid)
        train = self._open("train")
        assert train is not None
        if (train.labels == train.labels[0]).all():
            raise ValueError(
                f"data.images.train: all of its {len(train):,} images have the label {train.class_names[train.labels[0]]}; name "
                "images of at least two classes"
            )
        self._train, self._parts = train, {part: self._open(part) for part in ("validation", "test")}
        for part, images in self._parts.items():
            if images is not None and images.class_names != train.class_names:
                difference = class_difference(images.class_names, f"data.images.{part}", train.class_names)
                raise ValueError(
                    f"{difference}: name files with the same classes in the same order (without names, a class has its number)"
                )
        self._teacher = None
        if config.classification.teacher is not None:
            self._teacher = Teacher(config, grid.device, train.class_names)
        self.tokenizer_hash: str | None = None
        self.source = f"{len(train):,} images of {len(train.class_names)} classes"

    def _open(self, part: str) -> LabelledImages | None:
        return open_images(self._config.data, part, self._config.model.vocab_size)

    def training_samples(self, steps: int, state: TrainState) -> ImageDataset:
        """Return the samples as `Objective`."""
        return ImageDataset(
            self._train,
            self._augmentation,
            num_samples=num_samples(self._config, steps, state.step, state.consumed_samples),
            seed=self._config.run.seed,
            label_smoothing=self._config.classification.label_smoothing,
            soft_targets=self._teacher is not None,
        )

    def training_steps(self, samples: ImageDataset) -> Callable[[int], Steps]:
        """Return the steps as `Objective`, with the targets of the teacher if there is one."""
        steps, teacher = training_steps(self._config, samples, self._grid), self._teacher
        return steps if teacher is None else lambda consumed: TaughtSteps(steps(consumed), teacher)

    def validation(self) -> ValidationSet | None:
        """Return the validation images, or None. After each validation the main process draws the confusion matrix."""
        return self._evaluation_set("validation")

    def test(self) -> ValidationSet | None:
        """Return the images of the final test, or None."""
        return self._evaluation_set("test")

    def _evaluation_set(self, part: str) -> ValidationSet | None:
        images, grid = self._parts[part], self._grid
        if images is None:
            return None
        micro_batch = self._config.batch.micro_batch_size * grid.data_size  # of all data ranks
        dataset = ImageDataset(images, self._augmentation, num_samples=None)
        counts = _Counts(images.class_names, grid)

        def batches(_: str, limit: int | None) -> Iterator[MicroBatch]:
            samples = None if limit is None else limit * self._config.batch.global_batch_size
            counts.reset()
            return ({**batch, **counts.tensors} for batch in validation_batches(self._config, dataset, samples, grid))

        def metrics() -> dict[str, float]:
            top5, confusions = counts.summed()
            total = max(float(confusions.sum()), 1.0)
            if grid.is_main and part == "validation":
                folder = self._config.run.path
                draw_confusions(folder / CONFUSIONS, confusions, images.class_names)
                content = {"classes": list(images.class_names), "counts": confusions.long().tolist()}
                write_json(folder / "confusion_matrix.json", content)
            return {"top5_accuracy": top5 / total}

        return ValidationSet(
            batches,
            parts={"": 1.0},
            total_bytes=None,
            total_tokens=len(dataset),
            micro_batches=-(-len(dataset) // micro_batch),
            fraction=lambda limit: min(1.0, limit * self._config.batch.global_batch_size / len(dataset)),
            metrics=metrics,
        )

    def sample(self, model: Callable[[], LanguageModel]) -> Callable[[], dict[str, str]] | None:
        """Return a function that draws the predictions on some validation images; None without validation images."""
        images = self._parts["validation"]
        if images is None:
            return None
        dataset = ImageDataset(images, self._augmentation, num_samples=None)
        shown = EvenSubset(dataset, min(_SHOWN, len(dataset)))

        def sample() -> dict[str, str]:
            samples = [shown[number] for number in range(len(shown))]
            pixels = torch.stack([one["tokens"] for one in samples])
            logits: Any = model()(pixels.to(self._grid.device))
            probabilities = logits.float().softmax(-1).cpu()
            labels = [int(one["labels"]) for one in samples]
            if self._grid.is_main:
                pictures = [self._augmentation.restored(one["tokens"]) for one in samples]
                draw_predictions(
                    self._config.run.path / PREDICTIONS, pictures, labels, probabilities, images.class_names
                )
            correct = sum(int(row.argmax()) == label for row, label in zip(probabilities, labels, strict=True))
            return {"text": f"{correct} of {len(labels)} images are correct: {self._config.run.path / PREDICTIONS}"}

        return sample

    def suites(self, model: Callable[[], LanguageModel]) -> None:
        """Return None: suites are for language models."""

    def save(self) -> None:
        """Write the names of the classes into the run folder."""
        write_json(self._config.run.path / CLASSES, list(self._train.class_names))

    def validation_lines(self, values: Mapping[str, float], report: dict[str, Any]) -> list[str]:
        """Return loss and accuracies, and the pictures."""
        folder = self._config.run.path
        return [
            f"validation {_accuracies(values)} (whole set, {values['evaluated_tokens']:,.0f} images)",
            f"confusion matrix {folder / CONFUSIONS}",
        ]

    def test_line(self, values: Mapping[str, float]) -> str:
        """Return loss and accuracies."""
        return f"test {_accuracies(values)}"


def _accuracies(values: Mapping[str, float]) -> str:
    return (
        f"loss {values['loss']:.4f} nats/image, top-1 accuracy {values['accuracy']:.2%}, "
        f"top-5 accuracy {values['top5_accuracy']:.2%}"
    )


class _Counts:
    """Hold counts on the device, to which the head adds: images whose label is among the five highest scores, and confusions."""

    def __init__(self, class_names: tuple[str, ...], grid: Grid) -> None:
        self._grid, self._classes = grid, len(class_names)
        self.reset()

    def reset(self) -> None:
        """Set all counts to zero."""
        classes = self._classes
        self._all = torch.zeros(1 + classes**2, dtype=torch.float64, device=self._grid.device)
        self.tensors = {"num_top5": self._all[0], "confusion": self._all[1:].view(classes, classes)}

    def summed(self) -> tuple[float, Tensor]:
        """Return the counts over all data ranks: top-5 and [classes (label), classes (predicted)]. Every process calls it."""
        top5, *confusions = all_reduce_async(self._all, self._grid)()
        return top5, torch.tensor(confusions).view(self._classes, self._classes)
