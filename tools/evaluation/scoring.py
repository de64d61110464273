"""Compute log-likelihoods of continuations under a causal model of this project, over a tree of shared prefixes.

Only positions with a target pass through the output projection.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from models.backend import is_supported
from models.language_model import LanguageModel
from models.precision import to_accumulation_dtype
from tools.evaluation.prefix_tree import Ids, Node, build_forest

State = list[dict[str, Tensor]]
Score = tuple[float, bool]
# Elements of logits computed at a time.
_LOGITS_CPU, _LOGITS_CUDA = 1 << 23, 1 << 28
# Tokens of a batch that keep a device busy. Beyond them, a row is at least _EVEN times as long as the longest row.
_ENOUGH_CPU, _ENOUGH_CUDA, _EVEN = 1 << 10, 1 << 14, 0.875


@dataclass
class Scorer:
    """Scores requests on one process.

    Attributes:
        model: causal, in evaluation mode.
        batch_tokens: tokens of a batch, padding included; 0 measures how many fit. Halved when memory runs out.
        state_bytes: largest size of the states of a batch; 0 takes an eighth of the free memory.
        read: tokens that the model has read, padding excluded.
        shapes: number of batches by (rows, length).
    """

    model: LanguageModel
    batch_tokens: int = 0
    state_bytes: int = 0
    read: int = field(default=0, init=False)
    shapes: Counter[tuple[int, int]] = field(default_factory=Counter, init=False)

    def __post_init__(self) -> None:
        self.device = next(self.model.parameters()).device
        if not self.batch_tokens:
            self.batch_tokens = _tokens_that_fit(self)
        if not self.state_bytes:
            memory = torch.cuda.mem_get_info(self.device)[0] if self.device.type == "cuda" else 2 << 30
            self.state_bytes = memory // 8
        self._bytes_per_row, self._bytes_per_token = _state_bytes(self)

    def state_rows(self, length: int, padded: int = 0) -> int:
        """Return the number of states after `length` tokens that fit into `state_bytes`, at least 1.

        padded: last tokens that are read at once with padding. A cache of keys then needs a mask of all pairs, 3 bytes each.
        """
        mask = 3 * padded * length if self._bytes_per_token else 0
        return max(1, self.state_bytes // (self._bytes_per_row + self._bytes_per_token * length + mask))

    def units(self, contexts: Sequence[Ids], targets: Sequence[Ids]) -> list[Node]:
        """Return the units of work: the trees of all requests, largest first.

        contexts, targets: [length] ids of each request, at least one each. The model does not read the last token.
        """
        pairs = zip(contexts, targets, strict=True)
        forest = build_forest([np.concatenate([context, target[:-1]]) for context, target in pairs], targets)
        return sorted(forest, key=lambda node: -node.size)

    @torch.inference_mode()
    def score_units(
        self, units: Sequence[Node], requests: int, *, done: Callable[[list[tuple[int, Score]]], None]
    ) -> None:
        """Pass every request's (number, (log-likelihood, whether all targets are the likeliest tokens)) to `done`.

        `done` is called after every batch of trees. Numbers are below `requests`.
        """
        self._sums = torch.zeros(requests, dtype=torch.float64, device=self.device)
        self._misses = torch.zeros(requests, dtype=torch.int64, device=self.device)
        previous: Callable[[], list[tuple[int, Score]]] | None = None
        for batch in self._batches(units):
            self._score_subtrees(batch, None)
            scores = self._scores_later(sorted(set().union(*(node.requests for node in batch))))
            # Wait for the previous batch only, so that the device has queued work while this process prepares more.
            if previous is not None:
                done(previous())
            previous = scores
        if previous is not None:
            done(previous())

    def _scores_later(self, requests: list[int]) -> Callable[[], list[tuple[int, Score]]]:
        """Return a function that waits for the device and returns the sums of these requests."""
        index = self._to_device(torch.tensor(requests))
        sums, misses = (x[index].to("cpu", non_blocking=True) for x in (self._sums, self._misses))
        ready = torch.cuda.Event() if self.device.type == "cuda" else None
        if ready is not None:
            ready.record(torch.cuda.current_stream(self.device))

        def wait() -> list[tuple[int, Score]]:
            if ready is not None:
                ready.synchronize()
            rows = zip(requests, sums.tolist(), misses.tolist(), strict=True)
            return [(request, (total, missed == 0)) for request, total, missed in rows]

        return wait

    def _to_device(self, x: Tensor) -> Tensor:
        """Copy x to the device without waiting for its queued work."""
        return x.pin_memory().to(self.device, non_blocking=True) if self.device.type == "cuda" else x

    def _score_subtrees(self, nodes: Sequence[Node], state: State | None) -> None:
        """Score the nodes of one depth and all nodes below. state: of the parents' batch."""
        for batch in self._batches(nodes, own_states=state is not None):
            try:
                new_state = self._step(batch, state)
            except torch.OutOfMemoryError:
                torch.cuda.empty_cache()
                if len(batch) == 1:
                    raise
                self.batch_tokens = max(1, self.batch_tokens // 2)
                self.state_bytes //= 2
                self._score_subtrees(batch[: len(batch) // 2], state)
                self._score_subtrees(batch[len(batch) // 2 :], state)
                continue
            self._score_subtrees([child for node in batch for child in node.children], new_state)
            del new_state

    def _batches(self, nodes: Sequence[Node], own_states: bool = False) -> Iterator[list[Node]]:
        """Yield batches of nodes of similar length, longest first, so that a lack of memory appears at once.

        own_states: whether each node begins from a state of its own.
        """
        enough = _ENOUGH_CUDA if self.device.type == "cuda" else _ENOUGH_CPU
        # Leaves need no end state, which is most of the memory.
        for group in ([n for n in nodes if n.children], [n for n in nodes if not n.children]):
            batch: list[Node] = []
            for node in sorted(group, key=lambda n: -len(n.tokens)):
                longest = len(batch[0].tokens) if batch else len(node.tokens)
                size = self._bytes_per_row + self._bytes_per_token * longest
                rows = self.state_bytes // size if node.children or own_states else self.batch_tokens
                max_rows = min(self.batch_tokens // longest, rows)
                # Once a batch fills the device, padding costs more than another batch. Nodes with children are not split by
                # length, because the batches of their children would become smaller.
                padded = not node.children and len(node.tokens) < _EVEN * longest
                if batch and (len(batch) >= max_rows or (padded and len(batch) * longest >= enough)):
                    yield batch
                    batch = []
                batch.append(node)
            if batch:
                yield batch

    def _step(self, batch: list[Node], state: State | None) -> State | None:
        lengths = torch.tensor([len(node.tokens) for node in batch])
        tokens = torch.zeros(len(batch), int(lengths.max()), dtype=torch.long)
        for row, node in enumerate(batch):
            tokens[row, : len(node.tokens)] = torch.from_numpy(node.tokens)
        keep = any(node.children for node in batch)
        # Right padding follows every real token of a causal model: only a state would contain it.
        mask = (
            torch.arange(tokens.shape[1]) < lengths[:, None] if keep and bool((lengths < lengths.max()).any()) else None
        )
        rows = None if state is None else torch.tensor([node.row for node in batch])
        hidden, new_state = self._forward(tokens, mask, state, keep, rows)
        self._add_scores(batch, hidden)
        self.read += int(lengths.sum())
        self.shapes[tokens.shape[0], tokens.shape[1]] += 1
        for row, node in enumerate(batch):
            for child in node.children:
                child.row = row
        return new_state if keep else None

    def _forward(
        self, tokens: Tensor, mask: Tensor | None, state: State | None, keep: bool, rows: Tensor | None = None
    ) -> tuple[Tensor, State]:
        """Return the hidden states, and with `keep` the new states. rows: row of `state` from which each row begins."""
        x = self._to_device(tokens)
        mask = None if mask is None else self._to_device(mask)
        rows = None if rows is None else self._to_device(rows)
        layers = [self.model.embedding, *self.model.blocks]
        new_state: State = []
        for number, layer in enumerate(layers):
            initial = None
            if state is not None and rows is not None:
                initial = {key: value.index_select(0, rows) for key, value in state[number].items()}
            x = layer(x, mask=mask, state=initial, return_state=keep)
            if keep:
                x, end = x
                new_state.append(end)
        return x, new_state

    def _add_scores(self, batch: list[Node], hidden: Tensor) -> None:
        """Add the scores of a batch's targets to the requests' sums: all of them, or none when memory runs out."""
        length = hidden.shape[1]
        spans = [(row * length + span.first, span) for row, node in enumerate(batch) for span in node.spans]
        if not spans:
            return
        counts = np.array([len(span.targets) for _, span in spans])
        starts = np.array([place for place, _ in spans]) - (np.cumsum(counts) - counts)
        places = np.repeat(starts, counts) + np.arange(counts.sum())
        order = np.argsort(places, kind="stable")
        unique, which = np.unique(places[order], return_inverse=True)
        tokens = np.concatenate([span.targets for _, span in spans])[order]
        owners = np.repeat([span.request for _, span in spans], counts)[order]
        rows = hidden.reshape(-1, hidden.shape[-1])[self._to_device(torch.from_numpy(unique))]
        row, targets, requests = self._to_device(torch.from_numpy(np.stack([which, tokens, owners])))
        log_likelihood = torch.empty(len(places), dtype=torch.float64, device=self.device)
        greedy = torch.empty(len(places), dtype=torch.bool, device=self.device)
        elements = _LOGITS_CUDA if self.device.type == "cuda" else _LOGITS_CPU
        step = max(1, elements // self.model.config.vocab_size)
        first = range(0, len(unique), step)
        bounds = np.searchsorted(which, [*first, len(unique)]).tolist()
        for start, (low, high) in zip(first, itertools.pairwise(bounds), strict=True):
            index, target = row[low:high] - start, targets[low:high]
            logits = self.model.head(rows[start : start + step])
            chosen = to_accumulation_dtype(logits[index, target])
            best, log_sum = _likeliest(logits)
            log_likelihood[low:high] = chosen - log_sum[index]
            greedy[low:high] = best[index] == target
        self._sums.index_add_(0, requests, log_likelihood)
        self._misses.index_add_(0, requests, (~greedy).long())


def _likeliest(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return the index of the largest logit and the log of sum(exp), per row of [rows, vocab]. May overwrite the logits."""
    if is_supported(logits):
        from models.kernels.cross_entropy import row_statistics

        largest, best, mass, _ = row_statistics(logits, None, torch.zeros_like(logits[:, 0], dtype=torch.int64))
        return best, largest + mass.log()
    z = to_accumulation_dtype(logits)
    peak, best = z.max(-1)
    return best, peak + z.sub_(peak[:, None]).exp_().sum(-1).log()


@torch.inference_mode()
def _state_bytes(scorer: Scorer) -> tuple[int, int]:
    """Return the bytes of a state, and its bytes per token: 0 for recurrent states, more for a cache of keys and values."""
    sizes = []
    for length in (1, 2):
        state = scorer._forward(torch.zeros(1, length, dtype=torch.long), None, None, True)[1]
        sizes.append(sum(value.nbytes for layer in state for value in layer.values()))
    return max(1, 2 * sizes[0] - sizes[1]), sizes[1] - sizes[0]


@torch.inference_mode()
def _tokens_that_fit(scorer: Scorer) -> int:
    """Return the tokens whose forward pass takes half of the free memory, or fits the caches of a CPU."""
    if scorer.device.type != "cuda":
        return 4096
    tokens = 4096
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(scorer.device)
    allocated = torch.cuda.memory_allocated(scorer.device)
    scorer._forward(torch.zeros(tokens // 64, 64, dtype=torch.long), None, None, False)
    needed = (torch.cuda.max_memory_allocated(scorer.device) - allocated) / tokens
    free = torch.cuda.mem_get_info(scorer.device)[0]
    # Beyond 2^17 tokens nothing gets faster.
    return int(min(1 << 17, max(tokens, free / 2 / needed)))
