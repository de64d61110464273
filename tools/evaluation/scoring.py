"""Log-likelihoods of continuations under a causal model of this project, in batches over a tree of shared prefixes.

Only the positions that are asked about go through the output projection; the vocabulary is never formed for the rest.
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
Answer = tuple[float, bool]
# Logits formed at a time, in elements.
_LOGITS_CPU, _LOGITS_CUDA = 1 << 23, 1 << 28
# Tokens of a batch that keep a device busy, and how much shorter than its longest row another of it may be then.
_ENOUGH_CPU, _ENOUGH_CUDA, _EVEN = 1 << 10, 1 << 14, 0.875


@dataclass
class Scorer:
    """Scores requests on one process.

    Attributes:
        model: causal, in evaluation mode.
        batch_tokens: tokens of a batch, padding included; 0 measures what fits. Halved for good when memory runs out.
        state_bytes: what the states of a batch may take.
        read: tokens that went through the model so far, padding excluded.
        shapes: how many batches of each (rows, length) went through the model so far.
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
        self._bytes_a_row, self._bytes_a_token = _state_bytes(self)

    def units(self, contexts: Sequence[Ids], targets: Sequence[Ids]) -> list[Node]:
        """Return the units of work: the trees of all requests, the most tokens first.

        contexts, targets: [length] ids of each request, at least one each; all but the last token are read.
        """
        pairs = zip(contexts, targets, strict=True)
        forest = build_forest([np.concatenate([context, target[:-1]]) for context, target in pairs], targets)
        return sorted(forest, key=lambda node: -node.size)

    @torch.inference_mode()
    def score_units(
        self, units: Sequence[Node], requests: int, *, done: Callable[[list[tuple[int, Answer]]], None]
    ) -> None:
        """Pass every request's (number, (log-likelihood, whether all targets are the likeliest tokens)) to `done`.

        `done` is called after every batch of trees; the numbers are below `requests`.
        """
        self._sums = torch.zeros(requests, dtype=torch.float64, device=self.device)
        self._misses = torch.zeros(requests, dtype=torch.int64, device=self.device)
        before: Callable[[], list[tuple[int, Answer]]] | None = None
        for batch in self._batches(units):
            self._descend(batch, None)
            answers = self._answers(sorted(set().union(*(node.asked_by for node in batch))))
            # Waits for the batch before, so that the device has the next one's work while this process prepares more.
            if before is not None:
                done(before())
            before = answers
        if before is not None:
            done(before())

    def _answers(self, requests: list[int]) -> Callable[[], list[tuple[int, Answer]]]:
        """Return a function that waits for the device and returns the sums of these requests."""
        index = self._moved(torch.tensor(requests))
        sums, misses = (x[index].to("cpu", non_blocking=True) for x in (self._sums, self._misses))
        ready = torch.cuda.Event() if self.device.type == "cuda" else None
        if ready is not None:
            ready.record(torch.cuda.current_stream(self.device))

        def wait() -> list[tuple[int, Answer]]:
            if ready is not None:
                ready.synchronize()
            found = zip(requests, sums.tolist(), misses.tolist(), strict=True)
            return [(request, (total, missed == 0)) for request, total, missed in found]

        return wait

    def _moved(self, x: Tensor) -> Tensor:
        """Copy x to the device, without waiting for the work that is queued there."""
        return x.pin_memory().to(self.device, non_blocking=True) if self.device.type == "cuda" else x

    def _descend(self, nodes: Sequence[Node], state: State | None) -> None:
        """Compute nodes of one depth and everything below. `state` is the state of their parents' batch."""
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
        """Yield batches of nodes, longest first: neighbours have about one length, and a lack of memory shows at once.

        below: that the nodes begin from a state of their own each.
        """
        enough = _ENOUGH_CUDA if self.device.type == "cuda" else _ENOUGH_CPU
        # Leaves need no state after them, which is most of the memory.
        for group in ([n for n in nodes if n.children], [n for n in nodes if not n.children]):
            batch: list[Node] = []
            for node in sorted(group, key=lambda n: -len(n.tokens)):
                longest = len(batch[0].tokens) if batch else len(node.tokens)
                size = self._bytes_a_row + self._bytes_a_token * longest
                rows = self.state_bytes // size if node.children or below else self.batch_tokens
                most = min(self.batch_tokens // longest, rows)
                # Padding costs more than one batch more, once the batch fills the device. A batch with children is the
                # beginning of theirs, and these should be many.
                padded = not node.children and len(node.tokens) < _EVEN * longest
                if batch and (len(batch) >= most or (padded and len(batch) * longest >= enough)):
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
        rows = None if state is None else torch.tensor([node.row for node in batch])
        hidden, new_state = self._forward(tokens, mask, state, keep, rows)
        self._answer(batch, hidden)
        self.read += int(lengths.sum())
        self.shapes[tokens.shape[0], tokens.shape[1]] += 1
        for row, node in enumerate(batch):
            for child in node.children:
                child.row = row
        return new_state if keep else None

    def _forward(
        self, tokens: Tensor, mask: Tensor | None, state: State | None, keep: bool, rows: Tensor | None = None
    ) -> tuple[Tensor, State]:
        """state: of which a row of tokens begins with the one that `rows` says."""
        x = self._moved(tokens)
        mask = None if mask is None else self._moved(mask)
        rows = None if rows is None else self._moved(rows)
        layers = [self.model.embedding, *self.model.blocks]
        new_state: State = []
        for number, layer in enumerate(layers):
            before = None
            if state is not None and rows is not None:
                before = {key: value.index_select(0, rows) for key, value in state[number].items()}
            x = layer(x, mask=mask, state=before, return_state=keep)
            if keep:
                x, after = x
                new_state.append(after)
        return x, new_state

    def _answer(self, batch: list[Node], hidden: Tensor) -> None:
        """Add the answers of a batch's positions to the requests' sums: all of them, or none when memory runs out."""
        length = hidden.shape[1]
        asked = [
            (row * length + question.first, question) for row, node in enumerate(batch) for question in node.questions
        ]
        if not asked:
            return
        counts = np.array([len(question.targets) for _, question in asked])
        starts = np.array([place for place, _ in asked]) - (np.cumsum(counts) - counts)
        places = np.repeat(starts, counts) + np.arange(counts.sum())
        order = np.argsort(places, kind="stable")
        unique, which = np.unique(places[order], return_inverse=True)
        wanted = np.concatenate([question.targets for _, question in asked])[order]
        owners = np.repeat([question.request for _, question in asked], counts)[order]
        rows = hidden.reshape(-1, hidden.shape[-1])[self._moved(torch.from_numpy(unique))]
        row, targets, requests = self._moved(torch.from_numpy(np.stack([which, wanted, owners])))
        log_likelihood = torch.empty(len(places), dtype=torch.float64, device=self.device)
        greedy = torch.empty(len(places), dtype=torch.bool, device=self.device)
        elements = _LOGITS_CUDA if self.device.type == "cuda" else _LOGITS_CPU
        step = max(1, elements // self.model.config.vocab_size)
        first = range(0, len(unique), step)
        bounds = np.searchsorted(which, [*first, len(unique)]).tolist()
        for start, (low, high) in zip(first, itertools.pairwise(bounds), strict=True):
            here, target = row[low:high] - start, targets[low:high]
            logits = self.model.head(rows[start : start + step])
            chosen = to_accumulation_dtype(logits[here, target])
            best, log_sum = _likeliest(logits)
            log_likelihood[low:high] = chosen - log_sum[here]
            greedy[low:high] = best[here] == target
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
    """Return the bytes of a state, and the bytes per token: 0 for recurrent states, more for a cache of keys and values."""
    sizes = []
    for length in (1, 2):
        state = scorer._forward(torch.zeros(1, length, dtype=torch.long), None, None, True)[1]
        sizes.append(sum(value.nbytes for layer in state for value in layer.values()))
    return max(1, 2 * sizes[0] - sizes[1]), sizes[1] - sizes[0]


@torch.inference_mode()
def _tokens_that_fit(scorer: Scorer) -> int:
    """Return the tokens whose forward pass takes half of the free memory, or on a CPU fits its caches."""
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
