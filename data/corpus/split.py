"""Which side of a split a document is on, and a sample of documents; both by hash, so that order does not matter."""

from __future__ import annotations

import hashlib
import heapq
from dataclasses import dataclass, field

from .readers import Document


def split_position(document: Document) -> float:
    """A number in [0, 1) that depends on the document alone: on its key, or on its text where it has none.

    Sides of a split are ranges of it, validation first, so a document keeps its side when others are added.
    """
    key = document.text if document.key is None else document.key
    return int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest(), "big") / 2**64


def text_digest(text: str) -> bytes:
    """16 bytes that stand for the text when repeats are looked for."""
    return hashlib.blake2b(text.encode(), digest_size=16).digest()


@dataclass
class TextSample:
    """Keeps at most ``limit`` characters of the texts that are added: those with the largest positions."""

    limit: int
    characters: int = 0
    _heap: list[tuple[float, str]] = field(default_factory=list)

    def add(self, position: float, text: str) -> None:
        heapq.heappush(self._heap, (position, text))
        self.characters += len(text)
        while self.characters > self.limit and len(self._heap) > 1:
            self.characters -= len(heapq.heappop(self._heap)[1])

    def texts(self) -> list[str]:
        """In the order of their positions, so that the same texts give the same list."""
        return [text for _, text in sorted(self._heap)]
