"""Build the samples of an image classifier."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .augmentation import Augmentation, Draws
from .rand_augment import Pixels
from .reading import LabelledImages

_BLOCK = 256  # samples whose random numbers come from one generator
_CACHE_BYTES = 2**30  # of decoded images, per process


class ImageDataset:
    """Return augmented training samples, or with num_samples None every image once, in order, for validation.

    Each epoch uses every image once, in an order that depends on (seed, epoch). The augmentation depends on (seed, sample
    number). Decoded images stay in memory if all of them fit into 1 GiB.

    ``ds[i]`` -> {"tokens": pixels float32 [3, size, size], "labels": int64 scalar, "loss_weight": float32 scalar}. In training
    with label_smoothing > 0 or with `soft_targets` also "targets": float32 [classes], the smoothed label.
    """

    def __init__(
        self,
        images: LabelledImages,
        augmentation: Augmentation,
        *,
        num_samples: int | None,
        seed: int = 0,
        label_smoothing: float = 0.0,
        soft_targets: bool = False,
    ) -> None:
        self.images, self.augmentation, self.seed = images, augmentation, seed
        self.sources: list[str] = []
        self._training = num_samples is not None
        self._num_samples, self._smoothing = len(images) if num_samples is None else num_samples, label_smoothing
        self._soft_targets = self._training and (soft_targets or label_smoothing > 0)
        self._order: tuple[int, NDArray[np.int64]] = (-1, np.zeros(0, np.int64))
        fits = len(images) * 3 * augmentation.size**2 <= _CACHE_BYTES
        self._caches = fits and not (self._training and augmentation.reads_at_random)
        self._cached: dict[int, Pixels] = {}

    def __len__(self) -> int:
        return self._num_samples

    def __getitem__(self, number: int) -> dict[str, Tensor]:
        if not 0 <= number < len(self):
            raise IndexError(f"sample {number} of {len(self)}")
        return {key: value[0] for key, value in self.batch([number]).items()}

    def batch(self, numbers: Sequence[int]) -> dict[str, Tensor]:
        """Return samples, stacked. They are the same as each alone, and several times faster."""
        if self._training:
            rows, draws = [self._row(number) for number in numbers], self._draws(np.asarray(numbers))
            pixels = self.augmentation.training(
                [self._read(row, draw) for row, draw in zip(rows, draws, strict=True)], draws
            )
        else:
            rows = list(numbers)
            pixels = self.augmentation.validation([self._read(row, None) for row in rows])
        labels = torch.from_numpy(self.images.labels[rows])
        samples = {"tokens": pixels, "labels": labels, "loss_weight": torch.ones(len(rows))}
        if self._soft_targets:
            classes = len(self.images.class_names)
            smoothed = torch.full((len(rows), classes), self._smoothing / classes)
            smoothed[torch.arange(len(rows)), labels] += 1 - self._smoothing
            samples["targets"] = smoothed
        return samples

    def _read(self, row: int, draws: Draws | None) -> Pixels:
        pixels = self._cached.get(row)
        if pixels is None:
            image, augmentation = self.images.image(row), self.augmentation
            pixels = augmentation.read_validation(image) if draws is None else augmentation.read_training(image, draws)
            if self._caches:
                self._cached[row] = pixels
        return pixels

    def _row(self, number: int) -> int:
        epoch, position = divmod(number, len(self.images))
        order = self._order  # read once: several threads may be in two epochs
        if order[0] != epoch:
            order = self._order = epoch, np.random.default_rng([self.seed, epoch]).permutation(len(self.images))
        return int(order[1][position])

    def _draws(self, numbers: NDArray[np.int64]) -> Draws:
        """Return the random numbers of samples, which depend on (seed, sample number), [samples, num_draws]."""
        draws = np.empty((len(numbers), self.augmentation.num_draws))
        blocks, positions = np.divmod(numbers, _BLOCK)
        for block in np.unique(blocks):
            random = np.random.default_rng([self.seed, int(block), 1])  # 1: independent of the order of the images
            inside = blocks == block
            draws[inside] = random.random((_BLOCK, draws.shape[1]))[positions[inside]]
        return draws
