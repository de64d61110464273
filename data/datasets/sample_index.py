"""Which tokens a training sample holds: the arrays behind packed samples, and the two orders of them.

A shuffled list of sequence ids, the *document index*, makes one stream of tokens; sample s is tokens [s T, s T + T] of the
stream (T + 1 tokens, neighbours share one); the *shuffle index* permutes the samples.

``neox``       GPT-NeoX's order: one stream of all E epochs, both permutations from one ``numpy.random.RandomState(seed)``.
               E follows from the length of the run, so a run that is lengthened across an epoch has another order.
``reshuffle``  every epoch is a stream of its own, shuffled anew from (seed, epoch). What is left at the end of an epoch, less
               than a sample, is not read in it. A longer run begins with the order of the shorter one.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ..cache import cached_arrays
from ..indexed import IndexedTokens, file_identity

INDEX_VERSION = 2
ORDERS = ("neox", "reshuffle")


@dataclass(frozen=True)
class SampleIndex:
    """``document_index`` int32: sequence ids, all epochs one after another. ``sample_index`` int64 [rows, 2]: (position in
    the document index, offset in that sequence) at which samples start; the row after a sample's is where it ends.
    ``shuffle_index`` uint32 or int64 [samples]: row of each sample. ``most_segments`` int64 [1]: the largest number of
    sequences, empty ones included, that one sample reads its T inputs from."""

    document_index: NDArray
    sample_index: NDArray
    shuffle_index: NDArray
    most_segments: NDArray


def epochs_needed(num_samples: int, tokens_per_epoch: int, sequence_length: int) -> int:
    """The smallest E with (E * tokens - 1) // sequence_length >= num_samples."""
    return max(1, -(-(num_samples * sequence_length + 1) // tokens_per_epoch))


def build_sample_index(sizes: NDArray[np.int32], sequence_length: int, epochs: int, seed: int) -> SampleIndex:
    """GPT-NeoX's three arrays, without a loop over sequences or samples. ``sizes`` int32 [N]: tokens of every sequence."""
    random = np.random.RandomState(seed)
    document_index = np.tile(np.arange(len(sizes), dtype=np.int32), epochs)
    random.shuffle(document_index)
    starts, segments = _sample_starts(sizes[document_index], sequence_length)
    samples = len(starts) - 1
    shuffle_index = np.arange(samples, dtype=_row_type(samples))
    random.shuffle(shuffle_index)
    return SampleIndex(document_index, starts, shuffle_index, np.array([segments]))


def build_reshuffled_index(sizes: NDArray[np.int32], sequence_length: int, epochs: int, seed: int) -> SampleIndex:
    """The same arrays for epochs that are shuffled one by one; epoch e depends on (seed, e) alone."""
    documents, starts, shuffled, segments = [], [], [], [0]
    rows = 0
    for epoch in range(epochs):
        random = np.random.Generator(np.random.PCG64([seed, epoch]))
        documents.append(random.permutation(np.arange(len(sizes), dtype=np.int32)))
        epoch_starts, most = _sample_starts(sizes[documents[-1]], sequence_length)
        epoch_starts[:, 0] += epoch * len(sizes)
        order = random.permutation(len(epoch_starts) - 1) + rows
        rows += len(epoch_starts)
        starts.append(epoch_starts)
        shuffled.append(order)
        segments.append(most)
    return SampleIndex(
        np.concatenate(documents),
        np.concatenate(starts),
        np.concatenate(shuffled).astype(_row_type(rows)),
        np.array([max(segments)]),
    )


def cached_sample_index(
    file: IndexedTokens,
    *,
    sequence_length: int,
    num_samples: int,
    seed: int,
    order: str,
    cache_directory: str | Path | None,
) -> tuple[SampleIndex, int]:
    """The index of a file and its number of epochs, from the cache where it is.

    Raises ValueError for an unknown order and, in the order ``reshuffle``, for fewer tokens than a sample needs.
    """
    if order not in ORDERS:
        raise ValueError(f"order {order!r} of the samples is unknown; allowed: {', '.join(ORDERS)}")
    tokens = file.num_tokens
    if order == "neox":
        epochs = epochs_needed(num_samples, tokens, sequence_length)
    elif tokens <= sequence_length:
        raise ValueError(
            f"{file.prefix}: {tokens:,} tokens are not one sample of {sequence_length:,} + 1, and the order reshuffle cuts"
            " every epoch by itself. Take the order neox, which joins epochs, or shorter samples."
        )
    else:
        epochs = -(-num_samples // ((tokens - 1) // sequence_length))
    made_from = {
        "samples": INDEX_VERSION,
        "order": order,
        "files": file_identity(file.prefix),
        "sequence_length": sequence_length,
        "epochs": epochs,
        "seed": seed,
    }

    def build() -> dict[str, NDArray]:
        make = build_sample_index if order == "neox" else build_reshuffled_index
        return vars(make(file.sizes, sequence_length, epochs, seed))

    return SampleIndex(**cached_arrays(cache_directory, "samples", made_from, build)), epochs


def most_segments(starts: NDArray[np.int64]) -> int:
    """The largest number of sequences between neighbouring rows of a sample index, the last only where it is begun."""
    return int((np.diff(starts[:, 0]) + (starts[1:, 1] > 0)).max(initial=1))


def _sample_starts(sizes: NDArray[np.int32], sequence_length: int) -> tuple[NDArray[np.int64], int]:
    """Starts of the samples of one stream and its end [samples + 1, 2], and the most sequences of a sample."""
    ends = np.cumsum(sizes, dtype=np.int64)
    samples = int((ends[-1] - 1) // sequence_length)
    starts = np.arange(samples + 1, dtype=np.int64) * sequence_length
    # The sequence that holds token p is the first that ends after p; empty sequences hold none.
    position = np.searchsorted(ends, starts, side="right")
    offset = starts - np.where(position > 0, ends[np.maximum(position, 1) - 1], 0)
    rows = np.stack([position, offset], axis=1)
    return rows, most_segments(rows)


def _row_type(rows: int) -> type[np.uint32] | type[np.int64]:
    return np.uint32 if rows < 2**32 - 1 else np.int64
