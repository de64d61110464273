"""Build packed samples for causal language models from a token file.

`CausalDataset` (training) uses the sample orders of `sample_index.py`. `SequentialDataset` (validation) reads the file once.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ..cache import damaged_order
from ..corpus.document_sources import read_sources
from ..indexed import IndexedTokens
from .best_fit import BestFitIndex, cached_best_fit_index
from .sample_index import PACKINGS, SampleIndex, TokenSpan, cached_sample_index

Sample = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Packing:
    """Select how documents fill samples, and which document boundaries and sources a sample includes.

    reset_at_documents: add ``cu_seqlens``, so that states and attention are reset at document boundaries.
    mask_boundaries: set the loss weight of the first token of each document to 0.
    sources: add ``source``, the index of the source of each label in ``dataset.sources``.
    method: "stream" cuts samples from one stream of documents; "best_fit" keeps documents whole (see `best_fit.py`).
    """

    reset_at_documents: bool = False
    mask_boundaries: bool = False
    sources: bool = False
    method: str = "stream"

    def __post_init__(self) -> None:
        if self.method not in PACKINGS:
            raise ValueError(f"packing {self.method!r} is unknown; allowed: {', '.join(PACKINGS)}")


class CausalDataset:
    """Return packed training samples of one token file.

    prefix: path of the token file without extension.
    num_samples: samples of the run, which determines the number of epochs.
    order: "neox" or "reshuffle" (see `sample_index.py`); "reshuffle" with best-fit packing.
    min_tokens: documents with fewer tokens are left out.
    cache_directory: folder of the cached index; None keeps it in memory.

    ``ds[i]`` -> {"tokens": int64 [T], "labels": int64 [T], "loss_weight": float32 [T]}. Labels are the tokens shifted by one.
    With ``reset_at_documents`` also "cu_seqlens" int32 [segments + 1]: 0, the starts of further documents, then T repeated to
    a fixed length. With ``sources`` also "source" int64 [T]. Each sequence of the file counts as a document. Labels have weight
    0 in padding, and at the first token of a cut document's piece, which the previous piece predicts.
    Raises ValueError as `cached_sample_index`, and for best-fit packing in the order "neox".
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
        min_tokens: int = 0,
        cache_directory: str | Path | None = None,
    ) -> None:
        if sequence_length < 1 or num_samples < 1:
            raise ValueError(f"sequence_length {sequence_length} and num_samples {num_samples} must be 1 or more")
        self.file = IndexedTokens(prefix)
        self.sequence_length = sequence_length
        self.packing = packing
        settings: dict[str, Any] = {
            "sequence_length": sequence_length,
            "num_samples": num_samples,
            "seed": seed,
            "min_tokens": min_tokens,
            "cache_directory": cache_directory,
        }
        self.index: SampleIndex | BestFitIndex
        if packing.method == "stream":
            self.index, self.epochs = cached_sample_index(self.file, order=order, **settings)
        elif order == "reshuffle":
            self.index = cached_best_fit_index(self.file, **settings)
            self.epochs = int(self.index.epochs[0])
        else:
            raise ValueError(f"order {order!r} with packing {packing.method!r}: reshuffle is allowed")
        self.segments = int(self.index.most_segments[0])
        self.sources: list[str] = []
        self._source_of: NDArray[np.int16] | None = None
        if packing.sources:
            self.sources, self._source_of = read_sources(prefix, len(self.file))

    def __len__(self) -> int:
        return len(self.index)

    def __getitem__(self, number: int) -> Sample:
        if not 0 <= number < len(self):
            raise IndexError(f"sample {number} of {len(self)}")
        spans = self.spans_of_sample(number)
        length, count = self.sequence_length, sum(span[2] for span in spans)
        padding = length + 1 - count
        sample = _causal_sample(np.pad(read_spans(self.file, spans, count), (0, padding)))
        if self.packing.reset_at_documents:
            sample["cu_seqlens"] = cu_seqlens([*spans, *padding_span(padding)], length, self.segments)
        # The first label of every span except the first follows another document or piece.
        starts = zip(_span_starts(spans), spans, strict=True)
        masked = [place - 1 for place, span in starts if place and (self.packing.mask_boundaries or span[1])]
        sample["loss_weight"][masked] = 0.0
        sample["loss_weight"][count - 1 :] = 0.0
        if self._source_of is not None:
            source = np.repeat(self._source_of[[span[0] for span in spans]], [span[2] for span in spans])[1:]
            sample["source"] = torch.from_numpy(np.pad(source, (0, padding)).astype(np.int64))
        return sample

    def join_sources(self, names: Sequence[str]) -> None:
        """Renumber the sources by ``names``, which must include all sources of this file. A blend shares one list."""
        if self._source_of is not None:
            self._source_of = np.array([names.index(name) for name in self.sources], np.int16)[self._source_of]
            self.sources = list(names)

    def spans_of_sample(self, number: int) -> list[TokenSpan]:
        """Return the token spans of sample ``number``. Raises DamagedDataError if the sample order is damaged."""
        if isinstance(self.index, BestFitIndex):
            return self.index.spans(self.file.sizes, number, self.sequence_length)
        try:
            entry, offset = (int(x) for x in self.index.sample_index[int(self.index.shuffle_index[number])])
            return token_spans(self.file.sizes, self.index.document_index, entry, offset, self.sequence_length + 1)
        except IndexError as error:
            raise damaged_order(self.index.sample_index, error) from error


