"""Distillation: a trained classifier gives targets for the training of another one (DeiT, arXiv 2012.12877, section 4)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from data.loader import MicroBatch
from megatron_lite.checkpoint.checksums import CheckpointError
from megatron_lite.checkpoint.reader import read_config_yaml, read_weights, resolve
from megatron_lite.config.image_schema import ClassificationConfig
from megatron_lite.config.schema import Config
from megatron_lite.trainer import Steps
from models.config import ModelConfig
from tools.conversion.export_images import class_names
from tools.conversion.export_source import model_class
from tools.conversion.hf_folder import read_config
from tools.loading.image_data import class_difference
from tools.loading.model import build_model, model_config, run_of
from tools.loading.token_data import data_config

_KEY = "classification.teacher"


class Teacher:
    """A classifier that reads the same pixels as the model in training.

    Args:
        config: of the run; `classification.teacher` is a run or checkpoint of this project, or a Hugging Face folder.
        class_names: of the run's classes, in their order.

    Raises:
        ValueError: a teacher with other classes, image size or normalization, with the same classes in another order, or one
            that is no image classifier.
        CheckpointError, FileNotFoundError: there is no teacher.
    """

    def __init__(self, config: Config[ModelConfig], device: torch.device, class_names: Sequence[str]) -> None:
        self._settings: ClassificationConfig = config.classification
        path = Path(str(self._settings.teacher))
        try:
            model, facts = _exported(path) if (path / "config.json").is_file() else _checkpoint(path)
        except (FileNotFoundError, CheckpointError) as error:
            raise type(error)(f"{_KEY}: {error}") from error
        names = facts.pop("names")
        images = config.data.images
        needed = {
            "number of classes": config.model.vocab_size,
            "image size": config.model.image_size,
            "mean": list(images.mean),
            "std": list(images.std),
        }
        for name, value in facts.items():
            if value is not None and value != needed[name]:
                raise ValueError(
                    f"{_KEY} = {path}: its {name} is {value}, and this run has {needed[name]}; name another teacher"
                )
        # Other names may be other words for the same classes.
        if names != list(class_names) and sorted(names) == sorted(class_names):
            difference = class_difference(names, "the teacher", class_names)
            raise ValueError(f"{_KEY} = {path}: {difference}; name a teacher with the same order of classes")
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        self._model: Any = model.to(device=device, dtype=dtype).eval().requires_grad_(False)
        self._device, self._dtype = device, dtype

    def with_targets(self, batch: MicroBatch) -> MicroBatch:
        """Return a batch whose `targets`, and for soft labels `teacher` and `temperature`, hold the teacher's predictions."""
        with torch.no_grad():
            out: Any = self._model(batch["tokens"].to(self._device, self._dtype))
        logits: Tensor = getattr(out, "logits", out).float().cpu()
        settings, targets = self._settings, batch["targets"] * (1 - self._settings.teacher_weight)
        if settings.teacher_labels == "hard":
            chosen = F.one_hot(logits.argmax(-1), logits.shape[-1])
            return {**batch, "targets": targets + settings.teacher_weight * chosen}
        temperature = settings.temperature
        soft = settings.teacher_weight * temperature**2 * (logits / temperature).softmax(-1)
        return {**batch, "targets": targets, "teacher": soft, "temperature": torch.full((len(soft),), temperature)}


class TaughtSteps:
    """Yield the steps of a run with the targets of a teacher. The teacher runs between two steps."""

    def __init__(self, steps: Steps, teacher: Teacher) -> None:
        self._steps, self._teacher = steps, teacher

    def __next__(self) -> Sequence[MicroBatch]:
        return [self._teacher.with_targets(dict(batch)) for batch in next(self._steps)]

    def close(self) -> None:
        """Close the steps."""
        self._steps.close()


def _checkpoint(path: Path) -> tuple[Any, dict[str, Any]]:
    """Return the classifier of a run or checkpoint, and what it reads."""
    checkpoint = resolve(path)
    config = read_config_yaml(checkpoint)
    shape = model_config(config)
    if shape.image_size is None:
        raise ValueError(f"{_KEY} = {path} is a language model; name an image classifier")
    images = data_config(config).images
    facts = {"number of classes": shape.vocab_size, "image size": shape.image_size}
    facts |= {"mean": list(images.mean), "std": list(images.std)}
    facts["names"] = class_names(run_of(checkpoint), shape.vocab_size)
    return build_model(shape, read_weights(checkpoint), checkpoint), facts


def _exported(folder: Path) -> tuple[Any, dict[str, Any]]:
    """Return the classifier of a Hugging Face folder, by the project's or transformers' own code, and what it reads."""
    from safetensors import SafetensorError

    from data.atomic_io import read_json

    try:
        is_export = read_config(folder)["model_type"] == "metalion"
        model = model_class(folder, "ImageClassification", trust_remote_code=not is_export).from_pretrained(folder)
    except (ImportError, OSError, ValueError, SafetensorError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"{_KEY} = {folder} cannot be loaded ({reason}); name another teacher") from error
    size = getattr(model.config, "image_size", None)
    facts: dict[str, Any] = {
        "number of classes": len(model.config.id2label),
        "image size": size if isinstance(size, int) else None,
        "names": [str(name) for _, name in sorted(model.config.id2label.items())],
    }
    processor = folder / "preprocessor_config.json"
    if processor.is_file():
        content = read_json(processor, "copy it again")
        facts |= {"mean": content.get("image_mean"), "std": content.get("image_std")}
    return model, facts
