"""Build the samples of an image classifier."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .augmentation import Augmentation
from .reading import LabelledImages


class ImageDataset:
    """Return augmented training samples, or with num_samples None every image once, in order, for validation.

    Each epoch uses every image once, in an order that depends on (seed, epoch). The augmentation depends on (seed, epoch, row).

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
        self._num_samples, self._smoothing = num_samples, label_smoothing
        self._soft_targets = soft_targets or label_smoothing > 0
        self._order: tuple[int, NDArray[np.int64]] = (-1, np.zeros(0, np.int64))

    def __len__(self) -> int:
        return len(self.images) if self._num_samples is None else self._num_samples

    def __getitem__(self, number: int) -> dict[str, Tensor]:
        if not 0 <= number < len(self):
            raise IndexError(f"sample {number} of {len(self)}")
        if self._num_samples is None:
            return self._sample(number, self.augmentation.validation(self.images.image(number)))
        epoch, place = divmod(number, len(self.images))
        row = int(self._rows(epoch)[place])
        random = np.random.default_rng([self.seed, epoch, row])
        sample = self._sample(row, self.augmentation.training(self.images.image(row), random))
        if self._soft_targets:
            classes = len(self.images.class_names)
            targets = torch.full((classes,), self._smoothing / classes)
            targets[self.images.labels[row]] += 1 - self._smoothing
            sample["targets"] = targets
        return sample

    def _rows(self, epoch: int) -> NDArray[np.int64]:
        order = self._order  # read once: several threads may be in two epochs
        if order[0] != epoch:
            order = self._order = epoch, np.random.default_rng([self.seed, epoch]).permutation(len(self.images))
        return order[1]

    def _sample(self, row: int, pixels: Tensor) -> dict[str, Tensor]:
        label = torch.tensor(int(self.images.labels[row]))
        return {"tokens": pixels, "labels": label, "loss_weight": torch.tensor(1.0)}
