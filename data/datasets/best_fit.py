"""Pack whole documents into samples: best-fit decreasing (Ding et al. 2024, arXiv 2404.10830, section 3).

A sample holds T + 1 tokens. The longest documents come first, each into the sample with the least free space that holds it.
A document of more than T + 1 tokens is cut into pieces of T + 1 tokens that overlap by one token, and a shorter last piece.
The rest of a sample is padding. Every epoch shuffles documents of equal length, samples, and the order within a sample.
Epoch e depends only on (seed, e), so a longer run begins with the samples of a shorter one.
"""

from __future__ import annotations

import bisect
from collections import defaultdict
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ..cache import cached_arrays, damaged_order
from ..indexed import IndexedTokens, file_identity
from .sample_index import TokenSpan, selected_sequences

BEST_FIT_VERSION = 1


@dataclass(frozen=True)
class BestFitIndex:
    """Index arrays of samples that hold whole documents.

    sequences, offsets: int32 [pieces], sequence id and first token of each piece, sample after sample, of all epochs.
    sample_starts: int64 [samples + 1], first piece of each sample.
    epochs: int64 [1], number of epochs. most_segments: int64 [1], maximum number of pieces and padding in one sample.
    """

    sequences: NDArray
    offsets: NDArray
    sample_starts: NDArray
    epochs: NDArray
    most_segments: NDArray

    def __len__(self) -> int:
        return len(self.sample_starts) - 1

    def spans(self, sizes: NDArray, number: int, sequence_length: int) -> list[TokenSpan]:
        """Return the token spans of a sample, T + 1 tokens or fewer. Raises DamagedDataError for a damaged index.

        sizes: int32 [N], tokens per sequence.
        """
        pieces = slice(*(int(x) for x in self.sample_starts[number : number + 2]))
        spans, total = [], 0
        try:
            for sequence, offset in zip(self.sequences[pieces].tolist(), self.offsets[pieces].tolist(), strict=True):
                count = min(int(sizes[sequence]) - offset, sequence_length + 1)
                total += count
                if sequence < 0 or offset < 0 or count < 1 or total > sequence_length + 1:
                    raise IndexError(f"token {offset:,} of sequence {sequence:,}")
                spans.append((sequence, offset, count))
        except IndexError as error:
            raise damaged_order(self.sequences, error) from error
        return spans


def build_best_fit_index(sizes: NDArray[np.int32], sequence_length: int, num_samples: int, seed: int) -> BestFitIndex:
    """Return the index of as many epochs as ``num_samples`` samples need. sizes: int32 [N], tokens per sequence, one above 0."""
    documents = np.flatnonzero(sizes > 0).astype(np.int32)
    tokens = sizes[documents].astype(np.int64)
    # A document of at most T + 1 tokens is one piece; the last piece of a longer one has 2 to T + 1 tokens.
    pieces = np.maximum(1, -(-(tokens - 1) // sequence_length))
    first = np.cumsum(pieces) - pieces
    sequences = np.repeat(documents, pieces)
    offsets = (np.arange(len(sequences)) - np.repeat(first, pieces)) * sequence_length
    lengths = np.minimum(np.repeat(tokens, pieces) - offsets, sequence_length + 1)
    descending = np.sort(lengths)[::-1]
    samples_of, per_epoch = best_fit(descending, sequence_length + 1)
    epochs = -(-num_samples // per_epoch)
    order, counts = [], []
    for epoch in range(epochs):
        random = np.random.Generator(np.random.PCG64([seed, epoch]))
        shuffled = random.permutation(len(lengths))
        by_length = shuffled[np.argsort(-lengths[shuffled], kind="stable")]
        samples = random.permutation(per_epoch)[samples_of]
        order.append(by_length[np.lexsort((random.permutation(len(samples)), samples))])
        counts.append(np.bincount(samples))
    pieces_of_all = np.concatenate(order)
    is_padded = np.bincount(samples_of, descending) <= sequence_length
    return BestFitIndex(
        sequences[pieces_of_all],
        offsets[pieces_of_all].astype(np.int32),
        np.concatenate([[0], np.cumsum(np.concatenate(counts))]),
        np.array([epochs]),
        np.array([int((np.bincount(samples_of) + is_padded).max())]),
    )


def best_fit(lengths: NDArray[np.int64], capacity: int) -> tuple[NDArray[np.int64], int]:
    """Return the bin of each piece, int64 [pieces], and the number of bins. lengths: in descending order, 1 to ``capacity``.

    A piece goes into the bin with the least free space that holds it. Bins with equal space are equivalent, so pieces of one
    length are placed together: the cost grows with the number of different lengths.
    """
    values, counts = np.unique(lengths, return_counts=True)
    bins_with: dict[int, list[NDArray[np.int64]]] = defaultdict(list)  # free space -> bins
    spaces: list[int] = []  # the keys of `bins_with`, in ascending order
    placed: list[NDArray[np.int64]] = [np.zeros(0, np.int64)]
    num_bins = 0

    def add(space: int, bins: NDArray[np.int64]) -> None:
        if space and len(bins):
            if space not in bins_with:
                bisect.insort(spaces, space)
            bins_with[space].append(bins)

    for length, count in zip(values[::-1].tolist(), counts[::-1].tolist(), strict=True):
        while count:
            at = bisect.bisect_left(spaces, length)
            if at < len(spaces):
                space = spaces.pop(at)
                bins = np.concatenate(bins_with.pop(space))
            else:
                space = capacity
                bins = np.arange(num_bins, num_bins - (-count // (capacity // length)))
                num_bins += len(bins)
            # The rest of a bin is the smallest space that holds the next piece, so bins are filled one after the other.
            each = space // length
            full = min(len(bins), count // each)
            rest = count - full * each if full < len(bins) else 0
            placed += [np.repeat(bins[:full], each), np.repeat(bins[full : full + 1], rest)]
            add(space - each * length, bins[:full])
            add(space - rest * length, bins[full : full + 1])
            add(space, bins[full + 1 :])
            count -= full * each + rest
    return np.concatenate(placed), num_bins


def cached_best_fit_index(
    file: IndexedTokens,
    *,
    sequence_length: int,
    num_samples: int,
    seed: int,
    min_tokens: int = 0,
    cache_directory: str | Path | None,
) -> BestFitIndex:
    """Return the index of a token file, from the cache if it exists. Raises ValueError as `selected_sequences`."""
    made_from = {
        "best_fit": BEST_FIT_VERSION,
        "files": file_identity(file.prefix),
        "sequence_length": sequence_length,
        "num_samples": num_samples,
        "min_tokens": min_tokens,
        "seed": seed,
    }

    def build() -> dict[str, NDArray]:
        selected = selected_sequences(file, min_tokens)
        index = build_best_fit_index(file.sizes[selected], sequence_length, num_samples, seed)
        return vars(replace(index, sequences=selected[index.sequences]))

    return BestFitIndex(**cached_arrays(cache_directory, "best_fit", made_from, build))
