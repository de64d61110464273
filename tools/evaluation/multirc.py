"""Compute MultiRC's official metrics from the harness's logged samples.

A row is one answer to a question about a paragraph. The harness offers the choices "yes" and "no" in this order, and
takes the label (1: the answer is correct) as the index of the right choice. Its accuracy is therefore inverted. Here an
answer is judged correct when "yes" is likelier than "no". Metrics: Khashabi et al. 2018. SuperGLUE (Wang et al. 2019, EM)
and MetaLA report the exact match over the answers of a question.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

METRICS = ("exact_match", "answer_acc", "f1a")
Samples = Sequence[Mapping[str, Any]]


def multirc_metrics(samples: Samples) -> dict[str, float]:
    """Return exact_match, answer_acc and f1a with their standard errors, from logged samples.

    exact_match: share of questions with all answers judged correctly. answer_acc: share of answers judged correctly. f1a:
    F1 of "correct" over all answers, without a standard error.
    """
    judged = judgements(samples)
    exact, exact_error = _mean_and_error(list(exact_matches(samples).values()))
    right, right_error = _mean_and_error([predicted == label for predicted, label in judged])
    hits = sum(predicted and label for predicted, label in judged)
    positive = sum(predicted + label for predicted, label in judged)
    return {
        "exact_match": exact,
        "exact_match_stderr": exact_error,
        "answer_acc": right,
        "answer_acc_stderr": right_error,
        "f1a": 2 * hits / positive if positive else 0.0,
    }


def judgements(samples: Samples) -> list[tuple[bool, bool]]:
    """Return (whether the model calls the answer correct, whether it is correct) of every answer."""
    judged = []
    for sample in samples:
        (yes, _), (no, _) = sample["filtered_resps"]
        judged.append((float(yes) > float(no), int(sample["doc"]["label"]) == 1))
    return judged


def exact_matches(samples: Samples) -> dict[str, bool]:
    """Return "paragraph/question" -> whether all answers of the question are judged correctly."""
    matches: dict[str, bool] = {}
    for sample, (predicted, label) in zip(samples, judgements(samples), strict=True):
        index = sample["doc"]["idx"]
        question = f"{index['paragraph']}/{index['question']}"
        matches[question] = matches.get(question, True) and predicted == label
    return matches


def _mean_and_error(values: Sequence[bool]) -> tuple[float, float]:
    mean, count = sum(values) / len(values), len(values)
    return mean, math.sqrt(mean * (1 - mean) / (count - 1)) if count > 1 else math.nan
