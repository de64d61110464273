"""Split and sample documents by hash, independently of their order."""

from __future__ import annotations

import hashlib
import heapq
from dataclasses import dataclass, field

from .readers import Document


def split_position(document: Document) -> float:
    """Return a number in [0, 1): the hash of the key of the document, or of its text if it has no key.

    Each side of a split is a range of this number, validation first. So a document keeps its side when others are added.
    """
    key = document.text if document.key is None else document.key
    return int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest(), "big") / 2**64


def text_digest(text: str) -> bytes:
    """Return a 16-byte digest of the text, to detect duplicates."""
    return hashlib.blake2b(text.encode(), digest_size=16).digest()


@dataclass
class TextSample:
    """Keep at most ``limit`` characters of the added texts: those with the largest positions."""

    limit: int
    characters: int = 0
    _heap: list[tuple[float, str]] = field(default_factory=list)

    def add(self, position: float, text: str) -> None:
        """Add a text at its `split_position`, and drop the texts with the smallest positions above the limit."""
        heapq.heappush(self._heap, (position, text))
        self.characters += len(text)
        while self.characters > self.limit and len(self._heap) > 1:
            self.characters -= len(heapq.heappop(self._heap)[1])

    def texts(self) -> list[str]:
        """Return the texts in the order of their positions, which does not depend on the order of addition."""
        return [text for _, text in sorted(self._heap)]
