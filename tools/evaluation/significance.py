"""Test whether the difference between two models is significant, paired by document.

Null hypothesis: the two outcomes of each document can be swapped. For right or wrong outcomes the test is exact: the sign
test on the documents that differ (McNemar 1947). Otherwise the difference is compared with that of random swaps (paired
permutation test, Fisher 1935), also for metrics that are no mean (F1, perplexity). All tests are two-sided.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tools.evaluation.tables import is_raw

SWAPS = 10_000
_UNSUPPORTED = "is no mean over documents, and this comparison does not support it"
Values = NDArray[np.float64]


@dataclass(frozen=True)
class Difference:
    """Hold one metric of one task for two models.

    Attributes:
        documents: number of documents of both models.
        first, second: the metric over these documents.
        stderr: of second - first over documents; None for metrics that are no mean.
        higher_is_better: direction of the metric; None if it is unknown.
        p: probability of a difference at least as large under the null hypothesis.
        adjusted: p after Holm's correction over all comparisons (Holm 1979).
    """

    task: str
    metric: str
    documents: int
    first: float
    second: float
    stderr: float | None
    p: float
    adjusted: float = math.nan
    higher_is_better: bool | None = None

    @property
    def change(self) -> float:
        """Return second - first."""
        return self.second - self.first

    @property
    def better(self) -> str:
        """Return "first" or "second", or an empty text for equal values or an unknown direction."""
        if self.higher_is_better is None or not self.change:
            return ""
        return "second" if (self.change > 0) == self.higher_is_better else "first"


def compare(first: Mapping[str, Any], second: Mapping[str, Any]) -> list[Difference]:
    """Compare every metric of both results over their common documents, except those of `excluded_metrics`.

    Raises ValueError if they share none.
    """
    differences = [
        replace(difference(task, metric, a, b), higher_is_better=_direction(first, task, metric))
        for task, metric, a, b, reason in _shared(first, second)
        if not reason
    ]
    if not differences:
        reasons = excluded_metrics(first, second) or ["the two results share no task and document"]
        raise ValueError(f"{'; '.join(reasons)}: evaluate both models on the same suites and data")
    return _holm(differences)


def excluded_metrics(first: Mapping[str, Any], second: Mapping[str, Any]) -> list[str]:
    """Return the metrics of both results that cannot be compared, each with the reason."""
    return [f"{task}: {metric} {reason}" for task, metric, _, _, reason in _shared(first, second) if reason]


def _shared(first: Mapping[str, Any], second: Mapping[str, Any]) -> Iterator[tuple[str, str, Values, Values, str]]:
    """Yield task, metric, the values of both in the order of the first's documents, and a reason to exclude them, or ""."""
    tasks, other_tasks = (results["metalion"]["documents"] for results in (first, second))
    for task, metrics in tasks.items():
        for metric, entry in metrics.items():
            other = other_tasks.get(task, {}).get(metric, {"ids": []})
            places = {document: i for i, document in enumerate(_contents(other["ids"]))}
            pairs = [(i, places[document]) for i, document in enumerate(_contents(entry["ids"])) if document in places]
            if pairs:
                a, b = (np.array([e["values"][p[k]] for p in pairs], np.float64) for k, e in enumerate((entry, other)))
                reason = ""
                if any(len(set(e["ids"])) < len(e["ids"]) for e in (entry, other)):
                    reason = "has documents twice, of several filters: evaluate again"  # a file of an earlier version
                elif a.ndim != b.ndim:
                    reason = "has another form in the second results"
                elif not (np.isfinite(a).all() and np.isfinite(b).all()):
                    reason = "is not a finite number for every document"
                elif _statistic(task, metric, a) is None:
                    reason = _UNSUPPORTED
                yield task, metric, a, b, reason


def _contents(ids: Sequence[str]) -> Iterator[tuple[str, int]]:
    """Yield each document's hash ("INDEX:HASH" without the index) and its number among equal ones.

    The same data in another order are the same documents.
    """
    seen: Counter[str] = Counter()
    for identity in ids:
        content = identity.rpartition(":")[2]
        yield content, seen[content]
        seen[content] += 1


def difference(task: str, metric: str, first: Values, second: Values) -> Difference:
    """Return the difference of a metric, with its p value before Holm's correction.

    Args:
        metric: as `document_metrics.metric_name`.
        first, second: [documents] numbers, or [documents, 2] pairs: (predicted, true) for F1, (log-likelihood, words or
            bytes) for a perplexity over all documents.

    Raises ValueError for a metric that is not supported.
    """
    statistic = _statistic(task, metric, first)
    if statistic is None:
        raise ValueError(f"{task}: {metric} {_UNSUPPORTED}")
    values = (float(statistic(first[None])[0]), float(statistic(second[None])[0]))
    stderr = None
    if first.ndim == 1 and not is_raw(metric):
        delta = second - first
        stderr = float(delta.std(ddof=1) / math.sqrt(len(delta))) if len(delta) > 1 else None
        if np.isin(delta, (-1.0, 0.0, 1.0)).all():
            better, worse = int((delta > 0).sum()), int((delta < 0).sum())
            return Difference(task, metric, len(first), *values, stderr, _sign_test(better, worse))
    return Difference(task, metric, len(first), *values, stderr, _permutation(statistic, first, second))


