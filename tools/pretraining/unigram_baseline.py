"""Compute the baseline of masked language models: predict every token from the token frequencies of the training text."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from data.datasets.masking import ordinary_ids
from data.indexed import IndexedTokens
from data.tokenizer import Tokenizer

# More text changes the frequencies only in the fourth digit.
TOKENS = 20_000_000


def unigram_baseline(train: str, validation: str, tokenizer: Tokenizer) -> dict[str, float]:
    """Return accuracy and loss of the unigram model of one token file on another. Special tokens are never masked or counted.

    train, validation: prefixes of token files, of which the first `TOKENS` tokens are read.

    Returns:
        accuracy: share of the most frequent training token in the validation text. loss: nats per token under the training
        frequencies with add-one smoothing. Both are NaN if the validation text holds only special tokens.
    """
    ordinary = ordinary_ids(tokenizer)
    training, target = (_counts(prefix, tokenizer.vocab_size) * ordinary for prefix in (train, validation))
    total = float(target.sum())
    if not total:
        return {"accuracy": float("nan"), "loss": float("nan")}
    smoothed = training[ordinary] + 1.0
    log_share = np.log(smoothed / smoothed.sum())
    return {
        "accuracy": float(target[training.argmax()]) / total,
        "loss": float(-(target[ordinary] * log_share).sum() / total),
    }


def _counts(prefix: str, vocab_size: int) -> NDArray[np.int64]:
    """Return how often each token occurs in the first sequences of a file, up to `TOKENS` tokens."""
    file = IndexedTokens(prefix)
    counts = np.zeros(vocab_size, np.int64)
    count = min(len(file), int(np.searchsorted(np.cumsum(file.sizes, dtype=np.int64), TOKENS)) + 1)
    for first in range(0, count, 1024):
        tokens = np.concatenate([file[i] for i in range(first, min(first + 1024, count))])
        counts += np.bincount(tokens, minlength=vocab_size)
    return counts
