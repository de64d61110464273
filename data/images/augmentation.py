"""Turn images into the pixels that a model reads, with random changes in training.

Every random choice is a function of numbers that the caller passes, so that a sample is the same in every process. The operations
are those of torchvision's recipes: crop, flip, RandAugment (`rand_augment`) and random erasing (Zhong et al. 2020, arXiv
1708.04896).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, ImageOps
from torch import Tensor

from .rand_augment import Pixels, rand_augment

Draws = NDArray[np.float64]  # uniform in [0, 1)

_BICUBIC = Image.Resampling.BICUBIC
_ASPECT = (3 / 4, 4 / 3)
_ERASED_AREA, _ERASED_ASPECT = (0.02, 0.33), (0.3, 3.3)
_TRIES = 10
_BOX_DRAWS = 2 * _TRIES + 2  # for a random box: area and aspect ratio of each try, top, left


@dataclass(frozen=True)
class Augmentation:
    """Settings of the images, as in the section `data.images`; `size` is the height and width of the result, in pixels.

    An image is first read (`read_training`, `read_validation`), then changed in a batch (`training`, `validation`).
    """

    size: int
    crop: str = "none"
    padding: int = 4
    min_area: float = 0.08
    flip: float = 0.0
    randaugment_layers: int = 0
    randaugment_magnitude: int = 9
    random_erasing: float = 0.0
    validation_crop: float = 1.0
    mean: tuple[float, ...] = (0.485, 0.456, 0.406)
    std: tuple[float, ...] = (0.229, 0.224, 0.225)

    @property
    def num_draws(self) -> int:
        """Return how many draws a training sample needs: crop, flip, erasing, RandAugment."""
        return 2 * _BOX_DRAWS + 2 + 2 * self.randaugment_layers

    @property
    def reads_at_random(self) -> bool:
        """Return whether `read_training` uses its draws."""
        return self.crop == "resized"

    def read_training(self, image: Image.Image, draws: Draws) -> Pixels:
        """Return the pixels of a training image, [3, height, width]. For `crop: pad` they have the border.

        draws: those of the sample, [num_draws].
        """
        if self.crop == "resized":
            box = _crop_box(image, self.min_area, draws[:_BOX_DRAWS])
            return _pixels(image.resize((self.size, self.size), _BICUBIC, box=box))
        if self.crop == "pad":
            return _pixels(ImageOps.expand(_resized(image, self.size), self.padding))
        return self.read_validation(image)

    def read_validation(self, image: Image.Image) -> Pixels:
        """Return the pixels of the centre of an image, [3, size, size]."""
        image = _resized(image, round(self.size / self.validation_crop))
        left, top = (image.width - self.size) // 2, (image.height - self.size) // 2
        return _pixels(image.crop((left, top, left + self.size, top + self.size)))

    def training(self, images: Sequence[Pixels], draws: Draws) -> Tensor:
        """Return the normalized pixels of training images, float32 [images, 3, size, size].

        images: results of `read_training`. draws: the same as there, [images, num_draws].
        """
        sizes = [_BOX_DRAWS, 1, 1, _BOX_DRAWS]
        crop_box, flip, erasing, erased_box, layers = np.split(draws, np.cumsum(sizes), axis=1)
        pixels = _crops(images, self.size, crop_box[:, -2:])
        flipped = flip[:, 0] < self.flip
        pixels[flipped] = pixels[flipped][..., ::-1]
        rand_augment(pixels, self.randaugment_magnitude, layers)
        normalized = self._normalized(pixels)
        erased = np.flatnonzero(erasing[:, 0] < self.random_erasing)
        erase(normalized, erased, erased_box[erased])
        return torch.from_numpy(normalized)

    def validation(self, images: Sequence[Pixels]) -> Tensor:
        """Return the normalized pixels of results of `read_validation`, float32 [images, 3, size, size]."""
        return torch.from_numpy(self._normalized(np.stack(images)))

    def restored(self, pixels: Tensor) -> Pixels:
        """Return normalized pixels [3, size, size] as a picture of 8 bits, [size, size, 3]."""
        mean, std = self._statistics()
        values = (pixels.numpy() * std + mean).transpose(1, 2, 0)
        return np.rint(255 * values).astype(np.uint8)

    def _normalized(self, pixels: Pixels) -> NDArray[np.float32]:
        mean, std = self._statistics()
        values = pixels.astype(np.float32)
        values /= 255
        values -= mean
        values /= std
        return values

    def _statistics(self) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Return mean and standard deviation, [3, 1, 1]."""
        mean, std = (np.array(values, np.float32)[:, None, None] for values in (self.mean, self.std))
        return mean, std


