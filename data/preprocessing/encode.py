"""Documents to tokens: the part of preprocessing that every path from a corpus to token files shares."""

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


@dataclass(frozen=True)
class Recipe:
    """What to make of a corpus.

    keys: one pair of token files is written for each. split: shares of (train, validation, test) by hash of the text,
    or () for one output. min_characters: shorter documents are skipped. deduplicate: of equal texts the first is kept
    (16 bytes of memory a document and Python's overhead). max_broken: how many lines may fail to parse, or files be in
    another encoding, before the job stops; they are counted. max_empty: the share of the documents that may be empty, of
    a thousand or more. source_key: where a record names its source, with dots into inner objects.
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

    def __post_init__(self) -> None:
        if not self.keys:
            raise ValueError("no key to read the text from: give at least one")
        if self.split and (len(self.split) > 3 or not (min(self.split) >= 0 and 0 < sum(self.split) < math.inf)):
            raise ValueError(f"split {self.split} must be up to three shares, train,validation,test, such as 98,1,1")
        if self.ftfy:
            try:
                import ftfy  # noqa: F401
            except ImportError as error:
                raise ValueError("--ftfy needs the package ftfy, which is not installed: pip install ftfy") from error

    def names(self) -> list[str]:
        """The outputs, as they stand in file names: ``{output_prefix}_{name}_document``."""
        return [f"{side}{key}" for key in self.keys for side in self._sides()]

    def _sides(self) -> list[str]:
        return [f"{side}_" for side in ("train", "validation", "test")[: len(self.split)]] or [""]

    def side_of(self, position: float) -> int:
        """0 train, 1 validation, 2 test. Validation takes the lowest positions, then test, then train."""
        if not self.split:
            return 0
        shares = [*self.split, 0.0, 0.0][:3]
        total = sum(shares)
        if position < shares[1] / total:
            return 1
        return 2 if position < (shares[1] + shares[2]) / total else 0


@dataclass
class Encoded:
    """Hold some documents as tokens: ``tokens`` of all in a row, and for each its length, side (0 train, 1 validation,
    2 test), digest (16 bytes), UTF-8 size and source."""

    tokens: NDArray
    lengths: list[int] = field(default_factory=list)
    sides: list[int] = field(default_factory=list)
    digests: list[bytes] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    sources: list[str | None] = field(default_factory=list)
    skipped: Counter[str] = field(default_factory=Counter)
    broken: list[str] = field(default_factory=list)


def encode_block(block: Block, key: str, recipe: Recipe, tokenizer: Tokenizer) -> Encoded:
    """Parse and tokenise one block for one key."""
    parsed = parse_block(block, key, recipe.source_key)
    skipped, broken = parsed.skipped, parsed.broken
    if skipped.pop("undecodable", 0):
        broken.append(f"{block.file.path}: not text in the encoding that it declares")
    documents, sides = [], []
    for document in parsed.documents:
        side = recipe.side_of(split_position(document))
        if recipe.ftfy:
            import ftfy

            document = replace(document, text=ftfy.fix_text(document.text))
        if len(document.text) < recipe.min_characters:
            skipped["short"] += 1
            continue
        documents.append(document)
        sides.append(side)
    outcome = encode_documents(documents, sides, tokenizer, append_eod=recipe.append_eod)
    outcome.tokens = outcome.tokens.astype(token_dtype(tokenizer.vocab_size))  # smaller between processes
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
) -> Encoded:
    """Tokenise documents, each on its side of the split. Raises ValueError for a document that the format cannot hold.

    keep_empty: keep a document without tokens; else it is counted as skipped.
    """
    outcome = Encoded(np.zeros(0, np.int64))
    encoded = tokenizer.encode_batch([document.text for document in documents], threads)
    end = [np.array([tokenizer.end_of_document_id])] if append_eod else []
    pieces: list[NDArray] = []
    for document, side, tokens in zip(documents, sides, encoded, strict=True):
        if not (len(tokens) or keep_empty):  # control characters alone, which a tokenizer may leave out
            outcome.skipped["empty"] += 1
            continue
        length = len(tokens) + len(end)
        if length > LONGEST_SEQUENCE:
            raise ValueError(
                f"{document.path} line {document.position}: a document of {length:,} tokens; the format holds at most"
                f" {LONGEST_SEQUENCE:,} in one. Cut the document before this step."
            )
        pieces += [tokens, *end]
        outcome.lengths.append(length)
        outcome.sides.append(side)
        outcome.digests.append(text_digest(document.text))
        outcome.sizes.append(len(document.text.encode()))
        outcome.sources.append(document.source)
    if pieces:
        outcome.tokens = np.concatenate(pieces)
    return outcome
