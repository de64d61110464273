"""Samples for causal language models, packed from a token file.

Training takes samples in one of the orders of `data.sample_index`; validation reads the file once, in its own order.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from ..cache import damaged_order
from ..corpus.document_sources import read_sources
from ..indexed import IndexedTokens
from .sample_index import cached_sample_index

Sample = dict[str, torch.Tensor]
Part = tuple[int, int, int]  # sequence id, first token, tokens


@dataclass(frozen=True)
class Packing:
    """What samples say about the documents inside them.

    reset_at_documents: samples carry ``cu_seqlens``, so that nothing crosses from one document into the next.
    mask_boundaries: the first token of a document is not predicted from the one before it (loss weight 0).
    sources: samples carry ``source``, the number of the source (in ``dataset.sources``) of each label.
    """

    reset_at_documents: bool = False
    mask_boundaries: bool = False
    sources: bool = False


class CausalDataset:
    """Packed training samples of one token file.

    prefix: the token file without extension. num_samples: how many samples the run will take, which fixes the number
    of epochs. order: "neox" or "reshuffle" (see `data.sample_index`). cache_directory: where the index is kept, under the
    hash of everything that made it; None keeps it in memory.

    ``ds[i]`` -> {"tokens": int64 [T], "labels": int64 [T], "loss_weight": float32 [T]}; labels are the tokens one
    later. With ``reset_at_documents`` also "cu_seqlens" int32 [segments + 1]: 0, the starts of further documents, T, and T
    repeated up to a length that is the same for every sample. With ``sources`` also "source" int64 [T]. A document is a
    sequence of the file. Raises ValueError as `cached_sample_index`.
    """

    def __init__(
        self,
        prefix: str | Path,
        *,
        sequence_length: int,
        num_samples: int,
        seed: int,
        order: str = "neox",
        packing: Packing = Packing(),
        cache_directory: str | Path | None = None,
    ) -> None:
        if sequence_length < 1 or num_samples < 1:
            raise ValueError(f"sequence_length {sequence_length} and num_samples {num_samples} must be 1 or more")
        self.file = IndexedTokens(prefix)
        self.sequence_length = sequence_length
        self.packing = packing
        self.index, self.epochs = cached_sample_index(
            self.file,
            sequence_length=sequence_length,
            num_samples=num_samples,
            seed=seed,
            order=order,
            cache_directory=cache_directory,
        )
        self.segments = int(self.index.most_segments[0])
        self.sources: list[str] = []
        self._source_of: NDArray[np.int16] | None = None
        if packing.sources:
            self.sources, self._source_of = read_sources(prefix, len(self.file))

    def __len__(self) -> int:
        return len(self.index.shuffle_index)

    def __getitem__(self, number: int) -> Sample:
        if not 0 <= number < len(self):
            raise IndexError(f"sample {number} of {len(self)}")
        parts = self.documents_of(number)
        sample = _causal_sample(read_parts(self.file, parts, self.sequence_length + 1))
        if self.packing.reset_at_documents:
            sample["cu_seqlens"] = cu_seqlens(parts, self.sequence_length, self.segments)
        if self.packing.mask_boundaries:
            starts = [place - 1 for place in _places(parts) if place]  # all parts but the first begin a document
            sample["loss_weight"][starts] = 0.0
        if self._source_of is not None:
            source = np.repeat(self._source_of[[part[0] for part in parts]], [part[2] for part in parts])[1:]
            sample["source"] = torch.from_numpy(source.astype(np.int64))
        return sample

    def join_sources(self, names: Sequence[str]) -> None:
        """Number the sources by ``names``, which hold all of this file's, so that several files share them."""
        if self._source_of is not None:
            self._source_of = np.array([names.index(name) for name in self.sources], np.int16)[self._source_of]
            self.sources = list(names)

    def documents_of(self, number: int) -> list[Part]:
        """Where sample ``number`` comes from: (sequence id, first token, tokens) of each part."""
        try:
            entry, offset = (int(x) for x in self.index.sample_index[int(self.index.shuffle_index[number])])
            return parts_from(self.file.sizes, self.index.document_index, entry, offset, self.sequence_length + 1)
        except IndexError as error:
            raise damaged_order(self.index.sample_index, error) from error


