"""Decide which documents a corpus keeps: quality rules, language, exact and near duplicates.

The first two look at one document and run in the workers. `DuplicateIndex` compares a document with all earlier ones and
runs in the writing process, in reading order.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ..corpus.document_sources import UNKNOWN
from ..corpus.ngrams import ngram_hashes
from ..corpus.readers import Document

if TYPE_CHECKING:
    from .encode import PreprocessingSettings

DIGEST_BYTES = 17  # number of the text key, then digest of the text
PERMUTATIONS = 128
SIGNATURE_BYTES = 4 * PERMUTATIONS
_LANGUAGE_SAMPLE = 10_000  # characters of a document that its language is read from
_ROWS = 1 << 16  # n-grams per MinHash update, 32 MiB of memory

_STOP_WORDS = {"the", "be", "to", "of", "and", "that", "have", "with"}
_BULLET = re.compile(r"\s*[-*•●‣◦▪+]")
_ELLIPSIS = ("...", "…")


@dataclass(frozen=True)
class Filters:
    """Filters of a corpus.

    quality: apply `quality_problem`. languages: ISO 639 codes of the languages to keep; () keeps all.
    near_duplicates: skip a document whose word n-grams have at least this Jaccard similarity with those of a kept one.
    shingle_words: words per n-gram. exclude_sources: sources to leave out; each must occur.
    """

    quality: bool = False
    languages: tuple[str, ...] = ()
    near_duplicates: float | None = None
    shingle_words: int = 5
    exclude_sources: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        threshold = self.near_duplicates
        if threshold is not None and not 0.3 <= threshold <= 0.98:
            raise ValueError(
                f"--near-duplicates {threshold}: 0.3 to 0.98 is allowed, usually 0.8; --deduplicate finds exact repeats"
            )
        if self.languages and (unknown := sorted(set(self.languages) - set(_identifier().labels))):
            raise ValueError(
                f"--languages {','.join(unknown)}: allowed are {', '.join(sorted(_identifier().labels))} "
                "(zxx is text without a language, such as code)"
            )


def document_filter(filters: Filters) -> Callable[[Document], str | None]:
    """Return a function that names the rule by which a document is skipped, or None to keep it."""

    def reason(document: Document) -> str | None:
        text = document.text
        if (source := document.source or UNKNOWN) in filters.exclude_sources:
            return excluded(source)
        if filters.languages and _identifier().classify(text[:_LANGUAGE_SAMPLE])[0] not in filters.languages:
            return "language"
        return quality_problem(text) if filters.quality else None

    return reason


def excluded(source: str) -> str:
    """Return the reason under which documents of an excluded source are counted."""
    return f"source {source}"


def quality_problem(text: str) -> str | None:
    """Return the first rule of Gopher that a text breaks, or None (Rae et al. 2021, arXiv 2112.11446, appendix A.1).

    The limits are the paper's. Of its repetition rules, those for lines and paragraphs are applied. The stop words are
    English; code and tables break several rules.
    """
    words = text.split()
    lines = [line for line in text.splitlines() if line.strip()]
    if not 50 <= len(words) <= 100_000:
        return "quality: number of words"
    count, number_of_lines = len(words), len(lines)
    if not 3 <= sum(map(len, words)) / count <= 10:
        return "quality: word length"
    if max(text.count("#"), sum(map(text.count, _ELLIPSIS))) > 0.1 * count:
        return "quality: symbols"
    if sum(any(map(str.isalpha, word)) for word in words) < 0.8 * count:
        return "quality: words without a letter"
    if len(_STOP_WORDS & {word.strip(".,;:!?\"'()").lower() for word in words}) < 2:
        return "quality: stop words"
    if sum(_BULLET.match(line) is not None for line in lines) > 0.9 * number_of_lines:
        return "quality: bullet lines"
    if sum(line.rstrip().endswith(_ELLIPSIS) for line in lines) > 0.3 * number_of_lines:
        return "quality: lines that end with an ellipsis"
    if _repeated(lines):
        return "quality: repeated lines"
    if _repeated([part for part in re.split(r"\n\s*\n", text) if part.strip()]):
        return "quality: repeated paragraphs"
    return None


def _repeated(parts: Sequence[str]) -> bool:
    """Return whether repeats are over 30 % of the parts, or hold over 20 % of their characters."""
    repeats = [(part, count - 1) for part, count in Counter(map(str.strip, parts)).items() if count > 1]
    characters = sum(len(part) * count for part, count in repeats)
    total = sum(len(part.strip()) for part in parts)
    return sum(count for _, count in repeats) > 0.3 * len(parts) or characters > 0.2 * total


_language_identifier: Any = None


def _identifier() -> Any:
    """Return py3langid's model, loaded once per process."""
    global _language_identifier
    if _language_identifier is None:
        from py3langid.langid import MODEL_FILE, LanguageIdentifier

        _language_identifier = LanguageIdentifier.from_model_file(MODEL_FILE)
    return _language_identifier


