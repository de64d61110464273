"""MultiRC as its authors score it, from the samples that the harness logged.

A row is one answer to a question about a paragraph. The harness offers the choices "yes" and "no" in this order and
takes the label (1: the answer is correct) as the index of the right one, so that its accuracy counts a model that is
always right as always wrong. Here an answer is judged correct when "yes" is likelier than "no". Metrics: Khashabi et al.
2018; exact match over the answers of a question is what SuperGLUE (Wang et al. 2019, EM) and MetaLA report.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

METRICS = ("exact_match", "answer_acc", "f1a")
Samples = Sequence[Mapping[str, Any]]


def multirc_metrics(samples: Samples) -> dict[str, float]:
    """Return exact_match, answer_acc and f1a with their standard errors, from logged samples.

    exact_match: share of questions all of whose answers are judged right. answer_acc: share of answers judged right. f1a:
    F1 of "correct" over all answers (0 when nothing is rightly called correct); its standard error is not defined here.
    """
    judged = judgements(samples)
    questions = list(exact_matches(samples).values())
    right = [said == label for said, label in judged]
    hits = sum(said and label for said, label in judged)
    named = sum(said for said, _ in judged) + sum(label for _, label in judged)
    return {
        "exact_match": _mean(questions),
        "exact_match_stderr": _stderr(questions),
        "answer_acc": _mean(right),
        "answer_acc_stderr": _stderr(right),
        "f1a": 2 * hits / named if named else 0.0,
    }


def judgements(samples: Samples) -> list[tuple[bool, bool]]:
    """Return (whether the model calls the answer correct, whether it is correct) of every answer."""
    judged = []
    for sample in samples:
        (yes, _), (no, _) = sample["filtered_resps"]
        judged.append((float(yes) > float(no), int(sample["doc"]["label"]) == 1))
    return judged


def exact_matches(samples: Samples) -> dict[str, bool]:
    """Return "paragraph/question" -> whether all answers of the question are judged right."""
    matches: dict[str, bool] = {}
    for sample, (predicted, label) in zip(samples, judgements(samples), strict=True):
        index = sample["doc"]["idx"]
        question = f"{index['paragraph']}/{index['question']}"
        matches[question] = matches.get(question, True) and predicted == label
    return matches


def _mean(values: Sequence[bool]) -> float:
    return sum(values) / len(values)


def _stderr(values: Sequence[bool]) -> float:
    mean, count = _mean(values), len(values)
    return math.sqrt(mean * (1 - mean) / (count - 1)) if count > 1 else math.nan
