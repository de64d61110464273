"""The sections of an image classifier, `data.images` and `classification`, and the checks of their combinations."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import Field

from megatron_lite.config.section import Fraction, Section, Text, changed_keys, without_effect

Problems = Iterator[tuple[tuple[str, ...], str]]
_OBJECTIVE = ("data", "objective")
_OF_TEACHER = ("teacher_labels", "teacher_weight", "temperature")
# Key of data.images -> the crop that reads it.
_CROP_OF = {"padding": "pad", "min_area": "resized"}
_Positive = Annotated[float, Field(gt=0)]


class ImagesConfig(Section):
    """Labelled images and their augmentation (`data.objective: classification`)."""

    train: Text | tuple[Text, ...] | None = Field(
        default=None,
        description="Training images: Parquet files with Hugging Face's columns Image and ClassLabel (a file, a folder, a glob, "
        "or a list), or a folder with one folder of images per class.",
    )
    validation: Text | tuple[Text, ...] | None = Field(default=None, description="Validation images, as `train`.")
    test: Text | tuple[Text, ...] | None = Field(default=None, description="Images of the final test, as `train`.")
    image_key: Text | None = Field(default=None, description="Column of the images; null: `image` or `img`.")
    label_key: Text = Field(default="label", description="Column of the class numbers.")
    crop: Literal["pad", "resized", "none"] = Field(
        default="pad",
        description="Random crop of a training image. pad: of the image with a black border (CIFAR); resized: of random area and "
        "aspect ratio, resized (ImageNet); none: as validation.",
    )
    padding: int = Field(default=4, ge=0, description="Border of `crop: pad`, in pixels.")
    min_area: float = Field(
        default=0.08, gt=0, le=1, description="Smallest area of `crop: resized`, of the image's area."
    )
    flip: Fraction = Field(default=0.5, description="Probability of a horizontal flip.")
    randaugment_layers: int = Field(
        default=0, ge=0, description="Random operations per image (RandAugment, Cubuk et al. 2020); 0: none."
    )
    randaugment_magnitude: int = Field(default=9, ge=0, le=30, description="Magnitude of these operations, of 30.")
    random_erasing: Fraction = Field(
        default=0.0, description="Probability that a random rectangle is erased (Zhong et al. 2020)."
    )
    validation_crop: float = Field(
        default=1.0,
        ge=0.1,  # an image is enlarged to image_size / validation_crop before the crop
        le=1,
        description="Side of the centre crop of a validation image, of its shorter side. ImageNet: 0.875.",
    )
    threads: int = Field(
        default=1,
        ge=1,
        description="Threads per process that decode and augment, each a micro-batch. Two are enough for small images, "
        "which stay decoded in memory.",
    )
    mean: tuple[Fraction, Fraction, Fraction] = Field(
        default=(0.485, 0.456, 0.406), description="Mean of red, green and blue (0 to 1), which is subtracted."
    )
    std: tuple[_Positive, _Positive, _Positive] = Field(
        default=(0.229, 0.224, 0.225), description="Standard deviation, which is divided by."
    )


class ClassificationConfig(Section):
    """Targets and weights of an image classifier (`data.objective: classification`)."""

    label_smoothing: float = Field(
        default=0.0, ge=0, lt=1, description="Share of the label's weight that all classes get in training."
    )
    teacher: Text | None = Field(
        default=None,
        description="Trained classifier whose predictions are further targets (distillation): a run or checkpoint, or a Hugging "
        "Face folder; same classes, image size and normalization.",
    )
    teacher_labels: Literal["hard", "soft"] = Field(
        default="hard",
        description="Targets of the teacher, as in DeiT. hard: its most probable class; soft: its distribution at `temperature`.",
    )
    teacher_weight: Fraction = Field(
        default=0.5, description="Share of the teacher's targets in the loss; DeiT: 0.5 for hard, 0.1 for soft labels."
    )
    temperature: float = Field(
        default=3.0, gt=0, description="Temperature of soft labels; their loss is multiplied by its square."
    )


def tokens_per_image(model: Mapping[str, Any]) -> int | None:
    """Return the tokens of an image of the raw section `model`; None for a language model or for invalid values."""
    size, patch = model.get("image_size"), model.get("patch_size") or 4
    if type(size) is not int or type(patch) is not int or patch < 1 or size % patch:
        return None
    return (size // patch) ** 2 + (model.get("pooling") == "class_token")


def image_problems(config: Any) -> Problems:
    """Yield (key, problem) of the combinations that concern image classifiers."""
    data, model = config.data, config.model
    size = getattr(model, "image_size", None)
    if data.objective != "classification":
        if size is not None:
            yield (
                _OBJECTIVE,
                f"= {data.objective}: model.image_size = {size} makes an image classifier; set classification",
            )
        yield from without_effect(data.images, ("data", "images"), "data.objective = classification")
        yield from without_effect(config.classification, ("classification",), "data.objective = classification")
        return
    changed = [path[-1] for path, _ in changed_keys(config.classification, ("classification",))]
    teaching = [key for key in changed if key in _OF_TEACHER]
    if config.classification.teacher is None:
        for key in teaching:
            yield ("classification", key), "requires classification.teacher: name one, or remove this key"
    elif "temperature" in teaching and config.classification.teacher_labels == "hard":
        text = "requires classification.teacher_labels = soft; set it, or remove this key"
        yield ("classification", "temperature"), text
    for name, crop in _CROP_OF.items():
        if crop != data.images.crop:
            yield from without_effect(data.images, ("data", "images"), f"data.images.crop = {crop}", name=name)
    if not data.images.randaugment_layers:
        required = "data.images.randaugment_layers of 1 or more"
        yield from without_effect(data.images, ("data", "images"), required, name="randaugment_magnitude")
    if size is None:
        text = "is missing: data.objective = classification needs the height and width of its images, in pixels"
        yield ("model", "image_size"), text
    elif data.images.crop == "pad" and data.images.padding > size:
        text = (
            f"= {data.images.padding}: at most model.image_size = {size} is allowed; a crop of a wider border is black"
        )
        yield ("data", "images", "padding"), text
    if not data.images.train:
        text = "is missing: name Parquet files with images, or a folder with one folder of images per class"
        yield ("data", "images", "train"), text
    for path, value in changed_keys(data, ("data",)):
        if path[1] not in ("objective", "images", "cache_directory"):
            text = f"= {json.dumps(value)} is for text, and data.objective = classification reads data.images: set it to null"
            yield path, text
    tokens, length = getattr(model, "tokens_per_image", 0), config.batch.sequence_length
    if size is not None and length != tokens:
        text = f"= {length}: an image of model.image_size = {size} has {tokens} tokens; leave the key out"
        yield ("batch", "sequence_length"), text
    for key, off in (("pipeline", 1), ("sequence_parallel", False)):
        if (value := getattr(config.parallel, key)) != off:
            text = f"= {str(value).lower()} is not supported for image classifiers: {str(off).lower()} is allowed"
            yield ("parallel", key), f"{text}; use data, tensor and ZeRO parallelism"
    for section, key in (("evaluation", "suites"), ("logging", "loss_by_source")):
        if getattr(getattr(config, section), key):
            yield (section, key), "is for language models: remove it with data.objective = classification"
