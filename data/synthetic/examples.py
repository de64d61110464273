"""Generated examples, and drawing without replacement in every row at once."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.signedinteger[Any]]

# The label of a position that is not asked about.
UNLABELLED = -100


class Examples(NamedTuple):
    """tokens [examples, length], and labels of that shape: what to answer at a position, or UNLABELLED; [examples, 1]
    where a label is of the whole example."""

    tokens: Ids
    labels: Ids


def distinct(generator: np.random.Generator, rows: int, count: int, options: int) -> NDArray[np.int64]:
    """[rows, count]: in every row `count` different numbers below `options`, each ordered choice equally likely.

    Floyd's algorithm (Bentley and Floyd 1987) gives the sets, a shuffle their order. ValueError where count > options.
    """
    if count > options:
        raise ValueError(f"{count} different numbers below {options} do not exist")
    chosen = np.empty((rows, count), np.int64)
    for i, last in enumerate(range(options - count, options)):
        drawn = generator.integers(0, last + 1, rows)
        taken = (chosen[:, :i] == drawn[:, None]).any(1)
        chosen[:, i] = np.where(taken, last, drawn)
    return generator.permuted(chosen, axis=1)


def weighted_distinct(generator: np.random.Generator, rows: int, count: int, weights: NDArray) -> NDArray[np.int64]:
    """[rows, count]: different indices of `weights`, drawn one after the other with probability proportional to them.

    The order of exponential variables of these rates has that distribution (Efraimidis and Spirakis 2006).
    """
    waits = generator.standard_exponential((rows, len(weights))) / weights
    if count < len(weights):
        first = np.argpartition(waits, count - 1, axis=1)[:, :count]
    else:
        first = np.broadcast_to(np.arange(len(weights)), waits.shape)
    order = np.argsort(np.take_along_axis(waits, first, 1), axis=1)
    return np.take_along_axis(first, order, 1)
