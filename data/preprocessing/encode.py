"""Encode documents as tokens. `prepare_corpus.py` and `pipeline.py` share this step."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from ..corpus.readers import SOURCE_KEY, Block, Document, parse_block
from ..corpus.split import split_position, text_digest
from ..indexed import LONGEST_SEQUENCE, token_dtype
from ..tokenizer import Tokenizer
from .filters import Filters, document_filter, signature


@dataclass(frozen=True)
class PreprocessingSettings:
    """Settings of a preprocessing job.

    keys: text keys; one pair of token files is written per key.
    append_eod: append the end-of-document token to every document. ftfy: repair the text with ftfy.
    split: shares of (train, validation, test) by hash of the text, or () for one output.
    min_characters: shorter documents are skipped.
    deduplicate: keep only the first of equal texts (16 bytes of memory per document and the overhead of Python).
    max_broken: number of lines or files that may fail to parse before the job stops.
    max_empty: maximum fraction of empty documents, checked from 1,000 documents on.
    source_key: key of the source of a record; dots address inner objects.
    filters: quality, language and near-duplicate filters.
    """

    tokenizer_type: str
    tokenizer_path: str | None = None
    keys: tuple[str, ...] = ("text",)
    append_eod: bool = False
    ftfy: bool = False
    split: tuple[float, ...] = ()
    min_characters: int = 0
    deduplicate: bool = False
    max_broken: int = 0
    max_empty: float = 0.5
    source_key: str = SOURCE_KEY
    filters: Filters = field(default_factory=Filters)

    def __post_init__(self) -> None:
        if not self.keys:
            raise ValueError("no text key: set at least one (--jsonl-keys)")
        if named := [key for key in self.keys if "/" in key]:
            raise ValueError(
                f"--jsonl-keys {named[0]}: the key names an output file, so it must not hold a slash; rename the key in the input"
            )
        if self.split and (len(self.split) > 3 or not (min(self.split) >= 0 and 0 < sum(self.split) < math.inf)):
            shares = ",".join(f"{share:g}" for share in self.split)
            raise ValueError(
                f"--split {shares}: up to three numbers from 0 are allowed, not all 0, for train,validation,test, such as 98,1,1"
            )
        if self.ftfy:
            try:
                import ftfy  # noqa: F401
            except ImportError as error:
                raise ValueError("--ftfy needs the package ftfy, which is not installed: pip install ftfy") from error

    def names(self) -> list[str]:
        """Return the name of each output in the file name ``{output_prefix}_{name}_document``."""
        return [f"{side}{key}" for key in self.keys for side in self._sides()]

    def _sides(self) -> list[str]:
        return [f"{side}_" for side in ("train", "validation", "test")[: len(self.split)]] or [""]

    def side_of(self, position: float) -> int:
        """Return 0 (train), 1 (validation) or 2 (test). Validation has the lowest positions, then test, then train."""
        if not self.split:
            return 0
        shares = [*self.split, 0.0, 0.0][:3]
        total = sum(shares)
        if position < shares[1] / total:
            return 1
        return 2 if position < (shares[1] + shares[2]) / total else 0


@dataclass
class Encoded:
    """Encoded documents: their concatenated tokens [sum of lengths], and per document its length, side (0 train,
    1 validation, 2 test), digest (16 bytes), UTF-8 size and source. ``signatures`` is empty without near_duplicates."""

    tokens: NDArray
    lengths: list[int] = field(default_factory=list)
    sides: list[int] = field(default_factory=list)
    digests: list[bytes] = field(default_factory=list)
    signatures: list[bytes] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    sources: list[str | None] = field(default_factory=list)
    skipped: Counter[str] = field(default_factory=Counter)
    broken: list[str] = field(default_factory=list)


def encode_block(block: Block, key: str, settings: PreprocessingSettings, tokenizer: Tokenizer) -> Encoded:
    """Parse and tokenise one block for one text key. Raises ValueError as `parse_block` and `encode_documents`."""
    parsed = parse_block(block, key, settings.source_key)
    skipped, broken = parsed.skipped, parsed.broken
    if skipped.pop("undecodable", 0):
        broken.append(f"{block.file.path}: not text in the encoding that it declares")
    documents, sides = [], []
    problem_of = document_filter(settings.filters)
    for document in parsed.documents:
        if settings.ftfy:
            import ftfy

            document = replace(document, text=ftfy.fix_text(document.text))
        side = settings.side_of(split_position(document))
        if len(document.text) < settings.min_characters:
            skipped["short"] += 1
            continue
        if problem := problem_of(document):
            skipped[problem] += 1
            continue
        documents.append(document)
        sides.append(side)
    filters = settings.filters if settings.filters.near_duplicates else None
    outcome = encode_documents(documents, sides, tokenizer, append_eod=settings.append_eod, near_duplicates=filters)
    outcome.tokens = outcome.tokens.astype(token_dtype(tokenizer.vocab_size))  # less data between processes
    outcome.skipped.update(skipped)
    outcome.broken = broken
    return outcome


def encode_documents(
    documents: Sequence[Document],
    sides: Sequence[int],
    tokenizer: Tokenizer,
    *,
    append_eod: bool,
    keep_empty: bool = False,
    threads: int = 1,
    near_duplicates: Filters | None = None,
) -> Encoded:
    """Tokenise documents, each on its side of the split. Raises ValueError for a document that the format cannot hold.

    sides: side of each document. keep_empty: keep documents without tokens; otherwise they count as skipped.
    threads: threads of the tokenizer. near_duplicates: also compute the signatures of these filters.
    """
    outcome = Encoded(np.zeros(0, np.int64))
    encoded = tokenizer.encode_batch([document.text for document in documents], threads)
    end = [np.array([tokenizer.end_of_document_id])] if append_eod else []
    pieces: list[NDArray] = []
    for document, side, tokens in zip(documents, sides, encoded, strict=True):
        if not (len(tokens) or keep_empty):  # a tokenizer may drop control characters
            outcome.skipped["empty"] += 1
            continue
        length = len(tokens) + len(end)
        if length > LONGEST_SEQUENCE:
            raise ValueError(
                f"{document.path} line {document.position}: a document of {length:,} tokens; the format holds at most"
                f" {LONGEST_SEQUENCE:,} in one. Split the document in the input."
            )
        pieces += [tokens, *end]
        outcome.lengths.append(length)
        outcome.sides.append(side)
        outcome.digests.append(text_digest(document.text))
        if near_duplicates is not None:
            outcome.signatures.append(signature(document.text, near_duplicates))
        outcome.sizes.append(len(document.text.encode()))
        outcome.sources.append(document.source)
    if pieces:
        outcome.tokens = np.concatenate(pieces)
    return outcome
