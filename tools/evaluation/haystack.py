"""Read the filler of long texts, and check their lengths against those that a model reads."""

from __future__ import annotations

import hashlib
import itertools
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tools.evaluation.open_model import OpenedModel

if TYPE_CHECKING:
    from tools.loading.model import LoadedModel, LocatedCheckpoint


@dataclass(frozen=True)
class Filler:
    """Hold a text in pieces that end with a sentence or a line, and the tokens of each piece."""

    pieces: list[str]
    tokens: list[int]

    @property
    def total(self) -> int:
        return sum(self.tokens)

    def first(self, tokens: int) -> int:
        """Return the number of first pieces that have at most this many tokens."""
        return sum(1 for so_far in itertools.accumulate(self.tokens) if so_far <= tokens)


def split_filler(text: str, encode: Callable[[str], Sequence[Any]], tokens: int) -> Filler:
    """Return the beginning of a text, of at least this many tokens if it has them, in pieces of sentences and lines."""
    pieces: list[str] = []
    counts: list[int] = []
    total = 0
    for piece in re.findall(r"[^\n]*?(?:[.!?](?=\s)[^\S\n]*|\n+)|[^\n]+$", text):
        if total >= tokens:
            break
        piece = piece if piece.endswith(("\n", " ")) else piece + " "
        pieces.append(piece)
        counts.append(len(encode(piece)))
        total += counts[-1]
    return Filler(pieces, counts)


def read_filler(path: Path | None) -> tuple[str, str | None]:
    """Return the text of --filler and its SHA-256, or ("", None) without a file. Raises ValueError if it cannot be read."""
    if path is None:
        return "", None
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"--filler {path}: no UTF-8 at byte {error.start}; save the file as UTF-8") from error
    except OSError as error:
        raise ValueError(f"--filler {path}: {error.strerror}; give a text file") from error
    return text, hashlib.sha256(text.encode()).hexdigest()


def validation_text(loaded: LoadedModel, tokens: int) -> str:
    """Return the beginning of the run's validation text, longest documents first."""
    from data.indexed import IndexedTokens
    from tools.evaluation import perplexity

    text, tokenizer = perplexity.validation_text(loaded), loaded.tokenizer
    sequences = IndexedTokens(text.prefix)
    parts: list[str] = []
    for number in np.argsort(-np.asarray(sequences.sizes), kind="stable"):
        ids = np.asarray(sequences[int(number)])
        parts.append(tokenizer.decode(ids[ids != tokenizer.end_of_document_id].tolist()))
        tokens -= len(ids)
        if tokens <= 0:
            break
    return "\n".join(parts)


def refuse_masked(located: LocatedCheckpoint | None) -> None:
    """Raise ValueError for a masked model, which continues no text."""
    if located is not None and located.model.bidirectional_mixers():
        raise ValueError(f"{located.checkpoint} is a masked model: it reads both directions and generates no text")


def position_limit(model: Any) -> int | None:
    """Return the tokens that the learned positions of a model allow; None for a model without them."""
    from torch import nn

    names = ("max_positions", "n_positions", "max_position_embeddings")
    limits = [limit for name in names if (limit := getattr(model.config, name, None))]
    learned = getattr(model.config, "max_positions", None) is not None or any(
        isinstance(module, nn.Embedding) and re.search(r"wpe|position", name) for name, module in model.named_modules()
    )
    return limits[0] if limits and learned else None


def note_untrained(opened: OpenedModel, lengths: Sequence[int]) -> None:
    """Print a note if a length is beyond the trained length."""
    trained = opened.facts.get("trained_length")
    if trained and max(lengths) > trained:
        print(f"{opened.name} was trained at {trained:,} tokens: longer texts measure extrapolation", file=sys.stderr)
