"""ListOps against a reader of its grammar that is written apart, and a generator of nested lists."""

from __future__ import annotations

import random
import statistics
from collections import Counter

import numpy as np
import pytest

from data.synthetic.listops import PAD, TOKENS, listops


def words_of(row: np.ndarray) -> list[str]:
    """Return a row as words; padding is only at the end."""
    words = [TOKENS[i] for i in row.tolist()]
    end = words.index("<pad>") if "<pad>" in words else len(words)
    assert set(words[end:]) <= {"<pad>"}
    return words[:end]


def read(words: list[str]) -> tuple[int, int, list[tuple[str, int]]]:
    """(value, levels, every operation with the number of its arguments); AssertionError for what is no expression."""
    stack: list[tuple[str, list[int], int]] = []
    operations: list[tuple[str, int]] = []
    result: tuple[int, int] | None = None

    def give(value: int, levels: int) -> None:
        nonlocal result
        if stack:
            name, values, deepest = stack[-1]
            stack[-1] = (name, [*values, value], max(deepest, levels))
        else:
            result = (value, levels)

    for word in words:
        assert result is None, "something follows the expression"
        if word == "]":
            name, values, deepest = stack.pop()
            operations.append((name, len(values)))
            give(
                {
                    "[MIN": lambda v: min(v),
                    "[MAX": lambda v: max(v),
                    "[MED": lambda v: int(statistics.median(v)),
                    "[SM": lambda v: sum(v) % 10,
                }[name](values),
                deepest + 1,
            )
        elif word.isdigit():
            give(int(word), 1)
        else:
            stack.append((word, [], 0))
    assert result is not None
    assert not stack
    return *result, operations


def test_reader_of_expressions_computes_known_values() -> None:
    assert read(["[MAX", "2", "9", "[MIN", "4", "7", "]", "0", "]"])[:2] == (9, 3)
    assert read(["[MED", "1", "4", "[SM", "9", "9", "]", "]"])[0] == 4
    assert read(["[MED", "1", "4", "]"])[0] == 2  # 2.5, rounded down


def test_label_is_the_value_of_the_expression() -> None:
    tokens, labels = listops(300, 600, shortest=100, seed=3)
    assert tokens.shape == (300, 600)
    assert labels.shape == (300, 1)
    deepest, arguments, names, classes = 0, Counter(), Counter(), Counter()
    for row, (label,) in zip(tokens, labels.tolist(), strict=True):
        words = words_of(row)
        value, levels, operations = read(words)
        assert value == label
        assert 100 <= len(words) <= 600
        deepest = max(deepest, levels)
        arguments.update(count for _, count in operations)
        names.update(name for name, _ in operations)
        classes[label] += 1
    assert deepest == 10
    assert set(arguments) == set(range(2, 11))
    assert set(classes) == set(range(10))
    shares = [names[name] / names.total() for name in ("[MIN", "[MAX", "[MED", "[SM")]
    assert all(abs(share - 0.25) < 0.02 for share in shares)
    assert len({row.tobytes() for row in tokens}) == 300


def reference(draw: random.Random, level: int = 1) -> list | int:
    """Return an element of Long Range Arena's grammar; the first level is an operation."""
    if level == 10 or (level > 1 and draw.random() > 0.25):
        return draw.randrange(10)
    return [draw.choice("abcd"), *(reference(draw, level + 1) for _ in range(draw.randint(2, 10)))]


def size(element: list | int) -> int:
    return 1 if isinstance(element, int) else 2 + sum(map(size, element[1:]))


def test_lengths_are_those_of_the_grammar() -> None:
    """Compare the distribution of lengths with that of expressions drawn one by one."""
    draw = random.Random(0)
    drawn = [n for n in (size(reference(draw)) for _ in range(5000)) if 20 <= n <= 1000]
    tokens, _ = listops(4000, 1000, shortest=20, seed=1)
    ours = (tokens != PAD).sum(1)
    for share in (0.1, 0.25, 0.5, 0.75, 0.9):
        assert np.quantile(ours, share) == pytest.approx(np.quantile(drawn, share), rel=0.12, abs=4)


def test_both_ends_of_the_lengths_are_kept() -> None:
    tokens, _ = listops(300, 24, shortest=20, seed=2)
    assert set((tokens != PAD).sum(1).tolist()) == set(range(20, 25))


def test_long_range_arenas_lengths_by_default() -> None:
    tokens, labels = listops(40, seed=0)
    lengths = (tokens != PAD).sum(1)
    assert tokens.shape == (40, 2000)
    assert lengths.min() >= 500
    assert lengths.max() <= 2000
    assert all(read(words_of(row))[0] == label for row, label in zip(tokens[:10], labels[:10, 0].tolist(), strict=True))


def test_seeds() -> None:
    one, same, other = (listops(20, 100, shortest=10, seed=[0, split]).tokens for split in (0, 0, 1))
    assert (one == same).all()
    assert not {row.tobytes() for row in one} & {row.tobytes() for row in other}


@pytest.mark.parametrize(
    "wrong",
    [{"arguments": 1}, {"depth": 1}, {"shortest": 3}, {"shortest": 50, "length": 40}, {"depth": 2, "shortest": 99}],
)
def test_impossible_lengths_are_refused(wrong: dict) -> None:
    with pytest.raises(ValueError, match=r"at least 2 each|expressions have 4 to"):
        listops(1, **{"length": 200, "shortest": 10, **wrong})


@pytest.mark.parametrize("rare", [{"depth": 4}, {"nested": 0.0}])
def test_lengths_that_no_drawn_expression_has_are_refused(rare: dict) -> None:
    """Raise instead of drawing without end."""
    with pytest.raises(ValueError, match=r"lengths 500 to 2000: none of 400,000 expressions with 10 arguments, depth "):
        listops(1, **rare)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"nested": 2.0}, "nested = 2.0: a probability from 0 to 1 is allowed"),
        (
            {"nested": 1.0},
            r"nested = 1, arguments = 10, depth = 10: expressions have more than 5,000 elements on average",
        ),
        ({"depth": 10**9, "nested": 0.5}, "nested = 0.5, .* on average; lower one of them"),
    ],
)
def test_expressions_that_do_not_fit_into_memory_are_refused(wrong: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        listops(1, **wrong)
