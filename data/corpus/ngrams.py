"""Hash the word n-grams of a text, to find documents that share text."""

from __future__ import annotations

import re
import zlib

import numpy as np
from numpy.typing import NDArray

_WORD = re.compile(r"\w+")
_FACTOR = np.uint64(0x9E3779B97F4A7C15)  # odd, so that the product keeps every bit


def ngram_hashes(text: str, words: int) -> NDArray[np.uint64]:
    """Return the different hashes of all runs of ``words`` words, sorted: uint64 [n-grams].

    Case and punctuation do not count. A text with fewer words, or without a word, is one n-gram.
    """
    parts = _WORD.findall(text.lower()) or [text]
    hashes = np.array([zlib.crc32(part.encode()) for part in parts], np.uint64)
    size = min(words, len(hashes))
    total = np.zeros(len(hashes) - size + 1, np.uint64)
    for place in range(size):
        total = total * _FACTOR + hashes[place : place + len(total)]
    # The sum is linear in the hashes; the last step mixes its bits.
    total ^= total >> np.uint64(29)
    return np.unique(total * _FACTOR)
