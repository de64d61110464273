"""Is the difference between two models more than chance? Paired by document.

The null hypothesis is that a document does not care which model answered it: each document's pair of outcomes may be
swapped. Where outcomes are right or wrong the test is exact (the sign test on the documents that differ, McNemar 1947);
otherwise the difference is compared with that of random swaps (a paired permutation test, Fisher 1935), which works for
metrics that are no mean (F1, perplexity) too. Two-sided.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tools.evaluation.report import is_raw

SWAPS = 10_000
_NOT_KNOWN = "is no mean over documents, and how it is formed is not known here"
Values = NDArray[np.float64]


@dataclass(frozen=True)
class Difference:
    """One metric of one task for two models.

    Attributes:
        documents: that both answered.
        first, second: the metric over these documents.
        stderr: of second - first over documents; None for metrics that are no mean.
        p: chance of a difference at least as large if the models were equal on every document.
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

    @property
    def change(self) -> float:
        """Return second - first."""
        return self.second - self.first


def compare(first: Mapping[str, Any], second: Mapping[str, Any]) -> list[Difference]:
    """Compare every metric of both results over the documents that both answered, except those of `left_out`.

    Raises ValueError when they share none.
    """
    found = [difference(task, metric, a, b) for task, metric, a, b, why in _shared(first, second) if not why]
    if not found:
        why = left_out(first, second) or ["the two results share no task and document"]
        raise ValueError(f"{'; '.join(why)}: evaluate both models on the same suites and data")
    return _holm(found)


def left_out(first: Mapping[str, Any], second: Mapping[str, Any]) -> list[str]:
    """Return the metrics of both results that cannot be compared, each with the reason."""
    return [f"{task}: {metric} {why}" for task, metric, _, _, why in _shared(first, second) if why]


def _shared(first: Mapping[str, Any], second: Mapping[str, Any]) -> Iterator[tuple[str, str, Values, Values, str]]:
    """Task, metric, the values of both in the order of the first's documents, and why they are not compared, if so."""
    ours, theirs = (results["metalion"]["documents"] for results in (first, second))
    for task, metrics in ours.items():
        for metric, entry in metrics.items():
            other = theirs.get(task, {}).get(metric, {"ids": []})
            places = {document: i for i, document in enumerate(_contents(other["ids"]))}
            pairs = [(i, places[document]) for i, document in enumerate(_contents(entry["ids"])) if document in places]
            if pairs:
                a, b = (np.array([e["values"][p[k]] for p in pairs], np.float64) for k, e in enumerate((entry, other)))
                why = ""
                if any(len(set(e["ids"])) < len(e["ids"]) for e in (entry, other)):
                    why = "has documents twice, of several filters: evaluate again"  # as this project wrote it once
                elif a.ndim != b.ndim:
                    why = "is of one form in the first results and of another in the second"
                elif not (np.isfinite(a).all() and np.isfinite(b).all()):
                    why = "is not a finite number for every document"
                elif _statistic(task, metric, a) is None:
                    why = _NOT_KNOWN
                yield task, metric, a, b, why


def _contents(ids: Sequence[str]) -> Iterator[tuple[str, int]]:
    """What a document holds ("PLACE:HASH" without its place) and the how manieth of its like it is: the same data in another
    order are the same documents."""
    seen: Counter[str] = Counter()
    for identity in ids:
        content = identity.rpartition(":")[2]
        yield content, seen[content]
        seen[content] += 1


def difference(task: str, metric: str, first: Values, second: Values) -> Difference:
    """metric: as `harness.metric_name`. first, second: [documents] numbers, or [documents, 2] pairs: (said, true) for F1,
    (log-likelihood, words or bytes) for a perplexity over all documents.

    Raises ValueError for a metric that is formed in a way that is not known here.
    """
    statistic = _statistic(task, metric, first)
    if statistic is None:
        raise ValueError(f"{task}: {metric} {_NOT_KNOWN}")
    values = (float(statistic(first[None])[0]), float(statistic(second[None])[0]))
    stderr = None
    if first.ndim == 1 and not is_raw(metric):
        delta = second - first
        stderr = float(delta.std(ddof=1) / math.sqrt(len(delta))) if len(delta) > 1 else None
        if np.isin(delta, (-1.0, 0.0, 1.0)).all():
            better, worse = int((delta > 0).sum()), int((delta < 0).sum())
            return Difference(task, metric, len(first), *values, stderr, _sign_test(better, worse))
    return Difference(task, metric, len(first), *values, stderr, _permutation(statistic, first, second))


def comparison_rows(found: Sequence[Difference]) -> tuple[list[str], list[list[str]]]:
    """Return header and rows as text, shares in percent."""
    header = ["task", "metric", "documents", "first", "second", "difference", "±", "p", "p (Holm)", ""]
    rows = []
    for d in found:
        share = not is_raw(d.metric)
        shown = [
            f"{100 * value:{sign}.2f}" if share else f"{value:{sign}.4g}"
            for value, sign in ((d.first, ""), (d.second, ""), (d.change, "+"))
        ]
        rows.append(
            [
                d.task,
                d.metric,
                f"{d.documents:,}",
                *shown,
                "-" if d.stderr is None else f"{100 * d.stderr:.2f}",
                f"{d.p:.4f}",
                f"{d.adjusted:.4f}",
                "significant" if d.adjusted < 0.05 else "",
            ]
        )
    return header, rows


def _statistic(task: str, metric: str, values: Values) -> Callable[[Values], Values] | None:
    """Maps [samples, documents (, 2)] to [samples]; None where it is not known how. values: of one model."""
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


def _nats(x: Values) -> Values:
    """A word or byte: [samples, documents, (log-likelihood, words or bytes)] -> [samples]."""
    return -x[..., 0].sum(1) / x[..., 1].sum(1)


def _f1(x: Values, label: int) -> Values:
    said, true = x[..., 0] == label, x[..., 1] == label
    hits, named = (said & true).sum(1), said.sum(1) + true.sum(1)
    return np.divide(2 * hits, named, out=np.zeros(len(x)), where=named > 0)


def _sign_test(better: int, worse: int) -> float:
    """Return the two-sided exact p value: better and worse are heads and tails of a fair coin."""
    n, k = better + worse, min(better, worse)
    log_terms = np.array([math.lgamma(n + 1) - math.lgamma(i + 1) - math.lgamma(n - i + 1) for i in range(k + 1)])
    return min(1.0, 2.0 * float(np.exp(log_terms - n * math.log(2.0)).sum()))


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


def _holm(found: Sequence[Difference]) -> list[Difference]:
    order = sorted(range(len(found)), key=lambda i: found[i].p)
    adjusted, largest = [0.0] * len(found), 0.0
    for rank, i in enumerate(order):
        largest = max(largest, min(1.0, (len(found) - rank) * found[i].p))
        adjusted[i] = largest
    return [Difference(**{**vars(d), "adjusted": value}) for d, value in zip(found, adjusted, strict=True)]
