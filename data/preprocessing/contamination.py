"""Find held-out documents that are in the training text: equal ones, and those that share most of their word n-grams."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ..corpus.document_sources import read_sources
from ..corpus.ngrams import ngram_hashes
from ..corpus.split import text_digest
from ..indexed import IndexedTokens
from ..manifest import manifest_tokenizer
from ..progress import ProgressBar

WORDS = 13  # per n-gram, as GPT-3's filter (Brown et al., 2005.14165, appendix C)
SHARE = 0.5


@dataclass(frozen=True)
class SharedDocument:
    """A held-out document that training has seen. share: part of its n-grams that the training text holds; 1 for an equal one."""

    number: int
    source: str
    beginning: str
    ngrams: int
    share: float
    equal: bool

    def __str__(self) -> str:
        overlap = "equals a training document" if self.equal else f"{self.share:.0%} of its {self.ngrams:,} n-grams"
        return f"document {self.number} ({self.source}, {self.beginning!r}): {overlap}"


def shared_documents(
    held_out: str | Path,
    training: Sequence[str | Path],
    *,
    words: int = WORDS,
    share: float = SHARE,
) -> list[SharedDocument]:
    """Return the documents of a held-out token file that the training token files hold, the largest share first.

    A document is shared if it equals a training document, or if at least ``share`` of its ``words``-word n-grams occur in
    training. Case and punctuation do not count. Memory: about 9 bytes per n-gram of the held-out text.

    Raises ValueError for token files without a manifest, which names the tokenizer.
    """
    hashes, digests, beginnings = [], [], []
    for text in document_texts(held_out):
        hashes.append(ngram_hashes(text, words))
        digests.append(text_digest(text))
        beginnings.append(" ".join(text[:200].split())[:60])
    if not hashes:
        return []
    known = np.unique(np.concatenate(hashes))
    seen, equal, wanted = np.zeros(len(known), bool), set(), set(digests)
    for prefix in training:
        for text in document_texts(prefix):
            if (digest := text_digest(text)) in wanted:
                equal.add(digest)
            grams = ngram_hashes(text, words)
            places = np.minimum(np.searchsorted(known, grams), len(known) - 1)
            seen[places[known[places] == grams]] = True
    names, ids = read_sources(held_out, len(digests))
    results = [
        SharedDocument(
            number,
            names[ids[number]],
            beginnings[number],
            len(grams),
            float(seen[np.searchsorted(known, grams)].mean()),
            digests[number] in equal,
        )
        for number, grams in enumerate(hashes)
    ]
    return sorted(
        (result for result in results if result.equal or result.share >= share),
        key=lambda result: (-result.equal, -result.share, result.number),
    )


def document_texts(prefix: str | Path) -> Iterator[str]:
    """Yield the text of each sequence of a token file, without the end-of-document token. Raises as `shared_documents`."""
    file = IndexedTokens(prefix)
    tokenizer = manifest_tokenizer(prefix)
    if tokenizer is None:
        raise ValueError(
            f"{prefix}.json does not exist, so the tokenizer of {prefix} is unknown: write the token files with "
            "python -m tools.preprocess_data"
        )
    for number in ProgressBar(range(len(file)), desc=Path(prefix).name, unit="document"):
        ids = file[number]
        yield tokenizer.decode(ids[ids != tokenizer.end_of_document_id].tolist())
