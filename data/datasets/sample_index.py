"""Build the index arrays of packed training samples, in one of two orders.

The *document index*, a shuffled list of sequence ids, defines one stream of tokens. Sample s is tokens [s T, s T + T] of the
stream: T + 1 tokens, with one token shared by neighbouring samples. The *shuffle index* permutes the samples.

``neox``       GPT-NeoX's order: one stream of all E epochs, both permutations from one ``numpy.random.RandomState(seed)``.
               E depends on the length of the run, so a longer run with more epochs has another order.
``reshuffle``  one stream per epoch, shuffled with (seed, epoch). An incomplete sample at the end of an epoch is dropped. A
               longer run begins with the order of the shorter one.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ..cache import cached_arrays
from ..indexed import IndexedTokens, file_identity
from ..machine_memory import machine_memory

INDEX_VERSION = 2
ORDERS = ("neox", "reshuffle")
PACKINGS = ("stream", "best_fit")
TokenSpan = tuple[int, int, int]  # sequence id, first token, number of tokens


@dataclass(frozen=True)
class SampleIndex:
    """Index arrays of packed samples.

    document_index: int32, sequence ids of all epochs.
    sample_index: int64 [rows, 2], start of each sample as (position in the document index, offset in that sequence). The next
        row is its end.
    shuffle_index: uint32 or int64 [samples], row of each sample.
    most_segments: int64 [1], maximum number of sequences in the T inputs of one sample, empty ones included.
    """

    document_index: NDArray
    sample_index: NDArray
    shuffle_index: NDArray
    most_segments: NDArray

    def __len__(self) -> int:
        return len(self.shuffle_index)


def epochs_needed(num_samples: int, tokens_per_epoch: int, sequence_length: int) -> int:
    """Return the smallest number of epochs E with (E * tokens_per_epoch - 1) // sequence_length >= num_samples."""
    return max(1, -(-(num_samples * sequence_length + 1) // tokens_per_epoch))


def build_sample_index(sizes: NDArray[np.int32], sequence_length: int, epochs: int, seed: int) -> SampleIndex:
    """Return the arrays of GPT-NeoX's order, vectorised. sizes: int32 [N], tokens per sequence."""
    random = np.random.RandomState(seed)
    document_index = np.tile(np.arange(len(sizes), dtype=np.int32), epochs)
    random.shuffle(document_index)
    starts, segments = _sample_starts(sizes[document_index], sequence_length)
    samples = len(starts) - 1
    shuffle_index = np.arange(samples, dtype=_row_type(samples))
    random.shuffle(shuffle_index)
    return SampleIndex(document_index, starts, shuffle_index, np.array([segments]))


def build_reshuffled_index(sizes: NDArray[np.int32], sequence_length: int, epochs: int, seed: int) -> SampleIndex:
    """Return the arrays of the order ``reshuffle``; epoch e depends only on (seed, e). Arguments as `build_sample_index`."""
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
    min_tokens: int = 0,
    cache_directory: str | Path | None,
) -> tuple[SampleIndex, int]:
    """Return the index of a token file and its number of epochs, from the cache if it exists.

    Raises ValueError for an unknown order, for an index larger than the memory of the machine, with ``reshuffle`` for a file with
    fewer tokens than one sample, and as `selected_sequences`.
    """
    if order not in ORDERS:
        raise ValueError(f"order {order!r} of the samples is unknown; allowed: {', '.join(ORDERS)}")
    selected = selected_sequences(file, min_tokens) if min_tokens else None
    sizes = file.sizes if selected is None else file.sizes[selected]
    tokens = int(sizes.sum(dtype=np.int64))
    if order == "neox":
        epochs = epochs_needed(num_samples, tokens, sequence_length)
    elif tokens <= sequence_length:
        of_long = f" in documents of {min_tokens:,} or more" if min_tokens else ""
        raise ValueError(
            f"{file.prefix}: {tokens:,} tokens{of_long} are fewer than one sample of {sequence_length:,} + 1, and the order"
            " reshuffle does not join epochs. Set data.order=neox, which joins them, or a shorter batch.sequence_length."
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
        **({"min_tokens": min_tokens} if min_tokens else {}),
    }

    def build() -> dict[str, NDArray]:
        make = build_sample_index if order == "neox" else build_reshuffled_index
        needed, memory = 4 * epochs * len(sizes) + 20 * num_samples, machine_memory()
        if needed > memory:
            raise ValueError(
                f"schedule.train_steps asks for {num_samples:,} samples, {epochs:,} epochs of {file.prefix}: their index takes "
                f"{needed / 2**30:,.0f} GiB, and this machine has {memory / 2**30:,.0f} GiB; set fewer steps, a smaller "
                "batch.global_batch_size, or train on more text"
            )
        index = make(sizes, sequence_length, epochs, seed)
        return vars(index if selected is None else replace(index, document_index=selected[index.document_index]))

    return SampleIndex(**cached_arrays(cache_directory, "samples", made_from, build)), epochs


def selected_sequences(file: IndexedTokens, min_tokens: int) -> NDArray[np.int32]:
    """Return the ids of the sequences with ``min_tokens`` tokens or more: int32. Raises ValueError if there are none."""
    selected = np.flatnonzero(file.sizes >= min_tokens).astype(np.int32)
    if not len(selected):
        longest = int(file.sizes.max())
        raise ValueError(
            f"data.blend.min_tokens = {min_tokens}: the longest document of {file.prefix} has {longest:,} tokens; at most "
            f"{longest} is allowed for this file"
        )
    return selected


def most_segments(starts: NDArray[np.int64]) -> int:
    """Return the largest number of sequences that a sample reads its inputs from. starts: int64 [rows, 2]."""
    return int((np.diff(starts[:, 0]) + (starts[1:, 1] > 0)).max(initial=1))


def _sample_starts(sizes: NDArray[np.int32], sequence_length: int) -> tuple[NDArray[np.int64], int]:
    """Return the sample starts and the end of one stream, int64 [samples + 1, 2], and `most_segments` of them."""
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
