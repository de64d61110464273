"""What finding masked tokens is worth without reading: every token guessed from the frequencies of the training text."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from data.indexed import IndexedTokens
from data.tokenizer import Tokenizer

# Frequencies of more text than this move in the fourth digit.
TOKENS = 20_000_000


def unigram_baseline(train: str, validation: str, tokenizer: Tokenizer) -> dict[str, float]:
    """Accuracy and loss of the unigram model of one token file on another; special tokens, never masked, do not count.

    train, validation: prefixes of token files, of which the first `TOKENS` tokens are read.

    Returns:
        accuracy: share of the most frequent training token in the validation text. loss: nats a token under the training
        frequencies, each count plus one. Both NaN where the validation text holds special tokens alone.
    """
    ordinary = np.ones(tokenizer.vocab_size, bool)
    ordinary[[i for i in tokenizer.special_ids if i < tokenizer.vocab_size]] = False
    seen, asked = (_counts(prefix, tokenizer.vocab_size) * ordinary for prefix in (train, validation))
    total = float(asked.sum())
    if not total:
        return {"accuracy": float("nan"), "loss": float("nan")}
    log_share = np.log((seen + 1.0)[ordinary] / (seen + 1.0)[ordinary].sum())
    return {
        "accuracy": float(asked[seen.argmax()]) / total,
        "loss": float(-(asked[ordinary] * log_share).sum() / total),
    }


def _counts(prefix: str, vocab_size: int) -> NDArray[np.int64]:
    file = IndexedTokens(prefix)
    counts = np.zeros(vocab_size, np.int64)
    for tokens in _pieces(file):
        counts += np.bincount(tokens, minlength=vocab_size)
    return counts


def _pieces(file: IndexedTokens) -> Iterable[NDArray]:
    """Its sequences up to `TOKENS` tokens, many at a time."""
    ends = np.cumsum(file.sizes, dtype=np.int64)
    count = min(len(file), int(np.searchsorted(ends, TOKENS)) + 1)
    for first in range(0, count, 1024):
        yield np.concatenate([file[i] for i in range(first, min(first + 1024, count))])
