"""Blend the samples of several token files by weight, in GPT-NeoX's order.

Sample i comes from the data set furthest below its share: argmax over k of w_k * max(i, 1) - count_k, the first on a tie. So
the shares hold at every point of a run, and the order is deterministic.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from ..cache import cached_arrays, damaged_order
from ..indexed import IndexedTokens
from .causal import CausalDataset, Packing
from .sample_index import selected_sequences

BLEND_VERSION = 1
SHARES_BY = ("tokens", "documents", "weights")


@dataclass(frozen=True)
class Shares:
    """Sampling shares of several token files.

    by: "weights" (as given), "tokens" or "documents" (counts of the files).
    weights: one positive number per file, with by="weights" only.
    temperature: shares are proportional to (weight, tokens or documents)^(1 / temperature). 1 keeps them, above 1 makes them
        more even (Arivazhagan et al. 2019, arXiv 1907.05019).
    min_tokens: one number per file: documents with fewer tokens are left out, also of the counts. One file may be named twice,
        so that its long documents have a share of their own.
    """

    by: str = "tokens"
    weights: tuple[float, ...] | None = None
    temperature: float = 1.0
    min_tokens: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if self.by not in SHARES_BY:
            raise ValueError(f"a blend by {self.by!r} is unknown; allowed: {', '.join(SHARES_BY)}")
        if (self.by == "weights") != (self.weights is not None):
            raise ValueError("weights and by='weights' require each other: set both or neither")
        if not self.temperature > 0 or not math.isfinite(self.temperature):
            raise ValueError(f"temperature {self.temperature} of a blend must be above 0")

    def of(self, prefixes: Sequence[str | Path]) -> list[float]:
        """Return the share of each file; they sum to 1.

        Raises ValueError for a weight that is not positive, unless there is one weight per file, and as `selected_sequences`.
        """
        if self.weights is not None:
            if len(self.weights) != len(prefixes):
                raise ValueError(f"{len(self.weights)} weights for {len(prefixes)} token files: give one for each")
            sizes = normalized(self.weights)
        else:
            counts = [selected_counts(*pair) for pair in zip(prefixes, self.limits(prefixes), strict=True)]
            sizes = normalized([tokens if self.by == "tokens" else documents for documents, tokens in counts])
        return normalized([size ** (1 / self.temperature) for size in sizes])

    def limits(self, prefixes: Sequence[str | Path]) -> tuple[int, ...]:
        """Return `min_tokens` of each file, 0 by default. Raises ValueError unless there is one per file."""
        limits = (0,) * len(prefixes) if self.min_tokens is None else self.min_tokens
        if len(limits) != len(prefixes):
            raise ValueError(f"{len(limits)} values of min_tokens for {len(prefixes)} token files: give one for each")
        return limits


def selected_counts(prefix: str | Path, min_tokens: int) -> tuple[int, int]:
    """Return documents and tokens of a file in documents of ``min_tokens`` tokens or more. Raises as `selected_sequences`."""
    file = IndexedTokens(prefix)
    if not min_tokens:
        return file.num_documents, file.num_tokens
    selected = selected_sequences(file, min_tokens)
    return len(selected), int(file.sizes[selected].sum(dtype=np.int64))


def training_dataset(
    prefixes: str | Path | Sequence[str | Path],
    shares: Shares = Shares(),
    *,
    sequence_length: int,
    num_samples: int,
    seed: int,
    order: str = "neox",
    packing: Packing = Packing(),  # noqa: B008 - frozen
    cache_directory: str | Path | None = None,
) -> CausalDataset | BlendedDataset:
    """Return training samples of one token file, or of several files by shares.

    Other arguments and errors as in `CausalDataset`.
    """
    if isinstance(prefixes, (str, Path)):
        prefixes = [prefixes]
    if not prefixes:
        raise ValueError("no token files to train on: name at least one prefix")
    weights = shares.of(prefixes)
    datasets = [
        CausalDataset(
            prefix,
            sequence_length=sequence_length,
            # The margin of GPT-NeoX, also for one file, because shares of a finite run are not exact. One file in the order
            # reshuffle needs no margin: its order does not depend on the number of samples.
            num_samples=num_samples
            if len(prefixes) == 1 and order != "neox"
            else math.ceil(num_samples * share * 1.005),
            seed=seed,
            order=order,
            packing=packing,
            min_tokens=min_tokens,
            cache_directory=cache_directory,
        )
        for prefix, share, min_tokens in zip(prefixes, weights, shares.limits(prefixes), strict=True)
    ]
    if len(datasets) == 1:
        return datasets[0]
    return BlendedDataset(datasets, weights, num_samples=num_samples, cache_directory=cache_directory)


class BlendedDataset:
    """Return samples of several data sets by share.

    ``source`` int16 [samples] is the data set of each sample, ``number`` int64 [samples] its sample number there.
    """

    def __init__(
        self,
        datasets: Sequence[CausalDataset],
        weights: Sequence[float],
        *,
        num_samples: int,
        cache_directory: str | Path | None = None,
    ) -> None:
        self.datasets = list(datasets)
        self.weights = normalized(weights)
        self.sources = list(dict.fromkeys(name for dataset in datasets for name in dataset.sources))
        segments = max(dataset.segments for dataset in datasets)
        for dataset in datasets:
            dataset.join_sources(self.sources)
            dataset.segments = segments  # so that batches have one shape
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
        try:
            dataset = self.datasets[int(self.source[number])]
        except IndexError as error:
            raise damaged_order(self.source, error) from error
        index = int(self.number[number])
        # When a data set repeats, GPT-NeoX wraps one sample before its end.
        return dataset[index if index < len(dataset) else index % max(1, len(dataset) - 1)]


def blend_order(weights: Sequence[float], num_samples: int) -> NDArray[np.int16]:
    """Return the data set of each sample, int16 [num_samples]. ``weights`` sum to 1.

    The loop is sequential, about 2 microseconds per sample; the result is cached.
    """
    shares = np.asarray(weights, np.float64)
    counts = np.zeros(len(shares), np.float64)
    behind = np.empty(len(shares), np.float64)
    order = np.empty(num_samples, np.int16)
    for step in range(num_samples):
        np.multiply(shares, max(step, 1), out=behind)
        np.subtract(behind, counts, out=behind)
        dataset = behind.argmax()
        order[step] = dataset
        counts[dataset] += 1
    return order


def running_counts(source: NDArray[np.int16], num_sources: int) -> NDArray[np.int64]:
    """Return how often the value of each entry occurs before it, int64 with the shape of ``source``."""
    counts = np.empty(len(source), np.int64)
    for value in range(num_sources):
        at = np.flatnonzero(source == value)
        counts[at] = np.arange(len(at))
    return counts


def normalized(weights: Sequence[float]) -> list[float]:
    """Return the weights scaled to sum to 1. Raises ValueError unless all are finite and above 0."""
    for number, weight in enumerate(weights):
        if not weight > 0 or not math.isfinite(weight):
            raise ValueError(f"weight {number + 1} of the token files is {weight}: it must be above 0")
    total = sum(weights)
    return [weight / total for weight in weights]