class SequentialDataset:
    """Return every token of a file exactly once as a label, in file order (validation).

    The stream is ``first_token`` (the end-of-document id) followed by all tokens, so the first token of the file is a label
    too. The last sample is padded with ``first_token`` with loss_weight 0. Samples are as in CausalDataset, with
    ``cu_seqlens`` if ``reset_at_documents``.

    sequences: ids to read, in ascending order; None reads all.
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
        begin = max(number * length - 1, 0)  # the token before the first label, if there is one
        count = min((number + 1) * length, self.num_tokens) - begin
        spans = spans_in_order(self.file.sizes, self._order, self._ends, begin, count)
        stream = np.full(length + 1, self.first_token, np.int64)
        lead = int(number == 0)
        stream[lead : lead + count] = read_spans(self.file, spans, count)
        sample = _causal_sample(stream)
        sample["loss_weight"][lead + count - 1 :] = 0.0
        if self.reset_at_documents:
            # first_token and the padding end a document, so they are segments of their own.
            first = [(-1, 0, 1)] if lead else []
            sample["cu_seqlens"] = cu_seqlens(
                [*first, *spans, *padding_span(length + 1 - lead - count)], length, self.segments
            )
        return sample

    def _most_segments(self) -> int:
        starts = np.maximum(np.arange(len(self) + 1) * self.sequence_length - 1, 0)
        entries = np.searchsorted(self._ends, starts, side="right")
        return int(np.diff(entries).max()) + 2  # the last document or padding, and first_token


def cu_seqlens(spans: list[TokenSpan], length: int, segments: int) -> torch.Tensor:
    """Return the bounds of the token spans within the first ``length`` tokens: int32 [segments + 1].

    The first bound is 0. ``length`` fills the remaining entries; every operator accepts empty segments.
    """
    bounds = np.full(segments + 1, length, np.int32)
    places = [place for place in _span_starts(spans) if place < length]
    bounds[: len(places)] = places
    return torch.from_numpy(bounds)


def padding_span(count: int) -> list[TokenSpan]:
    """Return ``count`` tokens of padding as a span of their own; no span for 0."""
    return [(-1, 0, count)] if count else []


def _causal_sample(stream: NDArray[np.int64]) -> Sample:
    return {
        "tokens": torch.from_numpy(stream[:-1]),
        "labels": torch.from_numpy(stream[1:]),
        "loss_weight": torch.ones(len(stream) - 1),
    }


def token_spans(sizes: NDArray, order: NDArray, entry: int, offset: int, count: int) -> list[TokenSpan]:
    """Return the non-empty token spans of ``count`` tokens that begin at ``offset`` in the sequence ``order[entry]``.

    sizes: int32 [N], tokens per sequence. Raises IndexError for a position outside of the order or of its sequence.
    """
    spans = []
    while count:
        sequence = int(order[entry])
        taken = min(count, int(sizes[sequence]) - offset)
        if entry < 0 or sequence < 0 or offset < 0 or taken < 0:
            raise IndexError(f"token {offset:,} of sequence {sequence:,}, entry {entry:,}")
        if taken:
            spans.append((sequence, offset, taken))
        count -= taken
        entry, offset = entry + 1, 0
    return spans


def spans_in_order(sizes: NDArray, order: NDArray, ends: NDArray[np.int64], begin: int, count: int) -> list[TokenSpan]:
    """Return the token spans of the tokens [begin, begin + count) of the sequences ``order``, one after the other.

    ends: int64 [sequences], the cumulative sizes of the sequences ``order``.
    """
    entry = int(np.searchsorted(ends, begin, side="right"))
    return token_spans(sizes, order, entry, begin - (int(ends[entry - 1]) if entry else 0), count)


def _span_starts(spans: list[TokenSpan]) -> list[int]:
    """Return the start of each span in the sample."""
    return [0, *itertools.accumulate(span[2] for span in spans[:-1])]


def read_spans(file: IndexedTokens, spans: list[TokenSpan], count: int) -> NDArray[np.int64]:
    """Return the concatenated tokens of the spans: int64 [count]."""
    out = np.empty(count, np.int64)
    for place, (sequence, first, taken) in zip(_span_starts(spans), spans, strict=True):
        out[place : place + taken] = file.read(sequence, first, taken)
    return out
