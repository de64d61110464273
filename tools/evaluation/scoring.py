"""Log-likelihoods of continuations under a causal model of this project, in batches over a tree of shared prefixes.

Only the positions that are asked about go through the output projection; the vocabulary is never formed for the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from models.lm import LanguageModel
from models.precision import wide
from tools.evaluation.prefix_tree import Ids, Node, build_forest

State = list[dict[str, Tensor]]
Answer = tuple[float, bool]
# Logits formed at a time, in elements.
_LOGITS_CPU, _LOGITS_CUDA = 1 << 23, 1 << 28


@dataclass
class Scorer:
    """Scores requests on one process.

    Attributes:
        model: causal, in evaluation mode.
        batch_tokens: tokens of a batch, padding included; 0 measures what fits. Halved for good when memory runs out.
        state_bytes: what the states of a batch may take.
        read: tokens that went through the model so far, padding excluded.
    """

    model: LanguageModel
    batch_tokens: int = 0
    state_bytes: int = 0
    read: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self.device = next(self.model.parameters()).device
        if not self.batch_tokens:
            self.batch_tokens = _tokens_that_fit(self)
        if not self.state_bytes:
            memory = torch.cuda.mem_get_info(self.device)[0] if self.device.type == "cuda" else 2 << 30
            self.state_bytes = memory // 8
        self._bytes_a_row, self._bytes_a_token = _state_bytes(self)

    def units(self, contexts: Sequence[Ids], targets: Sequence[Ids]) -> list[Node]:
        """What can be shared out over processes: the trees of all requests, the most tokens first.

        contexts, targets: [length] ids of each request, at least one each; all but the last token are read.
        """
        pairs = zip(contexts, targets, strict=True)
        forest = build_forest([np.concatenate([context, target[:-1]]) for context, target in pairs], targets)
        return sorted(forest, key=lambda node: -node.size)

    @torch.inference_mode()
    def score_units(
        self, units: Sequence[Node], requests: int, *, done: Callable[[list[tuple[int, Answer]]], None]
    ) -> None:
        """Hands every request's (number, (log-likelihood, whether all targets are the likeliest tokens)) to `done`.

        `done` is called after every batch of trees; the numbers are below `requests`.
        """
        self._sums = torch.zeros(requests, dtype=torch.float64, device=self.device)
        self._misses = torch.zeros(requests, dtype=torch.int64, device=self.device)
        for batch in self._batches(units):
            self._descend(batch, None)
            answered = sorted(set().union(*(node.asked_by for node in batch)))
            index = torch.tensor(answered, device=self.device)
            sums, misses = self._sums[index].tolist(), self._misses[index].tolist()
            done([(r, (total, miss == 0)) for r, total, miss in zip(answered, sums, misses, strict=True)])

    def _descend(self, nodes: Sequence[Node], state: State | None) -> None:
        """Computes nodes of one depth and everything below; `state` is that of their parents' batch."""
        for batch in self._batches(nodes, below=state is not None):
            try:
                new_state = self._step(batch, state)
            except torch.OutOfMemoryError:
                torch.cuda.empty_cache()
                if len(batch) == 1:
                    raise
                self.batch_tokens = max(1, self.batch_tokens // 2)
                self.state_bytes //= 2
                self._descend(batch[: len(batch) // 2], state)
                self._descend(batch[len(batch) // 2 :], state)
                continue
            self._descend([child for node in batch for child in node.children], new_state)
            del new_state

    def _batches(self, nodes: Sequence[Node], below: bool = False) -> Iterator[list[Node]]:
        """Longest first, so that neighbours are of one length and memory runs out at once or never.

        below: that the nodes begin from a state of their own each.
        """
        # Leaves need no state after them, which is most of the memory.
        for group in ([n for n in nodes if n.children], [n for n in nodes if not n.children]):
            batch: list[Node] = []
            for node in sorted(group, key=lambda n: -len(n.tokens)):
                longest = len(batch[0].tokens) if batch else len(node.tokens)
                size = self._bytes_a_row + self._bytes_a_token * longest
                rows = self.state_bytes // size if node.children or below else self.batch_tokens
                most = min(self.batch_tokens // longest, rows)
                if batch and len(batch) >= most:
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
        # Padding on the right is behind every real token of a causal model; only a state would see it.
        mask = (
            torch.arange(tokens.shape[1]) < lengths[:, None] if keep and bool((lengths < lengths.max()).any()) else None
        )
        if state is not None:
            rows = torch.tensor([node.row for node in batch], device=self.device)
            state = [{key: value.index_select(0, rows) for key, value in layer.items()} for layer in state]
        hidden, new_state = self._forward(tokens, mask, state, keep)
        self._answer(batch, hidden)
        self.read += int(lengths.sum())
        for row, node in enumerate(batch):
            for child in node.children:
                child.row = row
        return new_state if keep else None

    def _forward(self, tokens: Tensor, mask: Tensor | None, state: State | None, keep: bool) -> tuple[Tensor, State]:
        x = tokens.to(self.device)
        mask = None if mask is None else mask.to(self.device)
        layers = [self.model.embedding, *self.model.blocks]
        new_state: State = []
        for layer, before in zip(layers, [None] * len(layers) if state is None else state, strict=True):
            x = layer(x, mask=mask, state=before, return_state=keep)
            if keep:
                x, after = x
                new_state.append(after)
        return x, new_state

    def _answer(self, batch: list[Node], hidden: Tensor) -> None:
        """Adds what the batch's positions say to the requests' sums: all of it, or nothing when memory runs out."""
        length = hidden.shape[1]
        asked = [(row * length, node) for row, node in enumerate(batch) if node.offsets]
        if not asked:
            return
        places = np.concatenate([start + offsets for start, node in asked for offsets in node.offsets])
        targets = torch.from_numpy(np.concatenate([t for _, node in asked for t in node.targets])).to(self.device)
        requests = torch.from_numpy(np.concatenate([r for _, node in asked for r in node.requests])).to(self.device)
        unique, which = np.unique(places, return_inverse=True)
        rows = hidden.reshape(-1, hidden.shape[-1])[torch.from_numpy(unique).to(self.device)]
        log_likelihood = torch.empty(len(places), dtype=torch.float64, device=self.device)
        greedy = torch.empty(len(places), dtype=torch.bool, device=self.device)
        elements = _LOGITS_CUDA if self.device.type == "cuda" else _LOGITS_CPU
        step = max(1, elements // self.model.config.vocab_size)
        order = np.argsort(which, kind="stable")
        bounds = np.searchsorted(which[order], np.arange(0, len(unique) + step, step))
        for chunk, start in enumerate(range(0, len(unique), step)):
            members = torch.from_numpy(order[bounds[chunk] : bounds[chunk + 1]]).to(self.device)
            row = torch.from_numpy(which[order[bounds[chunk] : bounds[chunk + 1]]] - start).to(self.device)
            logits = wide(self.model.head(rows[start : start + step]))
            best, mass = logits.argmax(-1), torch.logsumexp(logits, -1)
            wanted = targets[members]
            log_likelihood[members] = (logits[row, wanted] - mass[row]).double()
            greedy[members] = best[row] == wanted
        self._sums.index_add_(0, requests, log_likelihood)
        self._misses.index_add_(0, requests, (~greedy).long())


@torch.inference_mode()
def _state_bytes(scorer: Scorer) -> tuple[int, int]:
    """What a state takes, and a token more: nothing for recurrent states, something for a cache of keys and values."""
    sizes = []
    for length in (1, 2):
        state = scorer._forward(torch.zeros(1, length, dtype=torch.long), None, None, True)[1]
        sizes.append(sum(value.nbytes for layer in state for value in layer.values()))
    return max(1, 2 * sizes[0] - sizes[1]), sizes[1] - sizes[0]


@torch.inference_mode()
def _tokens_that_fit(scorer: Scorer) -> int:
    """Tokens whose forward pass takes half of the free memory; on a CPU what stays near its caches."""
    if scorer.device.type != "cuda":
        return 4096
    tokens = 4096
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(scorer.device)
    before = torch.cuda.memory_allocated(scorer.device)
    scorer._forward(torch.zeros(tokens // 64, 64, dtype=torch.long), None, None, False)
    needed = (torch.cuda.max_memory_allocated(scorer.device) - before) / tokens
    free = torch.cuda.mem_get_info(scorer.device)[0]
    # Beyond 2^17 tokens nothing gets faster.
    return int(min(1 << 17, max(tokens, free / 2 / needed)))
