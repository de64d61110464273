"""Compute pseudo-log-likelihoods of continuations under a masked model.

PLL(y | x) = sum_t log p(y_t | x, y without y_t): each token of the continuation is masked in turn, with all other tokens
visible (Salazar et al. 2020, arXiv 1910.14659; Wang and Cho 2019). It ranks choices, but is no probability of a text and not
comparable with the log-likelihood of a causal model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from models.language_model import LanguageModel
from models.precision import to_accumulation_dtype
from tools.evaluation.prefix_tree import Ids
from tools.evaluation.scoring import Score

# Number of the request, its whole sequence, first position to score, number of positions.
Unit = tuple[int, Ids, int, int]


@dataclass
class PseudoScorer:
    """Scores requests on one process with a masked model.

    Attributes:
        mask_id: id of the mask token.
        prefix, suffix: ids around every sequence, as in training (such as [CLS] and [SEP]).
        batch_tokens: tokens of a batch, padding included. Halved when memory runs out.
        read: tokens that the model has read, padding excluded.
    """

    model: LanguageModel
    mask_id: int
    prefix: tuple[int, ...] = ()
    suffix: tuple[int, ...] = ()
    batch_tokens: int = 0
    read: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self.device = next(self.model.parameters()).device
        self.batch_tokens = self.batch_tokens or (1 << 15 if self.device.type == "cuda" else 4096)

    def units(self, contexts: Sequence[Ids], targets: Sequence[Ids]) -> list[Unit]:
        """Return the units of work, longest sequence first."""
        units = []
        for number, (context, target) in enumerate(zip(contexts, targets, strict=True)):
            whole = np.concatenate([np.array(self.prefix, np.int64), context, target, np.array(self.suffix, np.int64)])
            units.append((number, whole, len(self.prefix) + len(context), len(target)))
        return sorted(units, key=lambda unit: -len(unit[1]))

    @torch.inference_mode()
    def score_units(
        self, units: Sequence[Unit], requests: int, *, done: Callable[[list[tuple[int, Score]]], None]
    ) -> None:
        """Pass every request's (number, (pseudo-log-likelihood, all masked tokens guessed)) to `done`."""
        sums, misses = torch.zeros(requests, dtype=torch.float64), torch.zeros(requests, dtype=torch.int64)
        remaining = {number: count for number, _, _, count in units}
        rows = [(number, sequence, first + i) for number, sequence, first, count in units for i in range(count)]
        while rows:
            size = max(1, self.batch_tokens // len(rows[0][1]))
            batch = rows[:size]
            try:
                log_probabilities, greedy = self._step(batch)
            except torch.OutOfMemoryError:
                torch.cuda.empty_cache()
                if len(batch) == 1:
                    raise
                self.batch_tokens = max(1, self.batch_tokens // 2)
                continue
            rows = rows[size:]
            finished = []
            for (number, *_), value, hit in zip(batch, log_probabilities, greedy, strict=True):
                sums[number] += value
                misses[number] += not hit
                remaining[number] -= 1
                if not remaining[number]:
                    finished.append((number, (float(sums[number]), int(misses[number]) == 0)))
            done(finished)

    def _step(self, batch: Sequence[tuple[int, Ids, int]]) -> tuple[list[float], list[bool]]:
        lengths = torch.tensor([len(sequence) for _, sequence, _ in batch])
        tokens = torch.zeros(len(batch), int(lengths.max()), dtype=torch.long)
        for row, (_, sequence, place) in enumerate(batch):
            tokens[row, : len(sequence)] = torch.from_numpy(sequence)
            tokens[row, place] = self.mask_id
        targets = torch.tensor([int(sequence[place]) for _, sequence, place in batch], device=self.device)
        places = torch.tensor([place for _, _, place in batch], device=self.device)
        padded = bool((lengths < lengths.max()).any())
        mask = (torch.arange(tokens.shape[1]) < lengths[:, None]).to(self.device) if padded else None
        hidden, _ = self.model.hidden_states(tokens.to(self.device), mask=mask)
        row = torch.arange(len(batch), device=self.device)
        logits = to_accumulation_dtype(self.model.head(hidden[row, places]))
        log_probabilities = logits[row, targets] - torch.logsumexp(logits, -1)
        self.read += int(lengths.sum())
        return log_probabilities.tolist(), (logits.argmax(-1) == targets).tolist()
