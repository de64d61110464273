"""RandAugment in batches: the operations equal Pillow's, pixel for pixel, and are drawn equally often."""

from __future__ import annotations

import math

import numpy as np
import pytest
from PIL import Image, ImageEnhance, ImageOps

from data.images import rand_augment as module
from data.images.rand_augment import OPERATIONS, rand_augment


def affine(*matrix):
    return lambda image: image.transform(image.size, Image.Transform.AFFINE, matrix, Image.Resampling.NEAREST)


def pillow(share: float, sign: int, size: int) -> list:
    """Return the operations on one image, with the largest magnitudes of torchvision's RandAugment."""
    signed, offset = sign * share, sign * int(150 / 331 * share * size)
    return [
        lambda image: image,
        affine(1, 0.3 * signed, 0, 0, 1, 0),
        affine(1, 0, 0, 0.3 * signed, 1, 0),
        affine(1, 0, offset, 0, 1, 0),
        affine(1, 0, 0, 0, 1, offset),
        lambda image: image.rotate(30 * signed),
        lambda image: ImageEnhance.Brightness(image).enhance(1 + 0.9 * signed),
        lambda image: ImageEnhance.Color(image).enhance(1 + 0.9 * signed),
        lambda image: ImageEnhance.Contrast(image).enhance(1 + 0.9 * signed),
        lambda image: ImageEnhance.Sharpness(image).enhance(1 + 0.9 * signed),
        lambda image: ImageOps.posterize(image, 8 - round(4 * share)),
        lambda image: ImageOps.solarize(image, math.ceil(255 * (1 - share))),
        ImageOps.autocontrast,
        ImageOps.equalize,
    ]


def pictures(size: int) -> np.ndarray:
    """Return noise, smooth, dark, one-coloured and few-coloured images, [images, 3, size, size]."""
    random = np.random.default_rng(size)
    noise = random.integers(0, 256, (6, size, size, 3), dtype=np.uint8)
    smooth = [np.asarray(Image.fromarray(one[:4, :4]).resize((size, size), Image.Resampling.BICUBIC)) for one in noise]
    kinds = [
        *noise,
        *smooth,
        *(one // 3 + 40 for one in smooth),
        np.full_like(noise[0], 77),
        *(one % 3 for one in noise),
    ]
    return np.ascontiguousarray(np.stack(kinds).transpose(0, 3, 1, 2))


@pytest.mark.parametrize("size", [32, 9, 70])
@pytest.mark.parametrize("share", [0.0, 0.3, 0.4, 1.0])
@pytest.mark.parametrize("sign", [1, -1])
def test_operations_equal_those_of_pillow(size, share, sign):
    pixels = pictures(size)
    for number, operation in enumerate(pillow(share, sign, size)):
        expected = [np.asarray(operation(Image.fromarray(one.transpose(1, 2, 0)))).transpose(2, 0, 1) for one in pixels]
        assert np.array_equal(OPERATIONS[number](pixels.copy(), share, sign), np.stack(expected)), number


def test_operations_and_signs_are_drawn_equally_often(monkeypatch):
    counts = np.zeros((14, 2), int)

    def counted(number):
        def operation(pixels, share, sign):
            assert share == 9 / 30
            counts[number, int(sign > 0)] += len(pixels)
            return pixels + 1

        return operation

    monkeypatch.setattr(module, "OPERATIONS", tuple(counted(number) for number in range(14)))
    pixels = np.zeros((7000, 3, 1, 1), np.uint8)
    rand_augment(pixels, 9, np.random.default_rng(0).random((7000, 4)))
    assert (pixels == 2).all()
    assert counts.sum() == 14000
    assert 420 < counts.min() <= counts.max() < 580  # 500 +- 3.6 standard deviations


def test_no_layers_change_nothing():
    pixels = pictures(9)
    before = pixels.copy()
    rand_augment(pixels, 9, np.zeros((len(pixels), 0)))
    assert np.array_equal(pixels, before)
