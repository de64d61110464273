"""The six tasks of MAD: Poli et al. 2024 (Mechanistic Design and Scaling of Hybrid Architectures, arXiv 2403.17844).

A function gives `examples` rows of a task. Recall tasks are trained on every next token and tested where the context
alone tells the answer (`training` says which); the other tasks are trained and tested alike.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from .examples import UNLABELLED, Examples, distinct

Flags = NDArray[np.bool_]
Numbers = NDArray[np.int64]


def in_context_recall(
    examples: int,
    *,
    vocabulary: int = 16,
    length: int = 128,
    noise_vocabulary: int = 0,
    noise: float = 0.0,
    training: bool = True,
    seed: int | list[int] = 0,
) -> Examples:
    """Pairs k v k v ...: keys from the lower half of the ids, and for every key of a row one value from the upper half.

    length / 2 pairs, the last of a key that was shown; the model sees all tokens but the last. Tested at every key that
    was shown before. With `noise`, that share of the pairs is two of `noise_vocabulary` ids, which are the highest; one
    pair at least is not ("noisy recall"). Rows of length - 1. ValueError for an odd length, and for noise without ids.
    """
    if length % 2 or length < 4:
        raise ValueError(f"length {length}: an even number of at least 4")
    if noise and not noise_vocabulary:
        raise ValueError(f"noise = {noise} needs ids of its own: set noise_vocabulary")
    generator = np.random.default_rng(seed)
    plain = vocabulary - noise_vocabulary
    keys, pairs = plain // 2, length // 2 - 1
    row = np.arange(examples)
    values = generator.integers(keys, plain, (examples, keys))
    key = generator.integers(0, keys, (examples, pairs + 1))
    kept = generator.random((examples, pairs)) >= noise
    kept[row, generator.integers(0, pairs, examples)] = True
    shown = np.zeros((examples, keys), bool)
    at, pair = np.nonzero(kept)
    shown[at, key[at, pair]] = True
    # Of the keys that were shown each is as likely to be the last, however often it was.
    key[:, pairs] = np.where(shown, generator.random((examples, keys)), -1.0).argmax(1)
    tokens = np.stack([key, values[row[:, None], key]], 2)
    if noise:
        noisy = generator.integers(plain, vocabulary, (examples, pairs, 2))
        tokens[:, :pairs] = np.where(kept[:, :, None], tokens[:, :pairs], noisy)
        key[:, :pairs][~kept] = -1
    asked = np.zeros((examples, length), bool)
    asked[:, 1::2] = _shown_before(key, keys)
    return _next_tokens(tokens.reshape(examples, length), None if training else asked)


def fuzzy_recall(
    examples: int,
    *,
    vocabulary: int = 16,
    length: int = 128,
    motif: int = 3,
    training: bool = True,
    seed: int | list[int] = 0,
) -> Examples:
    """In-context recall with keys of 1 to `motif` different tokens, when tested always `motif`, and values of 1 to `motif`.

    The last pair was shown somewhere before. What is missing to `length` tokens is filled on the left with the highest
    id. Tested at every token of a value whose key was shown before. ValueError where the ids do not suffice for a motif,
    or the length for three pairs.
    """
    keys = (vocabulary - 1) // 2
    if motif > keys or length <= 6 * motif:
        raise ValueError(
            f"motif = {motif}: as many different ids are needed for a key (a vocabulary of {vocabulary} has {keys}), and a "
            f"length (now {length}) of more than {6 * motif}"
        )
    generator = np.random.default_rng(seed)

    def draw(sizes: Numbers, first: int, count: int) -> Numbers:
        """[examples, motif] different ids, -1 after each row's size."""
        ids = first + distinct(generator, examples, motif, count)
        return np.where(np.arange(motif) < sizes[:, None], ids, -1)

    def pair() -> tuple[Numbers, Numbers]:
        sizes = generator.integers(1, motif + 1, (2, examples))
        if not training:
            sizes[0] = motif
        return draw(sizes[0], 0, keys), draw(sizes[1], keys, vocabulary - 1 - keys)

    last_key, last_value = pair()
    last_size = _size(last_key) + _size(last_value)
    limit = length - last_size - 2 * motif
    place = generator.integers(0, np.minimum(limit - 2 * motif + 1, length - 2 * last_size))
    tokens = np.full((examples, length + 1), vocabulary - 1)
    asked = np.zeros(tokens.shape, bool)
    end = np.zeros(examples, np.int64)
    last_shown = np.zeros(examples, bool)
    # Every pair so far: its key as one number, and its value.
    codes = np.empty((examples, length // 2), np.int32)
    values = np.empty((examples, length // 2, motif), np.int64)
    for count in range(length // 2):
        if not (going := end < limit).any():
            break
        key, value = pair()
        now = (going & ~last_shown & (end >= place)) | (key == last_key).all(1)
        key, value = np.where(now[:, None], last_key, key), np.where(now[:, None], last_value, value)
        last_shown |= going & now
        code = np.where(going, (key + 1) @ (keys + 1) ** np.arange(motif), -1)
        codes[:, count] = code
        # The first pair of this key, itself where there is none before.
        first = (codes[:, : count + 1] == code[:, None]).argmax(1)
        again = first < count
        values[:, count] = value
        value = np.take_along_axis(values, first[:, None, None], 1)[:, 0]
        end = _write(tokens, asked, end, key, value, going, again)
    everywhere = np.ones(examples, bool)
    end = _write(tokens, asked, end, last_key, last_value, everywhere, everywhere)
    # What is written begins at the left; every row shall end with it.
    source = np.arange(length + 1) - (length + 1 - end)[:, None]
    tokens = np.where(source < 0, vocabulary - 1, np.take_along_axis(tokens, source.clip(0), 1))
    asked = (source >= 0) & np.take_along_axis(asked, source.clip(0), 1)
    return _next_tokens(tokens, None if training else asked)


def memorization(
    examples: int,
    *,
    vocabulary: int = 256,
    length: int = 32,
    table_seed: int = 0,
    training: bool = True,
    seed: int | list[int] = 0,
) -> Examples:
    """Pairs of a key and the highest id, where the key's value is asked for; the values are the same in every example.

    Keys are the lower half of the other ids, each with a different value of the upper half, drawn from `table_seed`.
    """
    keys = (vocabulary - 1) // 2
    table = keys + np.random.default_rng(table_seed).permutation(vocabulary - 1 - keys)
    key = np.random.default_rng(seed).integers(0, keys, (examples, length // 2))
    tokens = np.stack([key, np.full_like(key, vocabulary - 1)], 2)
    labels = np.stack([np.full_like(key, UNLABELLED), table[key]], 2)
    return _examples(tokens.reshape(examples, -1), labels.reshape(examples, -1))


def compression(
    examples: int, *, vocabulary: int = 16, length: int = 32, training: bool = True, seed: int | list[int] = 0
) -> Examples:
    """Random ids and the highest one at the end, from whose place alone all of them are to be restored."""
    tokens = np.random.default_rng(seed).integers(0, vocabulary - 1, (examples, length))
    tokens[:, -1] = vocabulary - 1
    return _examples(tokens, tokens)


def selective_copying(
    examples: int,
    *,
    vocabulary: int = 16,
    length: int = 256,
    copied: int = 16,
    training: bool = True,
    seed: int | list[int] = 0,
) -> Examples:
    """`copied` random ids among blanks, then the id "copy", then blanks, at which they are asked for in order.

    "copy" is the highest id, the blank the one below. Every blank of the first part goes before one of the ids, each as
    likely. ValueError where length <= 2 copied + 1.
    """
    blanks = length - 2 * copied - 1
    if blanks < 1:
        raise ValueError(f"length {length} with copied = {copied}: more than 2 x copied + 1 = {2 * copied + 1}")
    generator = np.random.default_rng(seed)
    ids = generator.integers(0, vocabulary - 2, (examples, copied))
    before = np.zeros((examples, copied), np.int64)
    np.add.at(before, (np.arange(examples)[:, None], generator.integers(0, copied, (examples, blanks))), 1)
    tokens = np.full((examples, length), vocabulary - 2)
    np.put_along_axis(tokens, np.arange(copied) + before.cumsum(1), ids, 1)
    tokens[:, length - copied - 1] = vocabulary - 1
    labels = np.full((examples, length), UNLABELLED)
    labels[:, length - copied :] = ids
    return _examples(tokens, labels)


TASKS: dict[str, Callable[..., Examples]] = {
    "in_context_recall": in_context_recall,
    "fuzzy_recall": fuzzy_recall,
    "noisy_recall": in_context_recall,
    "memorization": memorization,
    "compression": compression,
    "selective_copying": selective_copying,
}


def _examples(tokens: Numbers, labels: Numbers) -> Examples:
    return Examples(tokens.astype(np.int32), labels.astype(np.int32))


def _next_tokens(tokens: Numbers, asked: Flags | None) -> Examples:
    """Every token is the label of the one before it, or only where `asked`, of the tokens' shape, says so."""
    labels = tokens[:, 1:] if asked is None else np.where(asked[:, 1:], tokens[:, 1:], UNLABELLED)
    return _examples(tokens[:, :-1], labels)


def _shown_before(key: Numbers, options: int) -> Flags:
    """key: [rows, pairs], below `options`, -1 for none. Whether the row has had the same key."""
    shown = np.zeros((len(key), options + 1), bool)
    before = np.zeros(key.shape, bool)
    row = np.arange(len(key))
    for i, now in enumerate(key.T):
        before[:, i] = shown[row, now]
        shown[row, now] = now >= 0
    return before


def _size(ids: Numbers) -> Numbers:
    return (ids >= 0).sum(1)


def _write(
    tokens: Numbers, asked: Flags, end: Numbers, key: Numbers, value: Numbers, where: Flags, again: Flags
) -> Numbers:
    """Append key and value to the rows `where`; the values of the rows `again` are asked for. Returns the new ends."""
    for ids, marked in ((key, None), (value, again)):
        for i in range(ids.shape[1]):
            rows = np.nonzero(where & (ids[:, i] >= 0))[0]
            tokens[rows, end[rows] + i] = ids[rows, i]
            if marked is not None:
                asked[rows, end[rows] + i] = marked[rows]
        end = end + np.where(where, _size(ids), 0)
    return end