def _pixels(image: Image.Image) -> Pixels:
    return np.ascontiguousarray(np.asarray(image).transpose(2, 0, 1))


def _resized(image: Image.Image, side: int) -> Image.Image:
    """Return the image with a shorter side of `side` pixels and the same aspect ratio; the longer side is rounded down."""
    if min(image.size) == side:
        return image
    width, height = (max(side, side * length // min(image.size)) for length in image.size)
    return image.resize((width, height), _BICUBIC)


def _crops(images: Sequence[Pixels], size: int, draws: Draws) -> Pixels:
    """Return a random crop of each image, [images, 3, size, size]. draws: of top and left, [images, 2]."""
    sides = np.array([image.shape[1:] for image in images])
    starts = (draws * (sides - size + 1)).astype(int).tolist()
    crops = np.empty((len(images), 3, size, size), np.uint8)
    for crop, image, (top, left) in zip(crops, images, starts, strict=True):
        crop[:] = image[:, top : top + size, left : left + size]
    return crops


def _random_boxes(
    height: int, width: int, area: tuple[float, float], aspect: tuple[float, float], draws: Draws
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.bool_]]:
    """Return rows and columns of boxes of random area and aspect ratio in an image, and whether each fits; [boxes, tries].

    area: of the image's area, uniform. aspect: its logarithm is uniform. draws: [boxes, `_BOX_DRAWS`].
    """
    low, high = area
    areas = height * width * (low + (high - low) * draws[:, :_TRIES])
    low, high = (math.log(limit) for limit in aspect)
    aspects = np.exp(low + (high - low) * draws[:, _TRIES : 2 * _TRIES])
    rows, columns = (np.rint(np.sqrt(sides)).astype(int) for sides in (areas * aspects, areas / aspects))
    return rows, columns, (rows > 0) & (columns > 0) & (rows <= height) & (columns <= width)


def _crop_box(image: Image.Image, min_area: float, draws: Draws) -> tuple[int, int, int, int]:
    """Return (left, top, right, bottom) of a random area and aspect ratio.

    If no try fits, return the largest box in the centre with an allowed aspect ratio.
    """
    rows, columns, fits = (
        tries[0] for tries in _random_boxes(image.height, image.width, (min_area, 1), _ASPECT, draws[None])
    )
    if fits.any():
        height, width = int(rows[fits][0]), int(columns[fits][0])
        top, left = int(draws[-2] * (image.height - height + 1)), int(draws[-1] * (image.width - width + 1))
        return left, top, left + width, top + height
    low, high = _ASPECT
    width, height = min(image.width, round(high * image.height)), min(image.height, round(image.width / low))
    left, top = (image.width - width) // 2, (image.height - height) // 2
    return left, top, left + width, top + height


def erase(pixels: NDArray[np.float32], images: NDArray[np.int64], draws: Draws) -> None:
    """Set a random rectangle of some normalized images to 0, the mean, in place.

    pixels: [images, 3, size, size]. images: indices of the images to change. draws: [len(images), `_BOX_DRAWS`].
    """
    size = pixels.shape[-1]
    all_rows, all_columns, fits = _random_boxes(size, size, _ERASED_AREA, _ERASED_ASPECT, draws)
    fits &= (all_rows < size) & (all_columns < size)
    for number, image in enumerate(images):
        if fits[number].any():
            rows, columns = (int(tries[number][fits[number]][0]) for tries in (all_rows, all_columns))
            top, left = (
                int(draw * (size - side + 1)) for draw, side in zip(draws[number, -2:], (rows, columns), strict=True)
            )
            pixels[image, :, top : top + rows, left : left + columns] = 0.0
