"""Which tokens a masked language model has to find, and what stands in their place (Devlin et al. 2019, section 3.1).

A share ``rate`` of the tokens is chosen, each by itself, or whole words at a time. Of the chosen ones 80 % become the mask
token, 10 % a random one and 10 % stay; all of them are labels, the others are -100.
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
    """How tokens of one vocabulary are masked.

    rate: share of the ordinary tokens. ordinary: bool [vocab], False for special tokens, which are neither chosen nor put
    in. joined: for whole words, bool [vocab, 2]: whether an id continues a word, and whether one can go on after it.
    """

    rate: float
    mask_id: int
    ordinary: NDArray[np.bool_]
    joined: NDArray[np.bool_] | None = None

    def __post_init__(self) -> None:
        if not 0 < self.rate < 1:
            raise ValueError(f"the masking rate {self.rate} must be between 0 and 1")
        if len(self.replacements) < 2:
            raise ValueError("a vocabulary of special tokens alone cannot be masked")

    @functools.cached_property
    def replacements(self) -> NDArray[np.int64]:
        """The ids that may stand in the place of another."""
        return np.flatnonzero(self.ordinary)

    def apply(
        self, tokens: NDArray[np.int64], random: np.random.Generator
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """tokens [n] -> inputs and labels, both int64 [n]."""
        ordinary = self.ordinary[tokens]
        if self.joined is None:
            chosen = ordinary & (random.random(len(tokens)) < self.rate)
        else:
            words = word_numbers(tokens, ordinary, self.joined)
            chosen = ordinary & (random.random(len(tokens)) < self.rate)[words]
        where = np.flatnonzero(chosen)
        draw = random.random(len(where))
        inputs = tokens.copy()
        inputs[where[draw < 0.8]] = self.mask_id
        replaced = where[draw >= 0.9]
        inputs[replaced] = self.replacements[random.integers(0, len(self.replacements), len(replaced))]
        return inputs, np.where(chosen, tokens, IGNORED_LABEL)


def masking_of(tokenizer: Tokenizer, rate: float, whole_word: bool = False) -> Masking:
    """The masking of a tokenizer's vocabulary."""
    ordinary = np.ones(tokenizer.vocab_size, bool)
    ordinary[[i for i in tokenizer.special_ids if i < tokenizer.vocab_size]] = False
    return Masking(rate, tokenizer.mask_id, ordinary, joints(tokenizer) if whole_word else None)


def word_numbers(
    tokens: NDArray[np.int64], ordinary: NDArray[np.bool_], joined: NDArray[np.bool_]
) -> NDArray[np.int64]:
    """The number of each token's word, int64 [n], from 0 in the order of the text."""
    continues = np.zeros(len(tokens), bool)
    continues[1:] = joined[tokens[1:], 0] & joined[tokens[:-1], 1] & ordinary[1:] & ordinary[:-1]
    return np.cumsum(~continues) - 1 if len(tokens) else np.zeros(0, np.int64)


def joints(tokenizer: Tokenizer) -> NDArray[np.bool_]:
    """For every id, whether it continues a word that stands before it, and whether a word that it ends may go on: bool
    [vocab, 2]. A word is letters and digits; in WordPiece it is a piece and the ``##`` pieces after it."""
    joined = np.zeros((tokenizer.vocab_size, 2), bool)
    for number in range(tokenizer.vocab_size):
        piece = tokenizer.piece(number)
        if tokenizer.type == "wordpiece":
            joined[number] = piece.startswith("##"), True
        elif piece:
            # A part of a character that UTF-8 spells in several bytes is one of a letter, as a rule.
            joined[number] = [character.isalnum() or character == "\ufffd" for character in (piece[0], piece[-1])]
    return joined
