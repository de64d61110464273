"""Mask tokens for a masked language model (Devlin et al. 2019, section 3.1).

A fraction ``rate`` of the tokens is selected, per token or per whole word. Of these, 80 % become the mask token, 10 % a random
token and 10 % stay. Selected tokens are labels; all other labels are -100.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..tokenizer import Tokenizer

IGNORED_LABEL = -100


@dataclass(frozen=True)
class Masking:
    """Mask the tokens of one vocabulary.

    rate: fraction of the ordinary tokens to select.
    mask_id: id of the mask token.
    ordinary: bool [vocab], False for special tokens, which are neither selected nor inserted.
    joined: for whole-word masking, bool [vocab, 2]: whether an id continues a word, and whether a word can continue after it.
    """

    rate: float
    mask_id: int
    ordinary: NDArray[np.bool_]
    joined: NDArray[np.bool_] | None = None

    def __post_init__(self) -> None:
        if not 0 < self.rate < 1:
            raise ValueError(f"the masking rate {self.rate} must be between 0 and 1")
        if len(self.replacements) < 2:
            raise ValueError("a vocabulary with fewer than 2 ordinary tokens cannot be masked; check the tokenizer")

    @functools.cached_property
    def replacements(self) -> NDArray[np.int64]:
        """Return the ids that can replace a selected token: int64."""
        return np.flatnonzero(self.ordinary)

    def apply(
        self, tokens: NDArray[np.int64], random: np.random.Generator
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return inputs and labels, both int64 [n], for tokens [n]."""
        ordinary = self.ordinary[tokens]
        if self.joined is None:
            selected = ordinary & (random.random(len(tokens)) < self.rate)
        else:
            words = word_numbers(tokens, ordinary, self.joined)
            selected = ordinary & (random.random(len(tokens)) < self.rate)[words]
        where = np.flatnonzero(selected)
        draw = random.random(len(where))
        inputs = tokens.copy()
        inputs[where[draw < 0.8]] = self.mask_id
        replaced = where[draw >= 0.9]
        inputs[replaced] = self.replacements[random.integers(0, len(self.replacements), len(replaced))]
        return inputs, np.where(selected, tokens, IGNORED_LABEL)


def masking_for(tokenizer: Tokenizer, rate: float, whole_word: bool = False) -> Masking:
    """Return the masking for the vocabulary of a tokenizer."""
    joined = word_continuations(tokenizer) if whole_word else None
    return Masking(rate, tokenizer.mask_id, ordinary_ids(tokenizer), joined)


def ordinary_ids(tokenizer: Tokenizer) -> NDArray[np.bool_]:
    """Return for every id whether it can be masked, bool [vocab]: False for special tokens."""
    ordinary = np.ones(tokenizer.vocab_size, bool)
    ordinary[[i for i in tokenizer.special_ids if i < tokenizer.vocab_size]] = False
    return ordinary


def word_numbers(
    tokens: NDArray[np.int64], ordinary: NDArray[np.bool_], joined: NDArray[np.bool_]
) -> NDArray[np.int64]:
    """Return the word number of each token, int64 [n], from 0 in text order."""
    continues = np.zeros(len(tokens), bool)
    continues[1:] = joined[tokens[1:], 0] & joined[tokens[:-1], 1] & ordinary[1:] & ordinary[:-1]
    return np.cumsum(~continues) - 1 if len(tokens) else np.zeros(0, np.int64)


def word_continuations(tokenizer: Tokenizer) -> NDArray[np.bool_]:
    """Return for every id whether it continues a word, and whether a word can continue after it: bool [vocab, 2].

    A word is a run of letters and digits; in WordPiece, a piece and the ``##`` pieces after it.
    """
    joined = np.zeros((tokenizer.vocab_size, 2), bool)
    for number in range(tokenizer.vocab_size):
        piece = tokenizer.piece(number)
        if tokenizer.type == "wordpiece":
            joined[number] = piece.startswith("##"), True
        elif piece:
            # U+FFFD is a part of a multi-byte character, which is usually a letter.
            joined[number] = [character.isalnum() or character == "\ufffd" for character in (piece[0], piece[-1])]
    return joined
