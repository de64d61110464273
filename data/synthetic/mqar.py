"""Generate multi-query associative recall (MQAR): Arora et al. 2023 (Zoology, arXiv 2312.04927), section 3 and appendix."""

from __future__ import annotations

import numpy as np

from .examples import UNLABELLED, Examples, distinct, weighted_distinct

# Rows drawn together; bounds the temporary memory to 100 MB.
_ROWS = 10_000


def mqar(
    examples: int, length: int, pairs: int, *, vocabulary: int = 8192, power: float = 0.01, seed: int | list[int] = 0
) -> Examples:
    """Return key-value pairs, followed by every key once as a query. The label of a query is its value.

    Keys are distinct ids of 1 .. vocabulary / 2 - 1, values distinct ids of vocabulary / 2 .. vocabulary - 1. The first
    2 * pairs tokens are k1 v1 k2 v2 ... The rest is split into slots of two tokens. Queries go to distinct slots in key order;
    slot s has probability proportional to power (s + 1)^(power - 1). A query and its label are at the first position of the
    slot. All other tokens are 0 and unlabelled.

    Returns tokens and labels, int32 [examples, length]. Raises ValueError for an odd length, 4 * pairs > length, more pairs
    than the vocabulary has ids, and power <= 0.
    """
    if length % 2 or 4 * pairs > length:
        raise ValueError(
            f"length {length} with {pairs} pairs: an even length of at least 4 x pairs = {4 * pairs} is required"
        )
    if pairs < 1 or pairs > vocabulary // 2 - 1:
        raise ValueError(f"{pairs} pairs: a vocabulary of {vocabulary} allows 1 to {vocabulary // 2 - 1} pairs")
    if power <= 0:
        raise ValueError(f"power = {power}: a number above 0 is allowed")
    generator = np.random.default_rng(seed)
    slots = length // 2 - pairs
    weights = power * np.arange(1.0, slots + 1) ** (power - 1)
    tokens = np.zeros((examples, length), np.int32)
    labels = np.full((examples, length), UNLABELLED, np.int32)
    for start in range(0, examples, _ROWS):
        part = slice(start, start + _ROWS)
        rows = len(tokens[part])
        keys = 1 + distinct(generator, rows, pairs, vocabulary // 2 - 1)
        values = vocabulary // 2 + distinct(generator, rows, pairs, vocabulary - vocabulary // 2)
        tokens[part, : 2 * pairs : 2], tokens[part, 1 : 2 * pairs : 2] = keys, values
        query = 2 * pairs + 2 * weighted_distinct(generator, rows, pairs, weights)
        np.put_along_axis(tokens[part], query, keys, 1)
        np.put_along_axis(labels[part], query, values, 1)
    return Examples(tokens, labels)
