"""Open the images of a run as its configuration names them."""

from __future__ import annotations

from collections.abc import Sequence

from data.images.augmentation import Augmentation
from data.images.reading import ImageFiles, LabelledImages, find_images
from megatron_lite.config.data_schema import DataConfig
from megatron_lite.config.image_schema import ImagesConfig

CLASSES = "classes.json"  # names of the classes, in a run folder and in an export's folder `training`


def image_files(images: ImagesConfig, part: str) -> ImageFiles | None:
    """Return the files of `data.images.<part>`, part "train", "validation" or "test"; None if it names none.

    Raises as `find_images`.
    """
    given = getattr(images, part)
    return find_images(given, f"data.images.{part}") if given else None


def open_images(data: DataConfig, part: str, num_classes: int) -> LabelledImages | None:
    """Return the images of `data.images.<part>`, or None if it is not set. Raises as `LabelledImages`."""
    settings = data.images
    files = image_files(settings, part)
    if files is None:
        return None
    return LabelledImages(
        files,
        num_classes=num_classes,
        image_key=settings.image_key,
        label_key=settings.label_key,
        cache_directory=data.cache_directory,
    )


def check_images(data: DataConfig, num_classes: int) -> tuple[str, ...]:
    """Return the names of the classes. Reads no image.

    Raises as `find_images`, `ImageFiles.columns` and `ImageFiles.classes` for files that a start refuses.
    """
    names: tuple[str, ...] = ()
    for part in ("train", "validation", "test"):
        files = image_files(data.images, part)
        if files is not None:
            _, label_key = files.columns(data.images.image_key, data.images.label_key)
            classes = files.classes(label_key, num_classes)
            names = names or classes
    return names


def class_difference(names: Sequence[str], owner: str, train: Sequence[str]) -> str:
    """Return the first class that differs from that of the training images, in words. owner: of `names`, as many as `train`."""
    number = next(number for number, (name, other) in enumerate(zip(names, train, strict=True)) if name != other)
    return f"class {number} of {owner} is {names[number]}, and that of data.images.train is {train[number]}"


def augmentation_of(settings: ImagesConfig, size: int) -> Augmentation:
    """Return the augmentation of the section `data.images` for images of `size` x `size` pixels."""
    shared = Augmentation.__dataclass_fields__.keys() & ImagesConfig.model_fields.keys()
    return Augmentation(size=size, **{name: getattr(settings, name) for name in shared})


def number_of_classes(settings: ImagesConfig) -> int | None:
    """Return the classes that the training images name; None without training images.

    Raises ValueError if they name no classes, as `find_images` and `ImageFiles.columns`.
    """
    files = image_files(settings, "train")
    if files is None:
        return None
    _, label_key = files.columns(settings.image_key, settings.label_key)
    if (names := files.class_names(label_key)) is None:
        raise ValueError(f"{files.key} does not name its classes; set model.vocab_size to their number")
    return len(names)