def comparison_rows(
    differences: Sequence[Difference], names: tuple[str, str] = ("first", "second")
) -> tuple[list[str], list[list[str]]]:
    """Return header and rows as text, shares in percent. An arrow shows the better direction of a metric.

    names: of the two models, for the header and the last column.
    """
    header = ["task", "metric", "documents", *names, "difference", "±", "p", "p (Holm)", "better"]
    rows = []
    for d in differences:
        share = not is_raw(d.metric)
        better = {"first": names[0], "second": names[1], "": ""}[d.better]
        shown = [
            f"{100 * value:{sign}.2f}" if share else f"{value:{sign}.4g}"
            for value, sign in ((d.first, ""), (d.second, ""), (d.change, "+"))
        ]
        rows.append(
            [
                d.task,
                d.metric + {True: " ↑", False: " ↓", None: ""}[d.higher_is_better],
                f"{d.documents:,}",
                *shown,
                "-" if d.stderr is None else f"{100 * d.stderr:.2f}",
                f"{d.p:.4f}",
                f"{d.adjusted:.4f}",
                f"{better or 'unknown direction'}, significant" if d.adjusted < 0.05 else better,
            ]
        )
    return header, rows


def _statistic(task: str, metric: str, values: Values) -> Callable[[Values], Values] | None:
    """Return the function from [samples, documents (, 2)] to [samples], or None if the metric is not supported."""
    metric = metric.partition(",")[0]
    if values.ndim == 1:
        return (lambda x: np.exp(-x.mean(1))) if metric == "perplexity" else (lambda x: x.mean(1))
    if metric == "f1" and task == "cb":
        return lambda x: np.mean([_f1(x, label) for label in (0, 1, 2)], axis=0)
    if metric == "f1a":
        return lambda x: _f1(x, 1)
    if metric in ("word_perplexity", "byte_perplexity"):
        return lambda x: np.exp(_nats(x))
    if metric == "bits_per_byte":
        return lambda x: _nats(x) / math.log(2)
    return None


def _direction(results: Mapping[str, Any], task: str, metric: str) -> bool | None:
    """Return whether higher values of a metric are better, as the harness states it; a perplexity is better when lower."""
    stated = results.get("higher_is_better", {}).get(task, {}).get(metric.partition(",")[0])
    return (False if is_raw(metric) else None) if stated is None else bool(stated)


def _nats(x: Values) -> Values:
    """Return nats per word or byte: [samples, documents, (log-likelihood, words or bytes)] -> [samples]."""
    return -x[..., 0].sum(1) / x[..., 1].sum(1)


def _f1(x: Values, label: int) -> Values:
    predicted, true = x[..., 0] == label, x[..., 1] == label
    hits, positive = (predicted & true).sum(1), predicted.sum(1) + true.sum(1)
    return np.divide(2 * hits, positive, out=np.zeros(len(x)), where=positive > 0)


def _sign_test(better: int, worse: int) -> float:
    """Return the two-sided exact p value: better and worse are heads and tails of a fair coin."""
    from scipy.stats import binomtest

    return float(binomtest(better, better + worse).pvalue) if better + worse else 1.0


def _permutation(statistic: Callable[[Values], Values], first: Values, second: Values) -> float:
    draw = np.random.default_rng(0)
    observed = abs(float(statistic(second[None])[0] - statistic(first[None])[0]))
    reached, done = 0, 0
    step = max(1, 2_000_000 // max(1, first.size))
    while done < SWAPS:
        count = min(step, SWAPS - done)
        swap = draw.random((count, len(first))) < 0.5
        swap = swap.reshape(*swap.shape, *([1] * (first.ndim - 1)))
        a, b = np.where(swap, second, first), np.where(swap, first, second)
        reached += int((np.abs(statistic(b) - statistic(a)) >= observed * (1 - 1e-12)).sum())
        done += count
    return (reached + 1) / (SWAPS + 1)


def _holm(differences: Sequence[Difference]) -> list[Difference]:
    order = sorted(range(len(differences)), key=lambda i: differences[i].p)
    adjusted, largest = [0.0] * len(differences), 0.0
    for rank, i in enumerate(order):
        largest = max(largest, min(1.0, (len(differences) - rank) * differences[i].p))
        adjusted[i] = largest
    return [replace(d, adjusted=value) for d, value in zip(differences, adjusted, strict=True)]
