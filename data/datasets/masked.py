"""Samples for masked language models, from the same token files as causal ones."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from ..cache import cached_arrays, damaged_order
from ..corpus.document_sources import read_sources
from ..indexed import IndexedTokens
from ..tokenizer import Tokenizer
from .causal import Sample, cu_seqlens, parts_from, read_parts
from .masking import IGNORED_LABEL, Masking
from .sample_index import cached_sample_index

PIECES_VERSION = 1
LAYOUTS = ("padded", "packed")
# Documents read at the start, each a wait on a cold disk.
_ENDS_LOOKED_AT = 1_000


class MaskedDataset:
    """Samples of one token file in which a masked language model finds the masked tokens.

    padded: a document, or as much of it as fits, is a sample; the rest of the row is padding. Where the tokenizer has a
    begin token (``[CLS]``), it stands first, and the end of a document (``[SEP]``) last. Longer documents go on in
    further samples. Every epoch takes all of them once, in an order of (seed, epoch).
    packed: the documents are one stream, cut into samples without padding, in one of the orders of `data.sample_index`;
    with ``reset_at_documents`` nothing crosses from one document into the next.

    num_samples: how many samples the run will take; None for validation: the file once, in its own order.
    sequences: ids to read in validation, in ascending order; all by default.

    ``ds[i]`` -> {"tokens": int64 [T], "labels": int64 [T], -100 where nothing is to be found, "loss_weight": float32 [T], 1
    where something is}, padded with "mask": bool [T], True for real tokens, packed with "cu_seqlens" as in CausalDataset,
    and with ``sources`` "source" int64 [T]. The masks depend on (seed, epoch, sample): a sample's differ from epoch to
    epoch, and those of a validation set never.

    Raises ValueError for an unknown layout, samples that have no room for text, and as `cached_sample_index`.
    """

    def __init__(
        self,
        prefix: str | Path,
        masking: Masking,
        tokenizer: Tokenizer,
        *,
        sequence_length: int,
        num_samples: int | None,
        seed: int,
        layout: str = "padded",
        order: str = "reshuffle",
        reset_at_documents: bool = False,
        sources: bool = False,
        sequences: NDArray[np.int64] | None = None,
        cache_directory: str | Path | None = None,
    ) -> None:
        if sequences is not None and num_samples is not None:
            raise ValueError("some of the sequences are for validation only (num_samples None)")
        if layout not in LAYOUTS:
            raise ValueError(f"layout {layout!r} of masked samples is unknown; allowed: {', '.join(LAYOUTS)}")
        self.file = IndexedTokens(prefix)
        self.masking = masking
        self.sequence_length, self.seed, self.reset_at_documents = sequence_length, seed, reset_at_documents
        self.sources: list[str] = []
        self._source_of: NDArray[np.int16] | None = None
        if sources:
            self.sources, self._source_of = read_sources(prefix, len(self.file))
        self._ids = np.arange(len(self.file)) if sequences is None else sequences
        self.num_tokens = int(self.file.sizes[self._ids].sum(dtype=np.int64))
        self._pieces: _Pieces | None = None
        self._order: NDArray | None = None
        if layout == "padded":
            self._pieces = _Pieces(self.file, self._ids, tokenizer, sequence_length)
            self.per_epoch = len(self._pieces)
            if self.per_epoch == 0:
                raise ValueError(f"{prefix}: its documents hold nothing but their end")
            if num_samples is not None:
                epochs = -(-num_samples // self.per_epoch)
                self._order = _shuffled_pieces(self.per_epoch, epochs, seed, cache_directory)
            self.length = self.per_epoch if self._order is None else len(self._order)
        elif num_samples is None:
            self._ends = np.cumsum(self.file.sizes[self._ids], dtype=np.int64)
            self.length = self.per_epoch = -(-int(self._ends[-1]) // sequence_length)
            starts = np.searchsorted(self._ends, np.arange(self.length + 1) * sequence_length, side="right")
            self.segments = int(np.diff(starts).max()) + 1  # itself, or the filling
            self._fill = tokenizer.end_of_document_id
        else:
            self._index, epochs = cached_sample_index(
                self.file,
                sequence_length=sequence_length,
                num_samples=num_samples,
                seed=seed,
                order=order,
                cache_directory=cache_directory,
            )
            self.length = len(self._index.shuffle_index)
            self.per_epoch = -(-self.length // epochs)
            self.segments = int(self._index.most_segments[0])
            self._order = self._index.shuffle_index

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, number: int) -> Sample:
        if not 0 <= number < self.length:
            raise IndexError(f"sample {number} of {self.length}")
        place = number if self._order is None else int(self._order[number])
        random = np.random.default_rng([self.seed, number // self.per_epoch, place])
        try:
            return self._padded(place, random) if self._pieces is not None else self._packed(place, random)
        except IndexError as error:
            if self._order is None:
                raise
            raise damaged_order(self._order, error) from error

    def _padded(self, piece: int, random: np.random.Generator) -> Sample:
        assert self._pieces is not None
        sequence, tokens = self._pieces.read(self.file, piece)
        inputs, labels = self.masking.apply(tokens, random)
        row = np.full((2, self.sequence_length), self._pieces.pad_id, np.int64)
        row[1] = IGNORED_LABEL
        row[0, : len(tokens)], row[1, : len(tokens)] = inputs, labels
        sample = _masked_sample(row[0], row[1])
        sample["mask"] = torch.arange(self.sequence_length) < len(tokens)
        if self._source_of is not None:
            sample["source"] = torch.full((self.sequence_length,), int(self._source_of[sequence]))
        return sample

    def _packed(self, place: int, random: np.random.Generator) -> Sample:
        length = self.sequence_length
        if self._order is None:
            start = place * length
            count = min(length, int(self._ends[-1]) - start)
            entry = int(np.searchsorted(self._ends, start, side="right"))
            offset = start - (int(self._ends[entry - 1]) if entry else 0)
            parts = parts_from(self.file.sizes, self._ids, entry, offset, count)
        else:
            entry, offset = (int(x) for x in self._index.sample_index[place])
            count = length
            parts = parts_from(self.file.sizes, self._index.document_index, entry, offset, count)
        tokens = np.full(length, 0 if count == length else self._fill)  # a special token, of which none is a label
        tokens[:count] = read_parts(self.file, parts, count)
        inputs, labels = self.masking.apply(tokens, random)
        sample = _masked_sample(inputs, labels)
        if self.reset_at_documents:
            filling = [(-1, 0, length - count)] if count < length else []
            sample["cu_seqlens"] = cu_seqlens([*parts, *filling], length, self.segments)
        if self._source_of is not None:
            source = np.repeat(self._source_of[[part[0] for part in parts]], [part[2] for part in parts])
            sample["source"] = torch.from_numpy(np.pad(source, (0, length - count)).astype(np.int64))
        return sample


def _all_end_with(token: int, file: IndexedTokens, ids: NDArray[np.int64]) -> bool:
    """Whether these documents do. Of many so many are looked at, from first to last: a merged file's parts may differ."""
    looked_at = ids[np.linspace(0, len(ids) - 1, min(len(ids), _ENDS_LOOKED_AT), dtype=np.int64)]
    return all(file[int(i)][-1] == token for i in looked_at if file.sizes[i])


