"""RandAugment (Cubuk et al. 2020, arXiv 1909.13719) on batches of 8-bit images, [images, 3, size, size].

The operations, their magnitudes and their roundings are those of torchvision's recipe on Pillow's images. One call changes all
images of an operation.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache

import numpy as np
from numpy.typing import NDArray
from PIL import Image

Pixels = NDArray[np.uint8]
# (pixels, share of the largest magnitude, sign): the changed pixels.
Operation = Callable[[Pixels, float, int], Pixels]
_LEVELS = np.arange(256)


def rand_augment(pixels: Pixels, magnitude: int, draws: NDArray[np.float64]) -> None:
    """Change images in place, each by one operation of `OPERATIONS` with a random sign per layer.

    magnitude: 0 to 30, the share of the largest change. draws: uniform in [0, 1), [images, 2 * layers].
    """
    for layer in range(0, draws.shape[1], 2):
        chosen = (draws[:, layer] * len(OPERATIONS)).astype(int)
        positive = draws[:, layer + 1] < 0.5
        for number, operation in enumerate(OPERATIONS):
            for sign, of_sign in ((1, positive), (-1, ~positive)):
                images = np.flatnonzero((chosen == number) & of_sign)
                if len(images):
                    pixels[images] = operation(pixels[images], magnitude / 30, sign)


def _affine(*matrix: float) -> Callable[[Image.Image], Image.Image]:
    return lambda image: image.transform(image.size, Image.Transform.AFFINE, matrix, Image.Resampling.NEAREST)


def _moved(name: str) -> Operation:
    def operation(pixels: Pixels, share: float, sign: int) -> Pixels:
        images, channels, height, width = pixels.shape
        # Place 0 is black, for pixels from outside the image.
        places = np.zeros((images, channels, 1 + height * width), np.uint8)
        places[..., 1:] = pixels.reshape(images, channels, -1)
        return places.take(_origins(name, width, sign * share), axis=2).reshape(pixels.shape)

    return operation


@cache
def _origins(name: str, size: int, share: float) -> NDArray[np.int64]:
    """Return where each pixel of a moved image comes from: its place from 1 on, or 0 for outside. int64 [size * size].

    Pillow moves an image whose pixels are the numbers of their places.
    """
    offset = int(150 / 331 * share * size)
    move: Callable[[Image.Image], Image.Image] = {
        "shear_x": _affine(1, 0.3 * share, 0, 0, 1, 0),
        "shear_y": _affine(1, 0, 0, 0.3 * share, 1, 0),
        "translate_x": _affine(1, 0, offset, 0, 1, 0),
        "translate_y": _affine(1, 0, 0, 0, 1, offset),
        "rotate": lambda image: image.rotate(30 * share),
    }[name]
    places = Image.fromarray(np.arange(1, 1 + size * size, dtype=np.int32).reshape(size, size))
    return np.asarray(move(places)).reshape(-1).astype(np.int64)


def _blend(start: NDArray[np.generic], pixels: Pixels, factor: float) -> Pixels:
    """Return start + factor (pixels - start), rounded down and clipped to 0 to 255."""
    begin = start.astype(np.float32)
    blended = pixels - begin
    blended *= np.float32(factor)
    blended += begin
    return np.clip(blended, 0, 255, out=blended).astype(np.uint8)


def _grey(pixels: Pixels) -> NDArray[np.int32]:
    """Return the luma of ITU-R 601, [images, 1, height, width]."""
    red, green, blue = (pixels[:, channel].astype(np.int32) for channel in range(3))
    return ((19595 * red + 38470 * green + 7471 * blue + 0x8000) >> 16)[:, None]


def _brightness(pixels: Pixels, share: float, sign: int) -> Pixels:
    return _blend(np.zeros(1), _LEVELS.astype(np.uint8), 1 + sign * 0.9 * share).take(pixels)


def _color(pixels: Pixels, share: float, sign: int) -> Pixels:
    return _blend(_grey(pixels), pixels, 1 + sign * 0.9 * share)


def _contrast(pixels: Pixels, share: float, sign: int) -> Pixels:
    mean = np.floor(_grey(pixels).mean(axis=(2, 3), keepdims=True) + 0.5)
    return _blend(mean, pixels, 1 + sign * 0.9 * share)


def _sharpness(pixels: Pixels, share: float, sign: int) -> Pixels:
    """Blend with the image after the 3 x 3 filter of ones with 5 in the middle, / 13. The border does not change."""
    values = pixels.astype(np.int32)
    rows = values[..., :-2, :] + values[..., 1:-1, :] + values[..., 2:, :]
    total = rows[..., :-2] + rows[..., 1:-1] + rows[..., 2:] + 4 * values[..., 1:-1, 1:-1]
    smooth = pixels.copy()
    smooth[..., 1:-1, 1:-1] = (2 * total + 13) // 26
    return _blend(smooth, pixels, 1 + sign * 0.9 * share)


def _posterize(pixels: Pixels, share: float, sign: int) -> Pixels:
    return pixels & np.uint8(256 - 2 ** round(4 * share))


def _solarize(pixels: Pixels, share: float, sign: int) -> Pixels:
    return np.where(pixels < math.ceil(255 * (1 - share)), pixels, 255 - pixels)


def _replace_levels(pixels: Pixels, table: NDArray[np.generic]) -> Pixels:
    """Replace the levels of each image and channel by those of its table, [images, 3, 256], clipped to 0 to 255."""
    places = pixels.reshape(*pixels.shape[:2], -1)
    levels: Pixels = np.clip(table, 0, 255).astype(np.uint8)
    return np.take_along_axis(levels, places.astype(np.intp), axis=2).reshape(pixels.shape)


def _autocontrast(pixels: Pixels, share: float, sign: int) -> Pixels:
    low, high = (limit(axis=(2, 3))[..., None].astype(np.float64) for limit in (pixels.min, pixels.max))
    scale = 255 / np.maximum(high - low, 1)
    return _replace_levels(pixels, np.where(high > low, _LEVELS * scale - low * scale, _LEVELS))


def _equalize(pixels: Pixels, share: float, sign: int) -> Pixels:
    images, channels = pixels.shape[:2]
    first = 256 * np.arange(images * channels).reshape(images, channels, 1, 1)
    counts = np.bincount((pixels + first).reshape(-1), minlength=256 * images * channels).reshape(images, channels, 256)
    highest = pixels.max(axis=(2, 3))[..., None]
    step = (counts.sum(axis=2, keepdims=True) - np.take_along_axis(counts, highest.astype(np.intp), axis=2)) // 255
    below = counts.cumsum(axis=2) - counts
    return _replace_levels(pixels, np.where(step > 0, (step // 2 + below) // np.maximum(step, 1), _LEVELS))


# The largest magnitudes are those of torchvision's RandAugment.
OPERATIONS: tuple[Operation, ...] = (
    lambda pixels, share, sign: pixels,
    _moved("shear_x"),
    _moved("shear_y"),
    _moved("translate_x"),
    _moved("translate_y"),
    _moved("rotate"),
    _brightness,
    _color,
    _contrast,
    _sharpness,
    _posterize,
    _solarize,
    _autocontrast,
    _equalize,
)
