"""Hold generated examples, and draw without replacement in all rows at once."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.integer[Any]]

# Label of a position that does not count in the loss.
UNLABELLED = -100


class Examples(NamedTuple):
    """Hold tokens [examples, length], and labels of the same shape or [examples, 1] for one label per example.

    Positions without a label hold UNLABELLED.
    """

    tokens: Ids
    labels: Ids


def distinct(generator: np.random.Generator, rows: int, count: int, options: int) -> NDArray[np.int64]:
    """Return [rows, count]: `count` distinct numbers below `options` per row; every ordered choice is equally likely.

    Floyd's algorithm (Bentley and Floyd 1987) draws the sets, and a shuffle orders them. Raises ValueError if count > options.
    """
    if count > options:
        raise ValueError(f"cannot draw {count} distinct numbers below {options}: at most {options} are allowed")
    chosen = np.empty((rows, count), np.int64)
    for i, last in enumerate(range(options - count, options)):
        drawn = generator.integers(0, last + 1, rows)
        taken = (chosen[:, :i] == drawn[:, None]).any(1)
        chosen[:, i] = np.where(taken, last, drawn)
    return generator.permuted(chosen, axis=1)


def weighted_distinct(generator: np.random.Generator, rows: int, count: int, weights: NDArray) -> NDArray[np.int64]:
    """Return [rows, count]: distinct indices of `weights`, drawn sequentially with probability proportional to the weights.

    Sorted exponential variables with these rates have this distribution (Efraimidis and Spirakis 2006).
    """
    waits = generator.standard_exponential((rows, len(weights))) / weights
    if count < len(weights):
        first = np.argpartition(waits, count - 1, axis=1)[:, :count]
    else:
        first = np.broadcast_to(np.arange(len(weights)), waits.shape)
    order = np.argsort(np.take_along_axis(waits, first, 1), axis=1)
    return np.take_along_axis(first, order, 1)
