"""Turn images into the pixels that a model reads, with random changes in training.

Every random choice comes from a generator that the caller passes, so that a sample is the same in every process. The operations
are those of torchvision's recipes: crop, flip, RandAugment (Cubuk et al. 2020, arXiv 1909.13719), random erasing (Zhong et al.
2020, arXiv 1708.04896).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, ImageEnhance, ImageOps
from torch import Tensor

_BICUBIC = Image.Resampling.BICUBIC
_ASPECT = (3 / 4, 4 / 3)
_ERASED_AREA, _ERASED_ASPECT = (0.02, 0.33), (0.3, 3.3)
_TRIES = 10


@dataclass(frozen=True)
class Augmentation:
    """Settings of the images, as in the section `data.images`; `size` is the height and width of the result, in pixels."""

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

    def training(self, image: Image.Image, random: np.random.Generator) -> Tensor:
        """Return the normalised pixels of a training image, float32 [3, size, size]."""
        image = self._cropped(image, random)
        if random.random() < self.flip:
            image = ImageOps.mirror(image)
        image = rand_augment(image, self.randaugment_layers, self.randaugment_magnitude, random)
        pixels = self._normalised(image)
        if random.random() < self.random_erasing:
            erase(pixels, random)
        return torch.from_numpy(pixels)

    def validation(self, image: Image.Image) -> Tensor:
        """Return the normalised pixels of the centre of an image, float32 [3, size, size]."""
        return torch.from_numpy(self._normalised(self._centre(image)))

    def restored(self, pixels: Tensor) -> NDArray[np.uint8]:
        """Return the picture of normalised pixels [3, size, size] as [size, size, 3]."""
        mean, std = self._statistics()
        values = pixels.permute(1, 2, 0).numpy() * std + mean
        return np.clip(np.rint(255 * values), 0, 255).astype(np.uint8)

    def _centre(self, image: Image.Image) -> Image.Image:
        image = _shorter_side(image, round(self.size / self.validation_crop))
        left, top = (image.width - self.size) // 2, (image.height - self.size) // 2
        return image.crop((left, top, left + self.size, top + self.size))

    def _cropped(self, image: Image.Image, random: np.random.Generator) -> Image.Image:
        if self.crop == "none":
            return self._centre(image)
        if self.crop == "resized":
            box = _random_box(image, self.min_area, random)
            return image.resize((self.size, self.size), _BICUBIC, box=box)
        image = ImageOps.expand(_shorter_side(image, self.size), self.padding)
        left, top = (int(random.integers(side - self.size + 1)) for side in image.size)
        return image.crop((left, top, left + self.size, top + self.size))

    def _normalised(self, image: Image.Image) -> NDArray[np.float32]:
        pixels = np.asarray(image)
        return np.stack([values.take(pixels[..., channel]) for channel, values in enumerate(self._values)])

    @cached_property
    def _values(self) -> NDArray[np.float32]:
        """Return the normalised values of the 256 levels, [3, 256]."""
        mean, std = self._statistics()
        levels = np.arange(256, dtype=np.float32) / np.float32(255)
        return (levels - mean[:, None]) / std[:, None]

    def _statistics(self) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        return np.array(self.mean, np.float32), np.array(self.std, np.float32)


def _shorter_side(image: Image.Image, side: int) -> Image.Image:
    """Return the image with a shorter side of `side` pixels and the same aspect ratio; the longer side is rounded down."""
    if min(image.size) == side:
        return image
    width, height = (max(side, side * length // min(image.size)) for length in image.size)
    return image.resize((width, height), _BICUBIC)


def _random_box(image: Image.Image, min_area: float, random: np.random.Generator) -> tuple[int, int, int, int]:
    """Return (left, top, right, bottom) of a random area and aspect ratio.

    If no try fits, return the largest centre with an aspect ratio that is allowed.
    """
    for _ in range(_TRIES):
        area = image.width * image.height * random.uniform(min_area, 1.0)
        aspect = math.exp(random.uniform(math.log(_ASPECT[0]), math.log(_ASPECT[1])))
        width, height = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
        if 0 < width <= image.width and 0 < height <= image.height:
            left, top = int(random.integers(image.width - width + 1)), int(random.integers(image.height - height + 1))
            return left, top, left + width, top + height
    low, high = _ASPECT
    width, height = min(image.width, round(high * image.height)), min(image.height, round(image.width / low))
    left, top = (image.width - width) // 2, (image.height - height) // 2
    return left, top, left + width, top + height


def rand_augment(image: Image.Image, layers: int, magnitude: int, random: np.random.Generator) -> Image.Image:
    """Return the image after `layers` operations of `OPERATIONS`, drawn with replacement, each with a random sign.

    magnitude: 0 to 30, the share of the largest change.
    """
    for _ in range(layers):
        operation = OPERATIONS[int(random.integers(len(OPERATIONS)))]
        sign = 1 if random.random() < 0.5 else -1
        image = operation(image, magnitude / 30, sign)
    return image


def _affine(image: Image.Image, *matrix: float) -> Image.Image:
    return image.transform(image.size, Image.Transform.AFFINE, matrix, Image.Resampling.NEAREST)


Operation = Callable[[Image.Image, float, int], Image.Image]
# (image, share of the largest magnitude, sign). The largest magnitudes are those of torchvision's RandAugment.
OPERATIONS: tuple[Operation, ...] = (
    lambda image, share, sign: image,
    lambda image, share, sign: _affine(image, 1, sign * 0.3 * share, 0, 0, 1, 0),  # shear
    lambda image, share, sign: _affine(image, 1, 0, 0, sign * 0.3 * share, 1, 0),
    lambda image, share, sign: _affine(image, 1, 0, sign * int(150 / 331 * share * image.width), 0, 1, 0),  # translate
    lambda image, share, sign: _affine(image, 1, 0, 0, 0, 1, sign * int(150 / 331 * share * image.height)),
    lambda image, share, sign: image.rotate(sign * 30 * share),
    lambda image, share, sign: ImageEnhance.Brightness(image).enhance(1 + sign * 0.9 * share),
    lambda image, share, sign: ImageEnhance.Color(image).enhance(1 + sign * 0.9 * share),
    lambda image, share, sign: ImageEnhance.Contrast(image).enhance(1 + sign * 0.9 * share),
    lambda image, share, sign: ImageEnhance.Sharpness(image).enhance(1 + sign * 0.9 * share),
    lambda image, share, sign: ImageOps.posterize(image, 8 - round(4 * share)),
    lambda image, share, sign: ImageOps.solarize(image, math.ceil(255 * (1 - share))),
    lambda image, share, sign: ImageOps.autocontrast(image),
    lambda image, share, sign: ImageOps.equalize(image),
)


def erase(pixels: NDArray[np.float32], random: np.random.Generator) -> None:
    """Set a random rectangle of normalised pixels [3, height, width] to 0, the mean, in place."""
    _, height, width = pixels.shape
    for _ in range(_TRIES):
        area = height * width * random.uniform(*_ERASED_AREA)
        aspect = math.exp(random.uniform(math.log(_ERASED_ASPECT[0]), math.log(_ERASED_ASPECT[1])))
        rows, columns = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
        if 0 < rows < height and 0 < columns < width:
            top, left = int(random.integers(height - rows + 1)), int(random.integers(width - columns + 1))
            pixels[:, top : top + rows, left : left + columns] = 0.0
            return
