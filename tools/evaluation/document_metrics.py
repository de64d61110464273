"""Read metrics from the harness's results and logged samples: per task, and per document for paired comparisons."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tools.evaluation import multirc

Results = Mapping[str, Any]
Samples = Sequence[Mapping[str, Any]]


def metric_name(metric: str, tag: str) -> str:
    """Return the name of a metric under a filter: "acc", or "exact_match,strict-match" for a named filter."""
    return metric if tag == "none" else f"{metric},{tag}"


def metrics_of(results: Results, task: str) -> list[str]:
    """Return a task's metrics as `metric_name`, in the order of their computation."""
    keys = [key.split(",", 1) for key in results["results"].get(task, {}) if "," in key]
    return [metric_name(metric, tag) for metric, tag in keys if not metric.endswith("_stderr")]


def metric_value(results: Results, task: str, metric: str) -> tuple[float, float | None] | None:
    """Return (value, standard error or None) of a task's metric, or None if it has no such value.

    metric: as `metric_name`. Without a filter it is the task's unfiltered metric, or else that of its first filter.
    """
    entry = results["results"].get(task, {})
    keys = [key for key in entry if key == metric or key.startswith(f"{metric},")]
    for key in sorted(keys, key=lambda key: key != f"{metric},none"):
        name, _, tag = key.partition(",")
        if isinstance(value := entry[key], int | float):
            error = entry.get(f"{name}_stderr,{tag}")
            known = isinstance(error, int | float) and math.isfinite(error)
            return float(value), float(error) if known else None
    return None


def metrics_by_document(task: str, samples: Samples) -> dict[str, dict[str, list[Any]]]:
    """Return metric (`metric_name`) -> {"ids", "values"}: one value per document, to compare two models in pairs.

    A value is a number, or a pair for metrics that are no mean: (predicted, true) of F1, (log-likelihood, words) of a perplexity.
    Metrics of other values (BLEU, of texts) are left out.
    """
    by_metric: dict[str, dict[str, list[Any]]] = {}
    unsupported = set()
    for sample in samples:  # a task with several filters has one sample per document and filter
        identity = f"{sample['doc_id']}:{sample['doc_hash'][:12]}"
        for metric in sample["metrics"]:
            name, value = metric_name(metric, sample.get("filter", "none")), _number_or_pair(sample[metric])
            if value is None:
                unsupported.add(name)
                continue
            entry = by_metric.setdefault(name, {"ids": [], "values": []})
            entry["ids"].append(identity)
            entry["values"].append(value)
    by_metric = {name: entry for name, entry in by_metric.items() if name not in unsupported}
    if task == "multirc":
        matches, judged = multirc.exact_matches(samples), multirc.judgements(samples)
        answers = by_metric["acc"]["ids"]
        by_metric["exact_match"] = {"ids": list(matches), "values": [float(m) for m in matches.values()]}
        by_metric["answer_acc"] = {"ids": answers, "values": [float(predicted == label) for predicted, label in judged]}
        by_metric["f1a"] = {"ids": answers, "values": [[int(predicted), int(label)] for predicted, label in judged]}
    return by_metric


def chance_level(samples: Samples) -> float | None:
    """Return the accuracy of guessing for tasks with choices, else None."""
    # acc_mutual_info scores every choice a second time, without its context.
    counts = [
        len(sample["filtered_resps"]) // (2 if "acc_mutual_info" in sample["metrics"] else 1)
        for sample in samples
        if "acc" in sample["metrics"]
    ]
    return sum(1 / n for n in counts) / len(counts) if counts and min(counts) > 1 else None


def majority_scores(name: str, task: Any, samples: Samples) -> dict[str, float]:
    """Return metric -> score of a constant answer with the most frequent label, for tasks with choices.

    task: an `lm_eval.api.task.Task`. Documents with several right answers have no such score.
    """
    if chance_level(samples) is None:
        return {}
    labels = [
        _label(task, sample) for sample in samples if sample.get("filter", "none") == samples[0].get("filter", "none")
    ]
    if None in labels:
        return {}
    ((label, count),) = Counter(labels).most_common(1)
    share = count / len(labels)
    f1 = 2 * share / (1 + share)  # of the majority class
    if name == "multirc":  # the harness's acc is inverted
        questions: dict[tuple[Any, Any], bool] = {}
        for sample in samples:
            question = sample["doc"]["idx"]["paragraph"], sample["doc"]["idx"]["question"]
            questions[question] = questions.get(question, True) and _label(task, sample) == label
        exact = sum(questions.values()) / len(questions)
        return {"exact_match": exact, "answer_acc": share, "f1a": f1 if label == 1 else 0.0}
    return {"acc": share, "acc_norm": share, **({"f1": f1 / 3} if name == "cb" else {})}


def _label(task: Any, sample: Mapping[str, Any]) -> Any:
    """Return the index of the right choice, or None for several."""
    label = task.doc_to_text(sample["doc"]) if getattr(task, "multiple_input", 0) else sample["target"]
    if isinstance(label, str):
        choices = task.doc_to_choice(sample["doc"])
        return choices.index(label) if label in choices else int(label) if label.isdecimal() else None
    return None if isinstance(label, list) else label


def task_hash(samples: Samples) -> str:
    """Return the harness's hash of a task's documents, prompts and targets."""
    from lm_eval.utils import hash_string

    return hash_string("".join(s["doc_hash"] + s["prompt_hash"] + s["target_hash"] for s in samples))


def _number_or_pair(value: Any) -> float | list[int | float] | None:
    if isinstance(value, tuple | list):
        pair = [_python_number(v) for v in value]
        return pair if len(pair) == 2 and all(isinstance(v, int | float) for v in pair) else None
    value = _python_number(value)
    return float(value) if isinstance(value, int | float) else None


def _python_number(value: Any) -> Any:
    """Return a single number of NumPy or torch as a Python number, and a truth value as 0 or 1."""
    value = value.item() if hasattr(value, "item") and np.ndim(value) == 0 else value
    return int(value) if isinstance(value, bool) else value
