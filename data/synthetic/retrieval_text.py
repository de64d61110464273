"""Write RULER's tasks with their answers as training text, to be mixed into a corpus.

Evaluation uses seeds from 0 on, training text seeds below 0, so no example of an evaluation is trained on.
"""

from __future__ import annotations

import math
import random
import re
from collections.abc import Callable, Iterable, Sequence

from .ruler import TASKS, RulerExample, make_example

RETRIEVAL_TASKS = tuple(task for task in TASKS if task.startswith("niah_") or task == "vt")
MOST_DOCUMENTS = 10**9  # of one seed


def training_seed(seed: int, number: int) -> int:
    """Return the seed of document ``number`` of a training text, below 0 and different for every (seed, number).

    Raises ValueError for a seed below 0 and a number of `MOST_DOCUMENTS` or more.
    """
    if seed < 0 or not 0 <= number < MOST_DOCUMENTS:
        raise ValueError(
            f"seed {seed}, document {number}: seeds from 0 and documents below {MOST_DOCUMENTS:,} are allowed"
        )
    return -1 - (seed * MOST_DOCUMENTS + number)


def training_example(
    number: int,
    tasks: Sequence[str],
    lengths: tuple[int, int],
    seed: int,
    count_tokens: Callable[[str], int],
    haystack: Sequence[str] | None = None,
) -> tuple[str, RulerExample]:
    """Return the task and the example of document ``number``; the tasks take turns.

    lengths: shortest and longest prompt with answer, in tokens; the length is drawn log-uniformly.
    haystack: sentences of a text, of which each example reads a part; None for generated prose.
    Raises ValueError as `make_example` and `training_seed`.
    """
    task = tasks[number % len(tasks)]
    drawn = random.Random(f"length and haystack/{training_seed(seed, number)}")
    length = round(math.exp(drawn.uniform(*map(math.log, lengths))))
    part = None
    if haystack is not None:
        start = drawn.randrange(len(haystack))
        # A sentence has at least one token.
        part = [haystack[place % len(haystack)] for place in range(start, start + min(length, len(haystack)))]
    return task, make_example(task, length, training_seed(seed, number), count_tokens, part)


def sentences(texts: Iterable[str], characters: int) -> list[str]:
    """Return the sentences and lines of texts, until they hold this many characters. Raises ValueError if there are none."""
    collected: list[str] = []
    for text in texts:
        parts = [part for part in re.split(r"(?<=[.!?])\s+|\s*\n\s*", text) if part]
        collected += parts
        characters -= sum(map(len, parts))
        if characters <= 0:
            break
    if not collected:
        raise ValueError("the haystack holds no text; name files with text")
    return collected
