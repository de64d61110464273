"""Generate the six tasks of MAD: Poli et al. 2024 (Mechanistic Design and Scaling of Hybrid Architectures, arXiv 2403.17844).

Each function returns `examples` rows of a task. With `training`, recall tasks have a label at every position. Otherwise only
positions whose answer is in the context have one. The other tasks ignore `training`.
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
    """Return pairs k v k v ... with keys from the lower and values from the upper half of the ids.

    Each row maps every key to one value. It has length / 2 pairs, and the key of the last pair occurred before. The test labels
    are at the keys that occurred before. `noise` replaces this fraction of the pairs by two of the `noise_vocabulary` highest
    ids ("noisy recall"); at least one pair stays. Rows have length - 1 tokens.

    Raises ValueError for an odd length, for noise without a noise vocabulary, and for fewer than 2 ids without noise.
    """
    if length % 2 or length < 4:
        raise ValueError(f"length {length}: an even number of at least 4 is required")
    if noise and not noise_vocabulary:
        raise ValueError(f"noise = {noise} requires a noise vocabulary: set noise_vocabulary to 1 or more")
    generator = np.random.default_rng(seed)
    plain = vocabulary - noise_vocabulary
    _check_vocabulary(plain, 2, f" besides the noise_vocabulary of {noise_vocabulary}" if noise_vocabulary else "")
    num_keys, pairs = plain // 2, length // 2 - 1
    row = np.arange(examples)
    values = generator.integers(num_keys, plain, (examples, num_keys))
    key = generator.integers(0, num_keys, (examples, pairs + 1))
    regular = generator.random((examples, pairs)) >= noise
    regular[row, generator.integers(0, pairs, examples)] = True
    shown = np.zeros((examples, num_keys), bool)
    at, pair = np.nonzero(regular)
    shown[at, key[at, pair]] = True
    # The last key is drawn uniformly from the keys of the row, independent of their counts.
    key[:, pairs] = np.where(shown, generator.random((examples, num_keys)), -1.0).argmax(1)
    tokens = np.stack([key, values[row[:, None], key]], 2)
    if noise:
        noisy = generator.integers(plain, vocabulary, (examples, pairs, 2))
        tokens[:, :pairs] = np.where(regular[:, :, None], tokens[:, :pairs], noisy)
        key[:, :pairs][~regular] = -1
    queried = np.zeros((examples, length), bool)
    queried[:, 1::2] = _shown_before(key, num_keys)
    return _next_tokens(tokens.reshape(examples, length), None if training else queried)


def fuzzy_recall(
    examples: int,
    *,
    vocabulary: int = 16,
    length: int = 128,
    motif: int = 3,
    training: bool = True,
    seed: int | list[int] = 0,
) -> Examples:
    """Return in-context recall with keys and values of 1 to `motif` distinct tokens; test keys have exactly `motif` tokens.

    The last pair occurred before. Rows are padded on the left to `length` tokens with the highest id. The test labels are the
    values whose key occurred before. Raises ValueError if the vocabulary is too small for a motif, the length for three pairs,
    or 64 bits for the keys.
    """
    num_keys = (vocabulary - 1) // 2
    if motif > num_keys or length <= 6 * motif:
        raise ValueError(
            f"motif = {motif}: at most the number of key ids is allowed ({num_keys} with vocabulary {vocabulary}), and length "
            f"{length} must be more than {6 * motif}"
        )
    if (num_keys + 1) ** motif > 2**63:
        raise ValueError(f"vocabulary {vocabulary} with motif = {motif}: keys exceed 64 bits; lower one of them")
    generator = np.random.default_rng(seed)

    def draw(sizes: Numbers, first: int, count: int) -> Numbers:
        """Return [examples, motif] distinct ids, with -1 after the size of each row."""
        ids = first + distinct(generator, examples, motif, count)
        return np.where(np.arange(motif) < sizes[:, None], ids, -1)

    def pair() -> tuple[Numbers, Numbers]:
        sizes = generator.integers(1, motif + 1, (2, examples))
        if not training:
            sizes[0] = motif
        return draw(sizes[0], 0, num_keys), draw(sizes[1], num_keys, vocabulary - 1 - num_keys)

    last_key, last_value = pair()
    last_size = _size(last_key) + _size(last_value)
    limit = length - last_size - 2 * motif
    place = generator.integers(0, np.minimum(limit - 2 * motif + 1, length - 2 * last_size))
    tokens = np.full((examples, length + 1), vocabulary - 1)
    queried = np.zeros(tokens.shape, bool)
    end = np.zeros(examples, np.int64)
    last_shown = np.zeros(examples, bool)
    # All pairs so far: the key as one number, and the value.
    codes = np.empty((examples, length // 2), np.int64)
    values = np.empty((examples, length // 2, motif), np.int64)
    for count in range(length // 2):
        if not (going := end < limit).any():
            break
        key, value = pair()
        now = (going & ~last_shown & (end >= place)) | (key == last_key).all(1)
        key, value = np.where(now[:, None], last_key, key), np.where(now[:, None], last_value, value)
        last_shown |= going & now
        code = np.where(going, (key + 1) @ (num_keys + 1) ** np.arange(motif), -1)
        codes[:, count] = code
        # The first pair with this key, possibly this pair.
        first = (codes[:, : count + 1] == code[:, None]).argmax(1)
        again = first < count
        values[:, count] = value
        value = np.take_along_axis(values, first[:, None, None], 1)[:, 0]
        end = _write(tokens, queried, end, key, value, going, again)
    everywhere = np.ones(examples, bool)
    end = _write(tokens, queried, end, last_key, last_value, everywhere, everywhere)
    # Rows are written from the left; shift them to the right end.
    source = np.arange(length + 1) - (length + 1 - end)[:, None]
    tokens = np.where(source < 0, vocabulary - 1, np.take_along_axis(tokens, source.clip(0), 1))
    queried = (source >= 0) & np.take_along_axis(queried, source.clip(0), 1)
    return _next_tokens(tokens, None if training else queried)


def memorization(
    examples: int,
    *,
    vocabulary: int = 256,
    length: int = 32,
    table_seed: int = 0,
    training: bool = True,
    seed: int | list[int] = 0,
) -> Examples:
    """Return pairs of a key and the highest id, whose label is the value of the key. All examples share the values.

    Keys are the lower half of the other ids. Each has a distinct value of the upper half, drawn with `table_seed`. Raises
    ValueError for fewer than 3 ids.
    """
    _check_vocabulary(vocabulary, 3)
    num_keys = (vocabulary - 1) // 2
    table = num_keys + np.random.default_rng(table_seed).permutation(vocabulary - 1 - num_keys)
    key = np.random.default_rng(seed).integers(0, num_keys, (examples, length // 2))
    tokens = np.stack([key, np.full_like(key, vocabulary - 1)], 2)
    labels = np.stack([np.full_like(key, UNLABELLED), table[key]], 2)
    return _examples(tokens.reshape(examples, -1), labels.reshape(examples, -1))


def compression(
    examples: int, *, vocabulary: int = 16, length: int = 32, training: bool = True, seed: int | list[int] = 0
) -> Examples:
    """Return random ids with the highest id at the end. The labels are the tokens: the model restores all from the last one.

    Raises ValueError for fewer than 2 ids.
    """
    _check_vocabulary(vocabulary, 2)
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
    """Return `copied` random ids among blanks, the id "copy", then blanks whose labels are the ids in order.

    "copy" is the highest id, the blank the one below. Every blank of the first part precedes an id drawn uniformly. Raises
    ValueError if length <= 2 * copied + 1, and for fewer than 3 ids.
    """
    _check_vocabulary(vocabulary, 3)
    blanks = length - 2 * copied - 1
    if blanks < 1:
        raise ValueError(
            f"length {length} with copied = {copied}: more than 2 x copied + 1 = {2 * copied + 1} is required"
        )
    generator = np.random.default_rng(seed)
    ids = generator.integers(0, vocabulary - 2, (examples, copied))
    blanks_before = np.zeros((examples, copied), np.int64)
    np.add.at(blanks_before, (np.arange(examples)[:, None], generator.integers(0, copied, (examples, blanks))), 1)
    tokens = np.full((examples, length), vocabulary - 2)
    np.put_along_axis(tokens, np.arange(copied) + blanks_before.cumsum(1), ids, 1)
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


def _check_vocabulary(ids: int, least: int, which: str = "") -> None:
    if ids < least:
        raise ValueError(f"vocabulary: {ids} ids{which}; at least {least} are required")


def _examples(tokens: Numbers, labels: Numbers) -> Examples:
    return Examples(tokens.astype(np.int32), labels.astype(np.int32))


def _next_tokens(tokens: Numbers, queried: Flags | None) -> Examples:
    """Return examples whose labels are the next tokens. queried: bool with the shape of tokens, limits the labels; or None."""
    labels = tokens[:, 1:] if queried is None else np.where(queried[:, 1:], tokens[:, 1:], UNLABELLED)
    return _examples(tokens[:, :-1], labels)


def _shown_before(key: Numbers, options: int) -> Flags:
    """Return whether each key occurred before in its row. key: [rows, pairs], below `options`, -1 for none."""
    shown = np.zeros((len(key), options + 1), bool)
    repeated = np.zeros(key.shape, bool)
    row = np.arange(len(key))
    for i, current in enumerate(key.T):
        repeated[:, i] = shown[row, current]
        shown[row, current] = current >= 0
    return repeated


def _size(ids: Numbers) -> Numbers:
    return (ids >= 0).sum(1)


def _write(
    tokens: Numbers, queried: Flags, end: Numbers, key: Numbers, value: Numbers, where: Flags, again: Flags
) -> Numbers:
    """Append key and value to the rows `where`, and mark the values of the rows `again` as queried. Return the new ends."""
    for ids, marked in ((key, None), (value, again)):
        for i in range(ids.shape[1]):
            rows = np.nonzero(where & (ids[:, i] >= 0))[0]
            tokens[rows, end[rows] + i] = ids[rows, i]
            if marked is not None:
                queried[rows, end[rows] + i] = marked[rows]
        end = end + np.where(where, _size(ids), 0)
    return end
