"""Arrange token sequences as a tree of shared prefixes, so that a common prefix of several requests is computed once.

A question with four endings is read once and continued four times; a paragraph with fifty questions is read once. A branch
starts from a copy of its parent's recurrent state.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int64]
_SHORTEST = 16  # tokens of a prefix that is shared


class Span(NamedTuple):
    """Hold the targets of `request` in one node: targets[0] follows the node's token `first`, targets[1] the next one."""

    request: int
    first: int
    targets: Ids


@dataclass(slots=True)
class Node:
    """Hold the tokens after the parent's, and the spans whose targets they predict.

    Attributes:
        tokens: [length] ids, at least one.
        children: nodes that continue after the last token.
        spans: any number; several may have targets after one token.
        row: row of the node in its batch, which holds the state for the children.
    """

    tokens: Ids
    children: list[Node] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    row: int = 0

    @property
    def size(self) -> int:
        """Return the tokens of this node and of all nodes below."""
        return sum(len(node.tokens) for node in self._subtree())

    @property
    def requests(self) -> set[int]:
        """Return the requests with targets in this node or a node below."""
        return {span.request for node in self._subtree() for span in node.spans}

    def _subtree(self) -> Iterator[Node]:
        stack = [self]
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children)


def build_forest(inputs: Sequence[Ids], targets: Sequence[Ids], *, shortest: int = _SHORTEST) -> list[Node]:
    """Return the roots of the trees that hold all inputs.

    Args:
        inputs: the tokens that the model reads for each request, at least one each.
        targets: the tokens that the last positions predict: targets[r][-1] follows inputs[r][-1], and so on backwards.
            There are at most as many as inputs.
        shortest: shorter prefixes are not shared, because copying a state costs as much as reading a few tokens.
    """
    # Big-endian bytes sort as the ids do, so that neighbours share the longest prefixes.
    keys = [np.asarray(ids).astype(">u4").tobytes() for ids in inputs]
    by_key: dict[bytes, list[int]] = {}
    for request, key in enumerate(keys):
        by_key.setdefault(key, []).append(request)
    ordered = sorted(by_key)
    sequences = [np.asarray(inputs[by_key[key][0]], np.int64) for key in ordered]
    shared = np.array([0, *(_shared_length(a, b) for a, b in itertools.pairwise(sequences))], np.int64)

    roots: list[Node] = []
    # (first, end, depth, path): sequences first to end, whose first `depth` tokens are in the nodes of the path.
    stack: list[tuple[int, int, int, tuple[tuple[int, Node], ...]]] = [(0, len(ordered), 0, ())]
    while stack:
        first, end, depth, path = stack.pop()
        if first == end:
            continue
        siblings = path[-1][1].children if path else roots
        sequence = sequences[first]
        if end - first == 1:
            if len(sequence) > depth:
                leaf = Node(sequence[depth:])
                siblings.append(leaf)
                path = (*path, (depth, leaf))
            for request in by_key[ordered[first]]:
                _add_spans(path, sequence, np.asarray(targets[request], np.int64), request)
            continue
        common = int(shared[first + 1 : end].min())
        if common - depth >= shortest:
            node = Node(sequence[depth:common])
            siblings.append(node)
            path, depth = (*path, (depth, node)), common
        bounds = [first, *(first + 1 + np.flatnonzero(shared[first + 1 : end] == common)).tolist(), end]
        stack.extend((low, high, depth, path) for low, high in itertools.pairwise(bounds))
    return roots


def shared_order(prompts: Sequence[Ids]) -> tuple[list[int], list[int]]:
    """Return an order of prompts with growing common beginnings, and the tokens that each shares with all later ones.

    The last token of a prompt is never shared, because its output is the first of the answer. Prompts of about equal common
    beginnings are ordered by length, longest first. Beginnings below 16 tokens count as 0.
    """
    if not prompts:
        return [], []
    ordered = sorted(range(len(prompts)), key=lambda i: prompts[i].astype(">u4").tobytes())
    # The reference is a prompt with the longest beginning in common with another one.
    pairs = [(_shared_length(prompts[a], prompts[b]), a) for a, b in itertools.pairwise(ordered)]
    reference = prompts[max(pairs)[1] if pairs else 0]
    shared = [min(_shared_length(prompt, reference), len(prompt) - 1) for prompt in prompts]
    order = sorted(range(len(prompts)), key=lambda i: (shared[i] // 128, -len(prompts[i])))
    later = list(itertools.accumulate((shared[i] for i in reversed(order)), min))[::-1]
    return order, [length if length >= _SHORTEST else 0 for length in later]


def _shared_length(a: Ids, b: Ids) -> int:
    length = min(len(a), len(b))
    different = a[:length] != b[:length]
    return int(different.argmax()) if different.any() else length


def _add_spans(path: tuple[tuple[int, Node], ...], sequence: Ids, targets: Ids, request: int) -> None:
    first = len(sequence) - len(targets)
    for start, node in path:
        end = start + len(node.tokens)
        low = max(first, start)
        if low < end:
            node.spans.append(Span(request, low - start, targets[low - first : end - first]))
