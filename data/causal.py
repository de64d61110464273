"""Samples for causal language models, packed from a token file.

Training follows GPT-NeoX's order: E copies of the sequence ids are shuffled into one *document index*; the tokens in
that order are one stream; sample s is tokens [s * T, s * T + T] of the stream (T + 1 tokens, neighbours share one);
and a *shuffle index* permutes the samples. Both permutations come from one ``numpy.random.RandomState(seed)``.

Validation reads the stream once, in file order.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from .cache import cached_arrays
from .indexed import IndexedTokens, bin_path, idx_path

INDEX_VERSION = 1


@dataclass(frozen=True)
class SampleIndex:
    """``document_index`` int32 [E * sequences]; ``sample_index`` int64 [samples + 1, 2]: (position in the document
    index, offset in that sequence) at which each sample starts; ``shuffle_index`` uint32 or int64 [samples]."""

    document_index: NDArray
    sample_index: NDArray
    shuffle_index: NDArray


def epochs_needed(num_samples: int, tokens_per_epoch: int, sequence_length: int) -> int:
    """The smallest E with (E * tokens - 1) // sequence_length >= num_samples."""
    return max(1, -(-(num_samples * sequence_length + 1) // tokens_per_epoch))


def build_sample_index(
    sizes: NDArray[np.int32], sequences: NDArray[np.int32], sequence_length: int, epochs: int, seed: int
) -> SampleIndex:
    """GPT-NeoX's three arrays for the given sequence ids, without a loop over sequences or samples.

    ``sizes`` int32 [N] tokens of every sequence of the file; ``sequences`` the ids in use.
    """
    random = np.random.RandomState(seed)
    document_index = np.tile(np.asarray(sequences, np.int32), epochs)
    random.shuffle(document_index)
    ends = np.cumsum(sizes[document_index], dtype=np.int64)
    samples = int((ends[-1] - 1) // sequence_length)
    starts = np.arange(samples + 1, dtype=np.int64) * sequence_length
    # The sequence that holds token p is the first that ends after p; empty sequences hold none.
    position = np.searchsorted(ends, starts, side="right")
    offset = starts - np.where(position > 0, ends[np.maximum(position, 1) - 1], 0)
    shuffle_index = np.arange(samples, dtype=np.uint32 if samples < 2**32 - 1 else np.int64)
    random.shuffle(shuffle_index)
    return SampleIndex(document_index, np.stack([position, offset], axis=1), shuffle_index)


class CausalDataset:
    """Packed training samples of one token file, in GPT-NeoX's order.

    prefix: the token file without extension. num_samples: how many samples the run will take, which fixes the number
    of epochs (and so the order). sequences: [first, end) ids in use, for a split within one file; all by default.
    cache_directory: where the index is kept, under the hash of everything that made it; None keeps it in memory.

    ``ds[i]`` -> {"tokens": int64 [T], "labels": int64 [T], "loss_weight": float32 [T]}; labels are the tokens one
    later. Raises ValueError when the file has fewer than sequence_length + 1 tokens in all needed epochs.
    """

    def __init__(
        self,
        prefix: str | Path,
        *,
        sequence_length: int,
        num_samples: int,
        seed: int,
        sequences: tuple[int, int] | None = None,
        cache_directory: str | Path | None = None,
    ) -> None:
        if sequence_length < 1 or num_samples < 1:
            raise ValueError(f"sequence_length {sequence_length} and num_samples {num_samples} must be 1 or more")
        self.file = IndexedTokens(prefix)
        self.sequence_length = sequence_length
        first, end = _checked_range(self.file, sequences)
        tokens = int(self.file.sizes[first:end].sum(dtype=np.int64))
        if tokens == 0:
            raise ValueError(f"{prefix}: sequences {first} to {end} hold no tokens")
        self.epochs = epochs_needed(num_samples, tokens, sequence_length)
        self.index = _cached_index(self.file, first, end, sequence_length, self.epochs, seed, cache_directory)

    def __len__(self) -> int:
        return len(self.index.shuffle_index)

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        if not 0 <= number < len(self):
            raise IndexError(f"sample {number} of {len(self)}")
        sample = int(self.index.shuffle_index[number])
        entry, offset = (int(x) for x in self.index.sample_index[sample])
        stream = _read_stream(self.file, self.index.document_index, entry, offset, self.sequence_length + 1)
        return {
            "tokens": torch.from_numpy(stream[:-1]),
            "labels": torch.from_numpy(stream[1:]),
            "loss_weight": torch.ones(self.sequence_length),
        }

    def documents_of(self, number: int) -> list[tuple[int, int, int]]:
        """Where sample ``number`` comes from: (sequence id, first token, tokens) of each part."""
        entry, offset = (int(x) for x in self.index.sample_index[int(self.index.shuffle_index[number])])
        left = self.sequence_length + 1
        parts = []
        while left:
            sequence = int(self.index.document_index[entry])
            count = min(left, int(self.file.sizes[sequence]) - offset)
            if count:
                parts.append((sequence, offset, count))
            left -= count
            entry, offset = entry + 1, 0
        return parts


class SequentialDataset:
    """Every token of a file exactly once as a label, in file order: for validation.

    The stream is ``first_token`` (the end of a document, as if one stood before) and then all tokens, so that the
    first token of the file is predicted too and a sum over all labels is the whole text. The last sample is filled up
    with ``first_token`` under loss_weight 0. Samples as in CausalDataset.
    """

    def __init__(self, prefix: str | Path, *, sequence_length: int, first_token: int) -> None:
        if sequence_length < 1:
            raise ValueError(f"sequence_length {sequence_length} must be 1 or more")
        self.file = IndexedTokens(prefix)
        self.sequence_length = sequence_length
        self.first_token = first_token
        self._order = np.arange(len(self.file), dtype=np.int32)
        self._ends = np.cumsum(self.file.sizes, dtype=np.int64)
        self.num_tokens = int(self._ends[-1])

    def __len__(self) -> int:
        return -(-self.num_tokens // self.sequence_length)

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        if not 0 <= number < len(self):
            raise IndexError(f"sample {number} of {len(self)}")
        length = self.sequence_length
        start = number * length - 1  # the token before the first label; -1 is first_token
        count = min(length + 1, self.num_tokens - start)
        stream = np.full(length + 1, self.first_token, np.int64)
        begin = max(start, 0)
        entry = int(np.searchsorted(self._ends, begin, side="right"))
        offset = begin - (int(self._ends[entry - 1]) if entry else 0)
        stream[begin - start : count] = _read_stream(self.file, self._order, entry, offset, count - (begin - start))
        weight = torch.zeros(length)
        weight[: count - 1] = 1.0
        return {
            "tokens": torch.from_numpy(stream[:-1]),
            "labels": torch.from_numpy(stream[1:]),
            "loss_weight": weight,
        }


def split_sequences(num_sequences: int, split: tuple[float, ...]) -> list[tuple[int, int]]:
    """GPT-NeoX's ``split`` ("969,30,1"): consecutive ranges [first, end) of sequence ids in these proportions."""
    total = sum(split)
    if total <= 0 or min(split) < 0:
        raise ValueError(f"split {split} must hold non-negative shares, at least one of them above 0")
    bounds = [0]
    for share in split:
        bounds.append(bounds[-1] + round(share / total * num_sequences))
    excess = bounds[-1] - num_sequences
    bounds[1:] = [bound - excess for bound in bounds[1:]]
    return list(itertools.pairwise(bounds))


def _read_stream(file: IndexedTokens, order: NDArray, entry: int, offset: int, count: int) -> NDArray[np.int64]:
    out = np.empty(count, np.int64)
    filled = 0
    while filled < count:
        piece = file.read(int(order[entry]), offset, count - filled)
        out[filled : filled + len(piece)] = piece
        filled += len(piece)
        entry, offset = entry + 1, 0
    return out


def _checked_range(file: IndexedTokens, sequences: tuple[int, int] | None) -> tuple[int, int]:
    first, end = sequences or (0, len(file))
    if not 0 <= first < end <= len(file):
        raise ValueError(f"{file.prefix}: sequences [{first}, {end}) are not a range within its {len(file)}")
    return first, end


def _cached_index(
    file: IndexedTokens,
    first: int,
    end: int,
    sequence_length: int,
    epochs: int,
    seed: int,
    cache_directory: str | Path | None,
) -> SampleIndex:
    made_from = {
        "samples": INDEX_VERSION,
        "files": [
            [str(path.resolve()), path.stat().st_size, path.stat().st_mtime_ns]
            for path in (bin_path(file.prefix), idx_path(file.prefix))
        ],
        "sequences": [first, end],
        "sequence_length": sequence_length,
        "epochs": epochs,
        "seed": seed,
    }

    def build() -> dict[str, NDArray]:
        ids = np.arange(first, end, dtype=np.int32)
        return vars(build_sample_index(file.sizes, ids, sequence_length, epochs, seed))

    return SampleIndex(**cached_arrays(cache_directory, "samples", made_from, build))