class SequentialDataset:
    """Every token of a file exactly once as a label, in file order: for validation.

    The stream is ``first_token`` (the end of a document, as if one stood before) and then all tokens, so that the
    first token of the file is predicted too and a sum over all labels is the whole text. The last sample is filled up
    with ``first_token`` under loss_weight 0. Samples as in CausalDataset, with ``cu_seqlens`` where documents reset.

    sequences: ids to read, in ascending order; all by default.
    """

    def __init__(
        self,
        prefix: str | Path,
        *,
        sequence_length: int,
        first_token: int,
        reset_at_documents: bool = False,
        sequences: NDArray[np.int64] | None = None,
    ) -> None:
        if sequence_length < 1:
            raise ValueError(f"sequence_length {sequence_length} must be 1 or more")
        self.file = IndexedTokens(prefix)
        self.sequence_length = sequence_length
        self.first_token = first_token
        self.reset_at_documents = reset_at_documents
        self._order = np.arange(len(self.file)) if sequences is None else sequences
        self._ends = np.cumsum(self.file.sizes[self._order], dtype=np.int64)
        self.num_tokens = int(self._ends[-1])
        self.segments = self._most_segments() if reset_at_documents else 0

    def __len__(self) -> int:
        return -(-self.num_tokens // self.sequence_length)

    def __getitem__(self, number: int) -> Sample:
        if not 0 <= number < len(self):
            raise IndexError(f"sample {number} of {len(self)}")
        length = self.sequence_length
        begin = max(number * length - 1, 0)  # the token before the first label, where there is one
        count = min((number + 1) * length, self.num_tokens) - begin
        entry = int(np.searchsorted(self._ends, begin, side="right"))
        offset = begin - (int(self._ends[entry - 1]) if entry else 0)
        parts = parts_from(self.file.sizes, self._order, entry, offset, count)
        stream = np.full(length + 1, self.first_token, np.int64)
        lead = int(number == 0)
        stream[lead : lead + count] = read_parts(self.file, parts, count)
        sample = _causal_sample(stream)
        sample["loss_weight"][lead + count - 1 :] = 0.0
        if self.reset_at_documents:
            # first_token, the filling included, is an end of a document: a segment of its own before the first one.
            before = [(-1, 0, 1)] if lead else []
            after = [(-1, 0, length + 1 - lead - count)] if lead + count <= length else []
            sample["cu_seqlens"] = cu_seqlens([*before, *parts, *after], length, self.segments)
        return sample

    def _most_segments(self) -> int:
        starts = np.maximum(np.arange(len(self) + 1) * self.sequence_length - 1, 0)
        entries = np.searchsorted(self._ends, starts, side="right")
        return int(np.diff(entries).max()) + 2  # itself, or first_token after, and first_token before


def cu_seqlens(parts: list[Part], length: int, segments: int) -> torch.Tensor:
    """Bounds of the parts (sequence id, first token, tokens) within the first ``length`` tokens, int32 [segments + 1].

    Begins with 0 and ends with ``length``, which fills up what is left; empty segments are legal for every operator.
    """
    bounds = np.full(segments + 1, length, np.int32)
    places = [place for place in _places(parts) if place < length]
    bounds[: len(places)] = places
    return torch.from_numpy(bounds)


def _causal_sample(stream: NDArray[np.int64]) -> Sample:
    return {
        "tokens": torch.from_numpy(stream[:-1]),
        "labels": torch.from_numpy(stream[1:]),
        "loss_weight": torch.ones(len(stream) - 1),
    }


def parts_from(sizes: NDArray, order: NDArray, entry: int, offset: int, count: int) -> list[Part]:
    """(sequence id, first token, tokens) of the next ``count`` tokens from an entry of the order on; none is empty.

    Raises IndexError for a place that is not in the order, or not in its sequence.
    """
    parts = []
    while count:
        sequence = int(order[entry])
        taken = min(count, int(sizes[sequence]) - offset)
        if entry < 0 or sequence < 0 or offset < 0 or taken < 0:
            raise IndexError(f"token {offset:,} of sequence {sequence:,}, entry {entry:,}")
        if taken:
            parts.append((sequence, offset, taken))
        count -= taken
        entry, offset = entry + 1, 0
    return parts


def _places(parts: list[Part]) -> list[int]:
    """Where each part begins in the stream."""
    return [0, *itertools.accumulate(part[2] for part in parts[:-1])]


def read_parts(file: IndexedTokens, parts: list[Part], count: int) -> NDArray[np.int64]:
    """The tokens of the parts in a row, int64 [count]."""
    out = np.empty(count, np.int64)
    for place, (sequence, first, taken) in zip(_places(parts), parts, strict=True):
        out[place : place + taken] = file.read(sequence, first, taken)
    return out