def signature(text: str, filters: Filters) -> bytes:
    """Return the MinHash signature of the word n-grams of a text, SIGNATURE_BYTES (Broder, 1997)."""
    return _minhash(ngram_hashes(text, filters.shingle_words)).hashvalues.tobytes()


def _minhash(hashes: Any) -> Any:
    from datasketch import MinHash

    sketch = MinHash(num_perm=PERMUTATIONS, seed=1, scheme="affine32", hashfunc=lambda value: value)
    for start in range(0, len(hashes), _ROWS):
        sketch.update_batch((hashes[start : start + _ROWS] & np.uint64(0xFFFFFFFF)).tolist())
    return sketch


def bands_and_rows(threshold: float) -> tuple[int, int]:
    """Return the bands of locality-sensitive hashing, and the hashes per band, for candidates above a similarity.

    Two documents are candidates if one band agrees, which r hashes do with probability s^r at similarity s. Of pairs at the
    threshold at least 98 % are candidates. `DuplicateIndex` compares whole signatures after that, so others cost only time.
    """
    found = [1 - (1 - threshold**rows) ** (PERMUTATIONS // rows) >= 0.98 for rows in range(1, PERMUTATIONS + 1)]
    rows = found.index(False)
    return PERMUTATIONS // rows, rows


class DuplicateIndex:
    """Remember the kept documents of a job, and find repeats of them.

    A record is DIGEST_BYTES, and with near_duplicates a signature after them. Records restore the index after a kill.
    Near duplicates are candidates of locality-sensitive hashing whose signatures agree in a sufficient share.
    """

    def __init__(self, settings: PreprocessingSettings) -> None:
        self._exact, self._threshold = settings.deduplicate, settings.filters.near_duplicates
        self.record_bytes = DIGEST_BYTES + (SIGNATURE_BYTES if self._threshold else 0)
        self._digests: set[bytes] = set()
        self._signatures: list[bytes] = []
        self._buckets: dict[int, Any] = {}

    def reason(self, record: bytes) -> str | None:
        """Return why a document is a repeat ("repeat", "near repeat"), or None for a new one, which is remembered."""
        if self._exact and record[:DIGEST_BYTES] in self._digests:
            return "repeat"
        return self.add(record, check=True)

    def add(self, record: bytes, *, check: bool = False) -> str | None:
        """Remember a kept document. check: return "near repeat" instead if it is one."""
        if self._threshold:
            sketch = _minhash(())
            sketch.hashvalues = np.frombuffer(record, np.uint32, offset=DIGEST_BYTES)
            buckets = self._buckets_of(record[0])
            if check and any(self._similarity(sketch, other) >= self._threshold for other in buckets.query(sketch)):
                return "near repeat"
            buckets.insert(len(self._signatures), sketch, check_duplication=False)
            self._signatures.append(record[DIGEST_BYTES:])
        if self._exact:
            self._digests.add(record[:DIGEST_BYTES])
        return None

    def _similarity(self, sketch: Any, other: int) -> float:
        return float(np.mean(sketch.hashvalues == np.frombuffer(self._signatures[other], np.uint32)))

    def _buckets_of(self, key: int) -> Any:
        from datasketch import MinHashLSH

        assert self._threshold is not None
        if key not in self._buckets:
            self._buckets[key] = MinHashLSH(num_perm=PERMUTATIONS, params=bands_and_rows(self._threshold))
        return self._buckets[key]
