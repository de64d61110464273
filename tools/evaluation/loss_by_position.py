"""Measure the loss by position, within and beyond the trained length."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from models.language_model import LanguageModel
from models.precision import to_accumulation_dtype
from tools.evaluation.perplexity import TokenText, cached, text_batches
from tools.evaluation.request import TextRequest
from tools.evaluation.request_cache import RequestCache
from tools.loading.model import LoadedModel

Mask = NDArray[np.bool_]
Index = NDArray[np.int64]

# Elements of logits computed at a time.
_LOGITS = 1 << 24


@dataclass(frozen=True)
class LossByPosition:
    """Hold the mean loss of the tokens at each position of a piece.

    Attributes:
        nll: [length] nats per token; nan without a token.
        tokens: [length] number of measured tokens.
        bytes_per_token: of the text, to convert nats to bits per byte.
        trained_length: of the model.
        changes: per piece that is long enough, mean nats beyond the trained length minus those of its second half.
    """

    name: str
    nll: NDArray[np.float64]
    tokens: NDArray[np.int64]
    bytes_per_token: float
    trained_length: int
    changes: NDArray[np.float64]

    @property
    def change(self) -> tuple[float, float] | None:
        """Return the bits per byte beyond the trained length minus those of its second half, and the standard error."""
        if len(self.changes) < 2:
            return None
        bits = self.changes / math.log(2) / self.bytes_per_token
        return float(bits.mean()), float(bits.std(ddof=1) / math.sqrt(len(bits)))

    def bins(self, count: int = 48) -> list[dict[str, float]]:
        """Return means over ranges of positions that grow by a constant factor. One range ends at the trained length."""
        length = len(self.nll)
        edges = {1, self.trained_length + 1, length + 1}
        edges |= {round((length + 1) ** (i / count)) for i in range(count + 1)}
        borders = sorted(e for e in edges if 1 <= e <= length + 1)
        bins = []
        for low, high in itertools.pairwise(borders):
            weight = self.tokens[low - 1 : high - 1]
            if not weight.sum():
                continue
            place = {"from": low, "to": high - 1, "tokens": int(weight.sum())}
            bins.append({**place, "loss": self._loss(low, high - 1), "bits_per_byte": self.mean(low, high - 1)})
        return bins

    def mean(self, low: int, high: int) -> float:
        """Return the bits per byte of positions low to high, counted from 1."""
        return self._loss(low, high) / math.log(2) / self.bytes_per_token

    def _loss(self, low: int, high: int) -> float:
        place = slice(low - 1, high)
        nll, weight = self.nll[place], self.tokens[place]
        return float(np.average(nll[weight > 0], weights=weight[weight > 0]))


@torch.inference_mode()
def loss_by_position(
    loaded: LoadedModel,
    text: TokenText,
    *,
    length: int,
    batch_size: int = 8,
    progress: bool = True,
    cache: RequestCache | None = None,
) -> LossByPosition:
    """Return the loss by position in pieces of `length` tokens. Each piece starts with an empty state, as in training.

    With `data.reset_at_documents` each document starts a piece of its own. Position 1 is the first token of a piece. It is
    predicted from one token. cache: as in `perplexity`.
    """
    total, count = np.zeros(length), np.zeros(length, np.int64)
    trained = int(loaded.config["batch"]["sequence_length"])
    changes: list[float] = []
    for batch in text_batches(loaded, text, length, batch_size, progress=progress):
        real = (batch["loss_weight"] > 0).flatten().cpu().numpy()
        piece, position = _places(batch, length)

        def measure(
            batch: dict[str, Tensor] = batch, real: Mask = real, piece: Index = piece, position: Index = position
        ) -> list[list[float]]:
            nll = token_nll(loaded.model, batch["tokens"], batch["labels"], batch.get("cu_seqlens"))
            nll = nll.flatten().cpu().numpy()
            beyond = real & (position >= trained)
            late = (position >= trained // 2) & (position < trained)
            long = np.unique(piece[beyond])
            change = _means(piece, nll, beyond)[long] - _means(piece, nll, late)[long]
            return [np.bincount(position[real], nll[real], length).tolist(), change.tolist()]

        sums, change = cached(cache, "nll by position", batch, measure)
        total += sums
        count += np.bincount(position[real], minlength=length)
        changes += change
    with np.errstate(invalid="ignore"):
        mean = total / count
    return LossByPosition(
        text.name, mean, count, text.bytes / max(1, int(count.sum())), trained, np.array(changes, np.float64)
    )


def _places(batch: dict[str, Tensor], length: int) -> tuple[Index, Index]:
    """Return the piece of each token of a batch, and its position there from 0."""
    tokens = batch["tokens"].numel()
    bounds = batch["cu_seqlens"].cpu().numpy() if "cu_seqlens" in batch else np.arange(0, tokens + 1, length)
    sizes = np.diff(bounds)
    return np.repeat(np.arange(len(sizes)), sizes), np.arange(tokens) - np.repeat(bounds[:-1], sizes)


def _means(piece: Index, nll: NDArray[np.float64], selected: Mask) -> NDArray[np.float64]:
    """Return the mean nats of the selected tokens of each piece; nan without one."""
    pieces = piece[-1] + 1
    with np.errstate(invalid="ignore"):
        return np.bincount(piece[selected], nll[selected], pieces) / np.bincount(piece[selected], minlength=pieces)


def token_nll(model: LanguageModel, tokens: Tensor, labels: Tensor, cu_seqlens: Tensor | None = None) -> Tensor:
    """Return the nats of every label in float64, [batch, length]. The logits are computed in parts.

    tokens, labels: [batch, length]. cu_seqlens: as `LanguageModel.forward`.
    """
    hidden, _ = model.hidden_states(tokens, cu_seqlens=cu_seqlens)
    rows, targets = hidden.flatten(0, 1), labels.flatten().clamp_min(0)
    step = max(1, _LOGITS // model.config.vocab_size)
    nll = []
    for start in range(0, len(rows), step):
        logits = to_accumulation_dtype(model.head(rows[start : start + step]))
        chosen = logits.gather(-1, targets[start : start + step, None])[:, 0]
        nll.append((torch.logsumexp(logits, -1) - chosen).double())
    return torch.cat(nll).view(labels.shape)


def plot_positions(results: list[LossByPosition], out: Path) -> None:
    """Draw bits per byte against position, one line per text, and mark the trained length."""
    from tools.reporting.style import GRAY, label_lines, log_axes, saved_figure, series_style

    with saved_figure(out) as (_, axes):
        for number, result in enumerate(results):
            bins = result.bins()
            middle = [math.sqrt(b["from"] * b["to"]) for b in bins]
            label = result.name if len(result.name) <= 40 else f"...{result.name[-37:]}"
            axes.plot(middle, [b["bits_per_byte"] for b in bins], label=label, **series_style(number))
        trained = results[0].trained_length
        axes.axvline(trained, color=GRAY, lw=1.0, ls="--")
        axes.annotate(
            f" trained length {trained:,}", (trained, 0.97), xycoords=("data", "axes fraction"), fontsize=8, va="top"
        )
        log_axes(axes, "x", [2**power for power in range(32) if 2**power <= len(results[0].nll)])
        axes.set(xlabel="position in the piece (tokens)", ylabel="bits per byte", title="Loss by position")
        label_lines(axes)


def run_positions(
    loaded: LoadedModel,
    texts: Sequence[TokenText],
    request: TextRequest,
    picture: Path,
    cache: RequestCache,
    *,
    progress: bool = True,
) -> dict[str, dict[str, Any]]:
    """Measure the loss by position, print one sentence per text and draw a picture.

    Returns the entry of every text in `results.json`.
    """
    trained = int(loaded.config["batch"]["sequence_length"])
    length = request.sequence_length or 4 * trained
    settings: dict[str, Any] = {"batch_size": request.batch_size, "progress": progress, "cache": cache}
    results = [loss_by_position(loaded, text, length=length, **settings) for text in texts]
    plot_positions(results, picture)
    entries: dict[str, dict[str, Any]] = {}
    for result in results:
        positions = f"at positions {trained // 2 + 1:,} to {trained:,}"
        entry = entries[result.name] = {"bins": result.bins()}
        if not result.tokens[trained // 2 : trained].sum():
            print(f"{result.name}: no token {positions}: too short a text, or --sequence-length {length:,}")
            continue
        within = result.mean(trained // 2 + 1, trained)
        words = f"{result.name}: {within:.4f} bits per byte {positions}"
        entry["within"] = within
        if length > trained and result.tokens[trained:].sum():
            beyond = result.mean(trained + 1, length)
            words += f", {beyond:.4f} from {trained + 1:,} to {length:,}"
            entry["beyond"] = beyond
            if result.change is not None and math.isfinite(result.change[0]):
                change, error = result.change
                verdict = "falls further" if change < -2 * error else "rises" if change > 2 * error else "stays level"
                words += f": it {verdict} ({change:+.4f} ± {error:.4f} per piece)"
                entry.update(change=change, change_stderr=error)
        print(words)
    print(picture)
    return entries
