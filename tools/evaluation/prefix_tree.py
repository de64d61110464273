"""Token sequences as a tree of shared prefixes, so that what several requests have in common is computed once.

A question with four endings is read once and continued four times; a paragraph with fifty questions is read once. The
recurrent state of a linear model makes this free: a branch starts from a copy of its parent's state.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int64]


class Question(NamedTuple):
    """For `request`: after token `first` of a node, how likely is targets[0], after the next one targets[1], ..."""

    request: int
    first: int
    targets: Ids


@dataclass(slots=True)
class Node:
    """A run of tokens after its parent's, and what is asked of its positions.

    Attributes:
        tokens: [length] ids, at least one.
        children: nodes that go on after the last token.
        questions: any number; a token may be asked about more than once.
        row: place in the batch that computed the node; children find the parent's state there.
    """

    tokens: Ids
    children: list[Node] = field(default_factory=list)
    questions: list[Question] = field(default_factory=list)
    row: int = 0

    @property
    def size(self) -> int:
        """Return the tokens of this node and of all nodes below."""
        total, stack = 0, [self]
        while stack:
            node = stack.pop()
            total += len(node.tokens)
            stack.extend(node.children)
        return total

    @property
    def asked_by(self) -> set[int]:
        """Return the requests that this node or a node below answers."""
        found: set[int] = set()
        stack = [self]
        while stack:
            node = stack.pop()
            found.update(question.request for question in node.questions)
            stack.extend(node.children)
        return found


def build_forest(inputs: Sequence[Ids], targets: Sequence[Ids], *, shortest: int = 16) -> list[Node]:
    """Return the roots of the trees that hold all inputs.

    Args:
        inputs: the tokens that the model reads for each request, at least one each.
        targets: the tokens that its last positions are to predict: targets[r][-1] after inputs[r][-1], and so on
            backwards; at most as many as there are inputs.
        shortest: prefixes of fewer tokens are not shared: copying a state costs as much as reading a few tokens.
    """
    # Big-endian bytes sort as the ids do, so that neighbours share the longest prefixes.
    keys = [np.asarray(ids).astype(">u4").tobytes() for ids in inputs]
    by_key: dict[bytes, list[int]] = {}
    for request, key in enumerate(keys):
        by_key.setdefault(key, []).append(request)
    ordered = sorted(by_key)
    sequences = [np.asarray(inputs[by_key[key][0]], np.int64) for key in ordered]
    shared = np.array([0, *(_common(a, b) for a, b in itertools.pairwise(sequences))], np.int64)

    roots: list[Node] = []
    # (first, end, depth, path): sequences first to end, of which `depth` tokens are already in the nodes of the path.
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
                _ask(path, sequence, np.asarray(targets[request], np.int64), request)
            continue
        common = int(shared[first + 1 : end].min())
        if common - depth >= shortest:
            node = Node(sequence[depth:common])
            siblings.append(node)
            path, depth = (*path, (depth, node)), common
        bounds = [first, *(first + 1 + np.flatnonzero(shared[first + 1 : end] == common)).tolist(), end]
        stack.extend((low, high, depth, path) for low, high in itertools.pairwise(bounds))
    return roots


def _common(a: Ids, b: Ids) -> int:
    length = min(len(a), len(b))
    different = a[:length] != b[:length]
    return int(different.argmax()) if different.any() else length


def _ask(path: tuple[tuple[int, Node], ...], sequence: Ids, targets: Ids, request: int) -> None:
    first = len(sequence) - len(targets)
    for start, node in path:
        end = start + len(node.tokens)
        low = max(first, start)
        if low < end:
            node.questions.append(Question(request, low - start, targets[low - first : end - first]))
