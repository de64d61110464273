"""Several token files in one stream of samples, by weight, in GPT-NeoX's order.

Step i takes the data set that is furthest behind its share: argmax over k of w_k * max(i, 1) - count_k, the first one
of equals. So the shares hold at every point of a run and not only on average, and the order depends on nothing else.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from .cache import cached_arrays
from .causal import CausalDataset
from .indexed import IndexedTokens

BLEND_VERSION = 1


def training_dataset(
    prefixes: str | Path | Sequence[str | Path],
    weights: Sequence[float] | None = None,
    *,
    sequence_length: int,
    num_samples: int,
    seed: int,
    cache_directory: str | Path | None = None,
) -> CausalDataset | BlendedDataset:
    """Training samples of one token file or of several.

    ``weights`` (any positive numbers, normalised here) are the shares of the samples; None weighs each file by its
    tokens, so that every text is seen equally often. Other arguments as in CausalDataset. Raises ValueError for a
    weight that is not positive, and for as many weights as there are not files.
    """
    if isinstance(prefixes, (str, Path)):
        prefixes = [prefixes]
    if not prefixes:
        raise ValueError("no token files to train on: name at least one prefix")
    if weights is not None and len(weights) != len(prefixes):
        raise ValueError(f"{len(weights)} weights for {len(prefixes)} token files: give one for each")
    if len(prefixes) == 1:
        return CausalDataset(
            prefixes[0],
            sequence_length=sequence_length,
            num_samples=num_samples,
            seed=seed,
            cache_directory=cache_directory,
        )
    shares = normalised([IndexedTokens(prefix).num_tokens for prefix in prefixes] if weights is None else weights)
    parts = [
        CausalDataset(
            prefix,
            sequence_length=sequence_length,
            # GPT-NeoX's margin: the shares of a finite run are not exact.
            num_samples=math.ceil(num_samples * share * 1.005),
            seed=seed,
            cache_directory=cache_directory,
        )
        for prefix, share in zip(prefixes, shares, strict=True)
    ]
    return BlendedDataset(parts, shares, num_samples=num_samples, cache_directory=cache_directory)


class BlendedDataset:
    """Samples of several data sets by share; ``source[i]`` int16 says which one sample i comes from and ``number[i]``
    int64 which of its samples."""

    def __init__(
        self,
        datasets: Sequence[CausalDataset],
        weights: Sequence[float],
        *,
        num_samples: int,
        cache_directory: str | Path | None = None,
    ) -> None:
        self.datasets = list(datasets)
        self.weights = normalised(weights)
        made_from = {"blend": BLEND_VERSION, "weights": self.weights, "num_samples": num_samples}

        def build() -> dict[str, NDArray]:
            source = blend_order(self.weights, num_samples)
            return {"source": source, "number": running_counts(source, len(self.weights))}

        arrays = cached_arrays(cache_directory, "blend", made_from, build)
        self.source, self.number = arrays["source"], arrays["number"]

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        if not 0 <= number < len(self):
            raise IndexError(f"sample {number} of {len(self)}")
        part = self.datasets[int(self.source[number])]
        return part[int(self.number[number]) % len(part)]


def blend_order(weights: Sequence[float], num_samples: int) -> NDArray[np.int16]:
    """Which data set each sample comes from, int16 [num_samples]; ``weights`` sum to 1.

    The rule is sequential by nature: about 2 microseconds a sample, once, since the outcome is cached.
    """
    shares = np.asarray(weights, np.float64)
    counts = np.zeros(len(shares), np.float64)
    behind = np.empty(len(shares), np.float64)
    order = np.empty(num_samples, np.int16)
    for step in range(num_samples):
        np.multiply(shares, max(step, 1), out=behind)
        np.subtract(behind, counts, out=behind)
        chosen = behind.argmax()
        order[step] = chosen
        counts[chosen] += 1
    return order


def running_counts(source: NDArray[np.int16], num_sources: int) -> NDArray[np.int64]:
    """How often each entry's value came before it, int64 like ``source``."""
    counts = np.empty(len(source), np.int64)
    for value in range(num_sources):
        at = np.flatnonzero(source == value)
        counts[at] = np.arange(len(at))
    return counts


def normalised(weights: Sequence[float]) -> list[float]:
    """Weights that sum to 1. Raises ValueError for one that is not above 0."""
    for number, weight in enumerate(weights):
        if not weight > 0 or not math.isfinite(weight):
            raise ValueError(f"weight {number + 1} of the token files is {weight}: it must be above 0")
    total = sum(weights)
    return [weight / total for weight in weights]
