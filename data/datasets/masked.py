"""Build samples for masked language models from a token file."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from ..cache import cached_arrays, damaged_order
from ..corpus.document_sources import read_sources
from ..indexed import IndexedTokens
from ..tokenizer import Tokenizer
from .causal import Sample, cu_seqlens, padding_span, read_spans, spans_in_order, token_spans
from .masking import IGNORED_LABEL, Masking
from .sample_index import cached_sample_index

ROWS_VERSION = 1
LAYOUTS = ("padded", "packed")
# Documents read at the start; on a cold disk each one costs a read.
_ENDS_CHECKED = 1_000


class MaskedDataset:
    """Return masked samples of one token file.

    layout "padded": one document per row, then padding. The begin token (``[CLS]``, if the tokenizer has one) comes first and
    the end-of-document token (``[SEP]``) last. Long documents take several rows. Every epoch uses each row once, in an order
    that depends on (seed, epoch).
    layout "packed": rows cut from one stream of documents, in one of the orders of `sample_index.py`. With
    ``reset_at_documents``, states and attention are reset at document boundaries.

    num_samples: samples of the run; None reads the file once, in file order (validation).
    sequences: ids to read in validation, in ascending order; None reads all.

    ``ds[i]`` -> {"tokens": int64 [T], "labels": int64 [T], "loss_weight": float32 [T]}. Labels are -100 and loss weights 0 at
    positions that are not predicted. "padded" adds "mask": bool [T], True for real tokens; "packed" with
    ``reset_at_documents`` adds "cu_seqlens" as in CausalDataset; ``sources`` adds "source": int64 [T]. The masked positions
    depend on (seed, epoch, sample): they change per epoch in training and never in validation.

    Raises ValueError for an unknown layout, for samples without room for text, and as `cached_sample_index`.
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
            raise ValueError("sequences can be selected for validation only: set num_samples to None")
        if layout not in LAYOUTS:
            raise ValueError(f"layout {layout!r} of masked samples is unknown; allowed: {', '.join(LAYOUTS)}")
        self.file = IndexedTokens(prefix)
        self.file.vocab_size = tokenizer.vocab_size
        self.masking = masking
        self.sequence_length, self.seed, self.reset_at_documents = sequence_length, seed, reset_at_documents
        self.sources: list[str] = []
        self._source_of: NDArray[np.int16] | None = None
        if sources:
            self.sources, self._source_of = read_sources(prefix, len(self.file))
        self._ids = np.arange(len(self.file)) if sequences is None else sequences
        self.num_tokens = int(self.file.sizes[self._ids].sum(dtype=np.int64))
        self._rows: _Rows | None = None
        self._order: NDArray | None = None
        if layout == "padded":
            self._rows = _Rows(self.file, self._ids, tokenizer, sequence_length)
            self.per_epoch = len(self._rows)
            if self.per_epoch == 0:
                raise ValueError(
                    f"{prefix}: its documents hold only end-of-document tokens; write the token files again from input with text"
                )
            if num_samples is not None:
                epochs = -(-num_samples // self.per_epoch)
                self._order = _shuffled_rows(self.per_epoch, epochs, seed, cache_directory)
            self.length = self.per_epoch if self._order is None else len(self._order)
        elif num_samples is None:
            self._ends = np.cumsum(self.file.sizes[self._ids], dtype=np.int64)
            self.length = self.per_epoch = -(-int(self._ends[-1]) // sequence_length)
            starts = np.searchsorted(self._ends, np.arange(self.length + 1) * sequence_length, side="right")
            self.segments = int(np.diff(starts).max()) + 1  # the last document, or the padding
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
            return self._padded(place, random) if self._rows is not None else self._packed(place, random)
        except IndexError as error:
            if self._order is None:
                raise
            raise damaged_order(self._order, error) from error

    def _padded(self, row_number: int, random: np.random.Generator) -> Sample:
        assert self._rows is not None
        sequence, tokens = self._rows.read(self.file, row_number)
        inputs, labels = self.masking.apply(tokens, random)
        row = np.full((2, self.sequence_length), self._rows.pad_id, np.int64)
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
            spans = spans_in_order(self.file.sizes, self._ids, self._ends, start, count)
        else:
            entry, offset = (int(x) for x in self._index.sample_index[place])
            count = length
            spans = token_spans(self.file.sizes, self._index.document_index, entry, offset, count)
        tokens = np.full(length, 0 if count == length else self._fill)  # a special token, never a label
        tokens[:count] = read_spans(self.file, spans, count)
        inputs, labels = self.masking.apply(tokens, random)
        sample = _masked_sample(inputs, labels)
        if self.reset_at_documents:
            sample["cu_seqlens"] = cu_seqlens([*spans, *padding_span(length - count)], length, self.segments)
        if self._source_of is not None:
            source = np.repeat(self._source_of[[span[0] for span in spans]], [span[2] for span in spans])
            sample["source"] = torch.from_numpy(np.pad(source, (0, length - count)).astype(np.int64))
        return sample


def _all_end_with(token: int, file: IndexedTokens, ids: NDArray[np.int64]) -> bool:
    """Return whether all documents ``ids`` end with this token.

    At most `_ENDS_CHECKED` documents are checked, spread over the file, because a merged file can mix both kinds.
    """
    checked = ids[np.linspace(0, len(ids) - 1, min(len(ids), _ENDS_CHECKED), dtype=np.int64)]
    return all(file[int(i)][-1] == token for i in checked if file.sizes[i])


class _Rows:
    """Split documents into rows. If all documents end with the end token, it is removed there and added to every row."""

    def __init__(self, file: IndexedTokens, ids: NDArray[np.int64], tokenizer: Tokenizer, sequence_length: int) -> None:
        self.ids = ids
        self.begin = [] if tokenizer.begin_id is None else [tokenizer.begin_id]
        self.end = [tokenizer.end_of_document_id]
        self.pad_id = tokenizer.pad_id
        self.capacity = sequence_length - len(self.begin) - 1
        if self.capacity < 1:
            raise ValueError(
                f"samples of {sequence_length} tokens have no room for text between their special tokens; use longer samples"
            )
        has_end = _all_end_with(tokenizer.end_of_document_id, file, ids)
        self.bodies = np.maximum(file.sizes[ids] - int(has_end), 0).astype(np.int64)
        self.ends = np.cumsum(-(-self.bodies // self.capacity))

    def __len__(self) -> int:
        return int(self.ends[-1])

    def read(self, file: IndexedTokens, row_number: int) -> tuple[int, NDArray[np.int64]]:
        """Return the sequence id of a row, and its tokens with special tokens: int64 [at most T]."""
        entry = int(np.searchsorted(self.ends, row_number, side="right"))
        first = (row_number - (int(self.ends[entry - 1]) if entry else 0)) * self.capacity
        count = min(self.capacity, int(self.bodies[entry]) - first)
        sequence = int(self.ids[entry])
        return sequence, np.concatenate([self.begin, file.read(sequence, first, count), self.end]).astype(np.int64)


def _shuffled_rows(count: int, epochs: int, seed: int, cache_directory: str | Path | None) -> NDArray:
    """Return the row numbers 0 to count - 1, shuffled per epoch: [epochs * count]."""
    made_from = {"pieces": ROWS_VERSION, "count": count, "epochs": epochs, "seed": seed}

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
