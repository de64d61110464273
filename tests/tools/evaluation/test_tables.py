"""Tables of results: averages with their standard errors, details of every metric, and the examples in the prompts."""

from __future__ import annotations

import pytest

from tools.evaluation.suites import Column
from tools.evaluation.tables import Row, Table, detail_rows, shots_words


def test_average_of_independent_columns_and_its_standard_error():
    columns = tuple(Column(label, "acc", label) for label in ("a", "b", "c"))
    rows = [
        Row("known", {"a": (60.0, 3.0), "b": (40.0, 4.0), "c": (0.0, 9.0)}),
        Row("one error unknown", {"a": (60.0, 3.0), "b": (40.0, None)}),
        Row("one column missing", {"a": (60.0, 3.0)}),
    ]
    table = Table("", columns, ("a", "b"), rows, {}, {})
    assert [table.average_of(row) for row in rows] == [50.0, 50.0, None]
    # The variance of a mean of two is a quarter of the sum of the variances: sqrt(9 + 16) / 2.
    assert [table.average_error(row) for row in rows] == [pytest.approx(2.5), None, None]
    assert Table("", columns, (), rows, {}, {}).average_error(rows[0]) is None


def test_details_are_in_percent_beside_majority_and_chance():
    results = {
        "results": {
            "copa": {"acc,none": 0.625, "acc_stderr,none": 0.05},
            "lambada": {"perplexity,none": 12.5, "perplexity_stderr,none": "N/A"},
            "multirc": {"acc,none": 0.25, "exact_match,none": 0.5},
        },
        "versions": {"copa": 1.0, "lambada": 2, "multirc": 3},
        "n-shot": {"copa": 0, "lambada": 5, "multirc": 0},
        "n-samples": {name: {"original": 100, "effective": 40} for name in ("copa", "lambada", "multirc")},
        "metalion": {
            "chance": {"copa": 0.5, "multirc": 0.5},
            "majority": {"copa": {"acc": 0.55}},
            "split": {"copa": "validation", "lambada": "test", "multirc": "validation"},
            "other_split": ["copa"],
            "whole_set": {"lambada": 40},
        },
    }
    assert detail_rows(results)[1] == [
        ["copa", "1.0", "validation*", "0", "40 of 100", "acc", "62.50", "5.00", "55.00", "50.00"],
        ["lambada", "2", "test", "5", "40", "perplexity", "12.50", "-", "-", "-"],
        ["multirc", "3", "validation", "0", "40 of 100", "acc (harness)", "25.00", "-", "-", "50.00"],
        ["multirc", "3", "validation", "0", "40 of 100", "exact_match", "50.00", "-", "-", "-"],
    ]


@pytest.mark.parametrize(("shots", "words"), [((0, 0), "zero-shot"), ((5, 5), "5-shot"), ((0, 5), "0- to 5-shot")])
def test_examples_in_the_prompts_in_words(shots: tuple[int, int], words: str):
    results = {"n-shot": dict(zip("ab", shots, strict=True))}
    assert shots_words([results], [Column(task, "acc", task) for task in "abc"]) == words