class _Pieces:
    """Documents cut into what fits a row. A document's own end token is taken off, where all have one, and put behind every
    piece."""

    def __init__(self, file: IndexedTokens, ids: NDArray[np.int64], tokenizer: Tokenizer, sequence_length: int) -> None:
        self.ids = ids
        self.begin = [] if tokenizer.begin_id is None else [tokenizer.begin_id]
        self.end = [tokenizer.end_of_document_id]
        self.pad_id = tokenizer.pad_id
        self.room = sequence_length - len(self.begin) - 1
        if self.room < 1:
            raise ValueError(f"samples of {sequence_length} tokens have no room for text between their special tokens")
        ended = _all_end_with(tokenizer.end_of_document_id, file, ids)
        self.bodies = np.maximum(file.sizes[ids] - int(ended), 0).astype(np.int64)
        self.ends = np.cumsum(-(-self.bodies // self.room))

    def __len__(self) -> int:
        return int(self.ends[-1])

    def read(self, file: IndexedTokens, piece: int) -> tuple[int, NDArray[np.int64]]:
        """The sequence that a piece is from, and its tokens with the special ones [at most T]."""
        entry = int(np.searchsorted(self.ends, piece, side="right"))
        first = (piece - (int(self.ends[entry - 1]) if entry else 0)) * self.room
        count = min(self.room, int(self.bodies[entry]) - first)
        sequence = int(self.ids[entry])
        return sequence, np.concatenate([self.begin, file.read(sequence, first, count), self.end]).astype(np.int64)


def _shuffled_pieces(count: int, epochs: int, seed: int, cache_directory: str | Path | None) -> NDArray:
    """Numbers of so many pieces, shuffled epoch by epoch: [epochs * count]."""
    made_from = {"pieces": PIECES_VERSION, "count": count, "epochs": epochs, "seed": seed}

    def build() -> dict[str, NDArray]:
        dtype = np.uint32 if count < 2**32 else np.int64
        orders = [np.random.default_rng([seed, epoch]).permutation(count).astype(dtype) for epoch in range(epochs)]
        return {"order": np.concatenate(orders)}

    return cached_arrays(cache_directory, "pieces", made_from, build)["order"]


def _masked_sample(inputs: NDArray[np.int64], labels: NDArray[np.int64]) -> Sample:
    return {
        "tokens": torch.from_numpy(inputs),
        "labels": torch.from_numpy(labels),
        "loss_weight": torch.from_numpy((labels != IGNORED_LABEL).astype(np.float32)),
    }
