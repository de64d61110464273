"""Generate ListOps: nested operations on lists of digits whose result is a digit.

Source: Nangia and Bowman 2018 (arXiv 1804.06028), with the long sequences of Long Range Arena (Tay et al. 2020, arXiv
2011.04006).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .examples import Examples

# The index is the id. A digit is its own id and class.
TOKENS = (*"0123456789", "[MIN", "[MAX", "[MED", "[SM", "]", "<pad>")
CLASSES = 10
MIN, MAX, MED, SM, CLOSE, PAD = range(10, 16)
# Expressions drawn together. Most are too short or too long and are dropped before their tokens are written.
_TREES = 4_000
# Elements that an expression may have on average, so that the memory of a draw has a bound.
_MOST_ELEMENTS = 5_000
# Draws without a single expression of the required length, after which such expressions count as too rare.
_DRAWS = 100

Numbers = NDArray[np.int64]


def listops(
    examples: int,
    length: int = 2000,
    *,
    shortest: int = 500,
    depth: int = 10,
    arguments: int = 10,
    nested: float = 0.25,
    seed: int | list[int] = 0,
) -> Examples:
    """Return expressions such as `[MAX 2 9 [MIN 4 7 ] 0 ]`, padded with PAD on the right, and their values.

    Above level `depth` (the whole expression is level 1) an element is an operation with probability `nested`, else a digit. At
    level `depth` it is a digit. An operation is MIN, MAX, MED (median, rounded down) or SM (sum modulo 10) with equal
    probability, of 2 to `arguments` elements. Only expressions of `shortest` to `length` tokens are used. A bracket and its
    operation are one token.

    Returns tokens [examples, length] int8 and labels [examples, 1] int32, 0 to 9.

    Raises ValueError for impossible or very rare lengths, for fewer than 2 arguments or levels, and for `nested` that is no
    probability or makes expressions too large to draw.
    """
    if arguments < 2 or depth < 2:
        raise ValueError(f"{arguments} arguments, depth {depth}: at least 2 each is required")
    if not 0 <= nested <= 1:
        raise ValueError(f"nested = {nested}: a probability from 0 to 1 is allowed")
    if _average_elements(depth, arguments, nested) > _MOST_ELEMENTS:
        raise ValueError(
            f"nested = {nested:g}, arguments = {arguments}, depth = {depth}: expressions have more than {_MOST_ELEMENTS:,} "
            "elements on average; lower one of them"
        )
    longest = 1 + _most_tokens(depth, arguments)
    if not 4 <= shortest <= length or shortest > longest:
        raise ValueError(
            f"lengths {shortest} to {length}: with {arguments} arguments and depth {depth} expressions have 4 to {longest - 1}"
        )
    generator = np.random.default_rng(seed)
    tokens = np.full((examples, length), PAD, np.int8)
    labels = np.empty((examples, 1), np.int32)
    done = draws = 0
    while done < examples:
        if draws == _DRAWS and not done:
            raise ValueError(
                f"lengths {shortest} to {length}: none of {draws * _TREES:,} expressions with {arguments} arguments, depth "
                f"{depth} and nested = {nested:g} has such a length; lower shortest, or raise depth, arguments or nested"
            )
        draws += 1
        levels = _draw(generator, depth, arguments, nested)
        size = levels[0].size
        valid = np.flatnonzero((size >= shortest) & (size <= length))[: examples - done]
        levels = _select(levels, valid)
        labels[done : done + len(valid), 0] = _values(levels)
        _write(levels, tokens[done : done + len(valid)])
        done += len(valid)
    return Examples(tokens, labels)


@dataclass
class _Level:
    """Hold the elements of one level of many expressions; the arguments of an operation are adjacent.

    Attributes, int64 [elements]:
        tree: number of the expression. operation: MIN to SM, or -1 for a digit. digit: value of a digit.
        count: number of arguments, 0 for digits. size: tokens of the element, arguments included.
    """

    tree: Numbers
    operation: Numbers
    digit: Numbers
    count: Numbers
    size: Numbers

    @property
    def first(self) -> Numbers:
        """Return the position in the next level of the first argument of each operation."""
        counts = self.count[self.operation >= 0]
        return np.cumsum(counts) - counts


def _draw(generator: np.random.Generator, depth: int, arguments: int, nested: float) -> list[_Level]:
    """Return expressions level by level. The first level is always an operation, since a single digit is too short."""
    levels: list[_Level] = []
    tree = np.arange(_TREES)
    for number in range(1, depth + 1):
        inner = np.full(len(tree), number == 1) if number in (1, depth) else generator.random(len(tree)) < nested
        operation = np.where(inner, generator.integers(MIN, SM + 1, len(tree)), -1)
        count = np.where(inner, generator.integers(2, arguments + 1, len(tree)), 0)
        levels.append(_Level(tree, operation, generator.integers(0, 10, len(tree)), count, np.ones_like(tree)))
        tree = np.repeat(tree, count)
        if not len(tree):
            break
    for upper, lower in zip(levels[-2::-1], levels[:0:-1], strict=True):
        inner = upper.operation >= 0
        upper.size[inner] = 2 + np.add.reduceat(lower.size, upper.first) if inner.any() else 0
    return levels


def _select(levels: list[_Level], selected: Numbers) -> list[_Level]:
    """Return the selected expressions, renumbered from 0."""
    number = np.full(_TREES, -1)
    number[selected] = np.arange(len(selected))
    selected_levels = []
    for level in levels:
        stays = number[level.tree] >= 0
        if stays.any():
            parts = (level.operation, level.digit, level.count, level.size)
            selected_levels.append(_Level(number[level.tree[stays]], *(part[stays] for part in parts)))
    return selected_levels


def _values(levels: list[_Level]) -> Numbers:
    """Return the value of every expression, computed from the innermost level outwards."""
    below = np.empty(0, np.int64)
    for level in reversed(levels):
        value = level.digit.copy()
        inner = level.operation >= 0
        if inner.any():
            value[inner] = _applied(level.operation[inner], level.count[inner], level.first, below)
        below = value
    return below


def _applied(operation: Numbers, count: Numbers, first: Numbers, values: Numbers) -> Numbers:
    group = np.repeat(np.arange(len(count)), count)
    ordered = values[np.lexsort((values, group))]
    low, high = ordered[first + (count - 1) // 2], ordered[first + count // 2]
    results = {
        MIN: ordered[first],
        MAX: ordered[first + count - 1],
        MED: (low + high) // 2,
        SM: np.add.reduceat(values, first) % 10,
    }
    return np.select([operation == kind for kind in results], list(results.values()))


def _write(levels: list[_Level], out: NDArray[np.int8]) -> None:
    """Write the tokens of the expressions to `out` [expressions, length], from the first column on."""
    place = np.zeros(len(out), np.int64)
    for number, level in enumerate(levels):
        inner = level.operation >= 0
        out[level.tree, place] = np.where(inner, level.operation, level.digit)
        out[level.tree[inner], place[inner] + level.size[inner] - 1] = CLOSE
        if inner.any():
            # An argument begins after the bracket of its operation and the previous arguments.
            lower = levels[number + 1]
            offset = np.cumsum(lower.size) - lower.size
            place = np.repeat(place[inner] + 1 - offset[level.first], level.count[inner]) + offset


def _average_elements(depth: int, arguments: int, nested: float) -> float:
    """Return the expected number of elements of an expression, or a part of it above `_MOST_ELEMENTS`."""
    children = (2 + arguments) / 2
    elements, level = 1.0, children
    for _ in range(depth - 1):
        elements += level
        level *= nested * children
        if elements > _MOST_ELEMENTS:
            break
    return elements


def _most_tokens(depth: int, arguments: int) -> int:
    """Return the number of tokens of the largest expression, at most 10^6."""
    size = 1
    for _ in range(depth - 1):
        size = min(10**6, 2 + arguments * size)
    return size
