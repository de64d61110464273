"""Measure the loss of a causal model by context length: the same tokens, predicted in pieces of each length.

Each token is predicted once per length from the tokens before it in its piece, so that only the context differs. The effect
of the context is a token's loss minus its loss in a piece of the trained length. Standard errors are over the longest pieces.
With `data.reset_at_documents` each document starts with an empty state, as in training.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from data.datasets.causal import SequentialDataset
from tools.evaluation.loss_by_position import token_nll
from tools.loading.model import LoadedModel

# Multiples of the trained length.
MULTIPLES = (0.5, 1, 2, 4, 8, 16, 32)


@dataclass(frozen=True)
class LossOverLength:
    """Hold the losses of one model.

    Attributes:
        trained: sequence length in training.
        lengths: lengths of the pieces, including the trained length; each divides the longest.
        nll: [lengths, pieces, longest length], the loss of each token in nats.
    """

    trained: int
    lengths: tuple[int, ...]
    nll: NDArray[np.float32]

    def by_length(self) -> list[dict[str, float]]:
        """Return per length the loss, the perplexity and the change from the trained length with its standard error."""
        base = self.nll[self.lengths.index(self.trained)]
        rows = []
        for length, nll in zip(self.lengths, self.nll, strict=True):
            loss = float(nll.mean(dtype=np.float64))
            change, error = _mean_and_error((nll - base).mean(1, dtype=np.float64))
            row = {"length": length, "loss": loss, "perplexity": math.exp(min(loss, 700.0)), "change": change}
            rows.append({**row, "change_stderr": error, "tokens": nll.size, "trained_at": self.trained})
        return rows

    def by_position(self) -> list[dict[str, float]]:
        """Return the loss at the longest length, and its change from the trained length, by doubling ranges of positions.

        Positions are counted from 1.
        """
        base, longest = self.nll[self.lengths.index(self.trained)], self.nll[-1]
        borders = [0, *(self.trained * 2**k // 2 for k in range(64) if self.trained * 2**k // 2 < longest.shape[1])]
        rows = []
        for low, high in itertools.pairwise([*borders, longest.shape[1]]):
            part = longest[:, low:high]
            change, error = _mean_and_error((part - base[:, low:high]).mean(1, dtype=np.float64))
            loss = float(part.mean(dtype=np.float64))
            rows.append({"from": low + 1, "to": high, "loss": loss, "change": change, "change_stderr": error})
        return rows


@torch.inference_mode()
def loss_over_length(
    loaded: LoadedModel, prefix: str, lengths: Sequence[int], *, tokens: int, progress: Any
) -> LossOverLength:
    """Predict the first `tokens` of a token file, in whole pieces of the longest length, at each length.

    progress: called after each piece of each length.
    """
    trained, longest = int(loaded.config["batch"]["sequence_length"]), max(lengths)
    pieces = SequentialDataset(
        prefix,
        sequence_length=longest,
        first_token=loaded.tokenizer.end_of_document_id,
        reset_at_documents=loaded.config["data"]["reset_at_documents"],
    )
    count = pieces_read(pieces.num_tokens, longest, tokens)
    nll = np.empty((len(lengths), count, longest), np.float32)
    for number in range(count):
        piece = pieces[number]
        for index, length in enumerate(lengths):
            rows = cut(piece, length, loaded.device)
            loss = token_nll(loaded.model, rows["tokens"], rows["labels"], rows.get("cu_seqlens"))
            nll[index, number] = loss.flatten().cpu().numpy()
            progress()
    return LossOverLength(trained, tuple(lengths), nll)


def cut(piece: dict[str, Tensor], length: int, device: torch.device) -> dict[str, Tensor]:
    """Return a piece as rows of `length` tokens; with "cu_seqlens" as one row whose segments also end after `length`."""
    cut_piece = {key: value.to(device) for key, value in piece.items()}
    bounds = cut_piece.pop("cu_seqlens", None)
    if bounds is None:
        return {key: value.view(-1, length) for key, value in cut_piece.items()}
    ends = torch.arange(0, len(cut_piece["tokens"]) + 1, length, dtype=bounds.dtype, device=device)
    return {**{key: value[None] for key, value in cut_piece.items()}, "cu_seqlens": torch.cat([bounds, ends]).unique()}


def pieces_read(tokens_in_file: int, longest: int, tokens: int) -> int:
    """Return how many whole pieces of the longest length are read."""
    return min(tokens_in_file, tokens) // longest


def loss_table(results: dict[str, dict[str, list[dict[str, float]]]]) -> str:
    """Return Markdown tables per run: one row per length, then the change beyond the trained length by position."""
    from tools.reporting.tables import markdown_table

    parts = []
    for run, result in results.items():
        rows = result["by_length"]
        trained = rows[0]["trained_at"]
        body = [
            [
                f"{row['length']:,}",
                f"{row['length'] / trained:g} x",
                f"{row['loss']:.4f}",
                f"{row['perplexity']:,.2f}",
                _signed(row),
            ]
            for row in rows
        ]
        parts.append(f"{run}, {rows[0]['tokens']:,} tokens, each predicted once at every length\n")
        parts.append(
            markdown_table(["tokens in view", "trained", "loss", "perplexity", "minus trained"], body, aligned=True)
            + "\n"
        )
        body = [[f"{r['from']:,} to {r['to']:,}", f"{r['loss']:.4f}", _signed(r)] for r in result["by_position"]]
        header = [f"position in {rows[-1]['length']:,}", "loss", f"minus with {int(trained):,} in view"]
        parts.append(markdown_table(header, body, aligned=True) + "\n")
    return "\n".join(parts)


def _signed(row: dict[str, float]) -> str:
    if row["change"] == 0.0:
        return "0"
    error = row["change_stderr"]
    return f"{row['change']:+.4f}" + ("" if math.isnan(error) else f" ± {error:.4f}")


def _mean_and_error(values: NDArray[np.float64]) -> tuple[float, float]:
    error = values.std(ddof=1) / math.sqrt(len(values)) if len(values) > 1 else math.nan
    return float(values.mean()), float(error)
