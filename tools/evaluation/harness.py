"""Runs suites through the harness and puts together `results.json`: the harness's own format, and one key of ours.

Under the key `metalion` stands what the harness does not know: hashes of weights and data, the split of every task,
requests that were too long, chance level, the suites, and each document's value of each metric, by which two models are
compared in pairs.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import io
import json
import logging
import math
import os
import random
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from data import atomic_io as files
from data.atomic_io import read_json, write_text
from models.options import nearest_names
from tools.evaluation import multirc
from tools.evaluation.request import TaskRequest
from tools.evaluation.request_pairs import RequestCounts
from tools.evaluation.results_file import RESULTS_FILE
from tools.evaluation.suites import Suite, read_suite, suite_names, task_suite
from tools.evaluation.tasks import LoadedTask, load_tasks

# Resamples for the standard error of a metric that has no formula (perplexity); the harness's 100,000 take minutes.
BOOTSTRAP = 1000


@dataclass(frozen=True)
class Prepared:
    """Suites and their tasks with data, ready to be asked any number of times."""

    request: TaskRequest
    suites: tuple[Suite, ...]
    tasks: dict[str, LoadedTask]
    manager: Any


def prepare_tasks(request: TaskRequest) -> Prepared:
    """Read suites and data. Raises as `read_suite`, `load_tasks` and `check_metrics`, and ValueError for no task at all."""
    suites = [read_suite(name) for name in request.suites]
    if request.tasks:
        suites.append(task_suite(request.tasks))
    suite_tasks = dict.fromkeys(task for suite in suites for task in suite.tasks)
    names = [task for task in suite_tasks if task not in request.without]
    if not names:
        raise ValueError("nothing to evaluate: name a suite (--suite superglue,commonsense) or a task (--tasks piqa)")
    # What the project's own suites know of a task holds where it is named alone too.
    known = [*map(read_suite, suite_names()), *suites]
    fields = {task: names for suite in known for task, names in (suite.fields or {}).items()}
    with _quiet():
        tasks, manager = load_tasks(
            names,
            without=[name for name in request.without if name not in suite_tasks],
            data_dir=request.data_dir,
            hub=request.hub,
            split=request.split,
            fields=fields,
            local=[task for suite in known for task in suite.local],
            folders=list(dict.fromkeys(folder for suite in known for folder in suite.folders)),
            shots=request.shots,
        )
    for suite in suites:
        check_metrics(suite, tasks)
    return Prepared(request, tuple(suites), tasks, manager)


def check_metrics(suite: Suite, tasks: Mapping[str, LoadedTask]) -> None:
    """Raise ValueError for a column of a metric that its task does not have, naming the task's metrics."""
    for column in suite.columns:
        if column.task not in tasks or not column.metric:
            continue
        task = tasks[column.task].task
        names = [*task.aggregation(), *(multirc.METRICS if column.task == "multirc" else ())]
        filters = [own.name for own in getattr(task, "_filters", ())]
        name, _, tag = column.metric.partition(",")
        if name not in names:
            words = nearest_names(name, names)
            raise ValueError(
                f"the suite {suite.name}: {column.task} has no metric {name!r}; {words} (column {column.label})"
            )
        if tag and tag not in filters:
            raise ValueError(
                f"the suite {suite.name}: {column.task} has no filter {tag!r}; {nearest_names(tag, filters)}"
            )


def evaluate(lm: Any, prepared: Prepared, *, use_cache: Path | None = None) -> dict[str, Any] | None:
    """Asks a model everything. Returns the results with their samples, None on processes that only help.

    lm: an `lm_eval.api.model.LM`. use_cache: of `lm_eval.simple_evaluate`; for models that keep no answers themselves. The
    random state of the process is left as it was.
    """
    import lm_eval

    started = time.perf_counter()
    main = is_main_process(lm)
    for loaded in prepared.tasks.values():
        _fresh(loaded.task)
    quiet = contextlib.nullcontext() if use_cache else contextlib.redirect_stderr(io.StringIO())
    with (
        _random_state_kept(),
        _templates_compiled_once(),
        _rarely_collected(),
        _quiet(),
        contextlib.redirect_stdout(io.StringIO()),
        quiet,
    ):
        results = lm_eval.simple_evaluate(
            model=lm,
            tasks=[loaded.task for loaded in prepared.tasks.values()],
            num_fewshot=prepared.request.shots,
            bootstrap_iters=BOOTSTRAP if main else 0,
            task_manager=prepared.manager,
            use_cache=None if use_cache is None else str(use_cache),
        )
    if results is None or not main:
        return None
    samples = results["samples"]
    if "multirc" in samples:
        for key, value in multirc.multirc_metrics(samples["multirc"]).items():
            results["results"]["multirc"][f"{key},none"] = value
            if not key.endswith("_stderr"):
                results["higher_is_better"]["multirc"][key] = True
    results["task_hashes"] = {task: _task_hash(rows) for task, rows in samples.items()}
    if hasattr(lm, "count"):  # a model whose answers a cache may have given in its place
        lm.count(request for loaded in prepared.tasks.values() for request in loaded.task.instances)
    counts = getattr(lm, "counts", None) or RequestCounts()
    results["metalion"] = {
        "suites": [suite.name for suite in prepared.suites],
        **what_is_asked(prepared),
        "chance": {task: chance for task, rows in samples.items() if (chance := _chance(rows)) is not None},
        **counts.by_task(),
        **how_it_is_asked(lm),
        "longest_request": counts.longest,
        "tokens_asked": counts.asked_tokens,
        "tokens_read": getattr(getattr(lm, "scorer", None), "read", None),
        "seconds": round(time.perf_counter() - started, 3),
        "documents": {task: documents(task, rows) for task, rows in samples.items()},
    }
    return results


def is_main_process(lm: Any) -> bool:
    """Return whether this process writes the results. A model of the harness has one process."""
    return getattr(getattr(lm, "processes", None), "is_main", True)


def what_is_asked(prepared: Prepared) -> dict[str, Any]:
    """Return split and data of every task, the tasks on another split than the stock one, and the examples in the prompt."""
    return {
        "split": {name: loaded.split for name, loaded in prepared.tasks.items()},
        "other_split": sorted(name for name, loaded in prepared.tasks.items() if loaded.moved),
        "data": {name: loaded.files or _fingerprint(loaded) for name, loaded in prepared.tasks.items()},
        "shots": prepared.request.shots,
    }


def shots_of(prepared: Prepared) -> dict[str, int]:
    """Return the examples in the prompt of every task, as the harness counts them. A task with 0 keeps 0."""
    configured = {name: loaded.task.get_config("num_fewshot") for name, loaded in prepared.tasks.items()}
    requested = prepared.request.shots
    return {name: shots or 0 if requested is None or shots == 0 else requested for name, shots in configured.items()}


def how_it_is_asked(lm: Any) -> dict[str, Any]:
    """Return what the answers of a model depend on beside its weights."""
    return {
        "max_length": getattr(lm, "max_length", None),
        "score": getattr(lm, "score_name", "log-likelihood"),
    }


def documents(task: str, samples: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, list[Any]]]:
    """metric (`metric_name`) -> {"ids", "values"}: what every document gave, so that another model's can be set beside it.

    A value is a number, or a pair for metrics that are no mean: (predicted, true) of F1, (log-likelihood, words) of a perplexity.
    Metrics of something else (BLEU, of texts) are left out.
    """
    by_metric: dict[str, dict[str, list[Any]]] = {}
    left_out = set()
    for sample in samples:  # a task with several filters has a sample of each document for each of them
        identity = f"{sample['doc_id']}:{sample['doc_hash'][:12]}"
        for metric in sample["metrics"]:
            name, value = metric_name(metric, sample.get("filter", "none")), _value(sample[metric])
            if value is None:
                left_out.add(name)
                continue
            entry = by_metric.setdefault(name, {"ids": [], "values": []})
            entry["ids"].append(identity)
            entry["values"].append(value)
    by_metric = {name: entry for name, entry in by_metric.items() if name not in left_out}
    if task == "multirc":
        matches, judged = multirc.exact_matches(samples), multirc.judgements(samples)
        answers = by_metric["acc"]["ids"]
        by_metric["exact_match"] = {"ids": list(matches), "values": [float(m) for m in matches.values()]}
        by_metric["answer_acc"] = {"ids": answers, "values": [float(predicted == label) for predicted, label in judged]}
        by_metric["f1a"] = {"ids": answers, "values": [[int(predicted), int(label)] for predicted, label in judged]}
    return by_metric


def _value(value: Any) -> float | list[int | float] | None:
    """Return a number, or a pair of numbers, or None for anything else."""
    if isinstance(value, tuple | list):
        pair = [_plain(v) for v in value]
        return pair if len(pair) == 2 and all(isinstance(v, int | float) for v in pair) else None
    value = _plain(value)
    return float(value) if isinstance(value, int | float) else None


def _plain(value: Any) -> Any:
    """Return a single number of NumPy or torch as a Python number, and a truth value as 0 or 1."""
    value = value.item() if hasattr(value, "item") and np.ndim(value) == 0 else value
    return int(value) if isinstance(value, bool) else value


def write_json(path: Path, content: Any) -> None:
    """Write JSON as `data.atomic_io.write_json`, including the types of the harness."""
    from lm_eval.utils import handle_non_serializable

    files.write_json(path, content, handle_non_serializable)


def write_samples(folder: Path, samples: Mapping[str, Sequence[Mapping[str, Any]]]) -> None:
    """Write `samples_TASK.jsonl`: every document with its prompts and answers, as the harness logs them."""
    from lm_eval.utils import handle_non_serializable

    for task, rows in samples.items():
        plain = (files.of_json(row, handle_non_serializable) for row in rows)
        lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in plain]
        write_text(folder / f"samples_{task}.jsonl", "".join(lines))


# What tables read beside the results: of the harness, and of ours.
_TABLES = ("versions", "n-shot", "n-samples", "config")
_TABLES_OURS = ("suites", "chance", "split", "other_split", "truncated", "score", "max_length", "seconds")


def read_results(path: Path, *, tables: bool = False) -> dict[str, Any]:
    """Read a `results.json`, or the one of a folder. Raises FileNotFoundError, or ValueError for another kind of file.

    tables: the file must hold what tables show.
    """
    file = path / RESULTS_FILE if path.is_dir() else path
    if not file.is_file():
        raise FileNotFoundError(f"{file}: no results there; python eval.py MODEL --suite ... writes them")
    remedy = "a results.json of python eval.py MODEL --suite is wanted"
    content = read_json(file, remedy, "metalion", "results", *(_TABLES if tables else ()))
    ours, needed = content["metalion"], ("title", "documents", *(_TABLES_OURS if tables else ()))
    if missing := [key for key in needed if not isinstance(ours, dict) or key not in ours]:
        raise ValueError(f"{file} has no key 'metalion.{missing[0]}': {remedy}")
    return content


def _fresh(task: Any) -> None:
    """Remove the requests and answers of an earlier evaluation of the same task object."""
    task._instances = None


def _chance(samples: Sequence[Mapping[str, Any]]) -> float | None:
    """Return the accuracy of guessing, for tasks with choices."""
    counts = [len(sample["filtered_resps"]) for sample in samples if "acc" in sample["metrics"]]
    return sum(1 / n for n in counts) / len(counts) if counts and min(counts) > 1 else None


def _task_hash(samples: Sequence[Mapping[str, Any]]) -> str:
    from lm_eval.utils import hash_string

    return hash_string("".join(s["doc_hash"] + s["prompt_hash"] + s["target_hash"] for s in samples))


def _fingerprint(loaded: LoadedTask) -> dict[str, str]:
    dataset = loaded.task.dataset[loaded.split]
    return {str(loaded.task.config.dataset_path): str(getattr(dataset, "_fingerprint", ""))}


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep the harness's notes on its defaults and its progress bars off the terminal."""
    import datasets

    logger = logging.getLogger("lm_eval")
    level, bars = logger.level, datasets.are_progress_bars_disabled()
    previous = os.environ.get("DISABLE_MULTIPROC")
    # Forking a process that may hold a GPU, for a bootstrap of seconds, is not worth it.
    os.environ["DISABLE_MULTIPROC"] = "1"
    logger.setLevel(logging.ERROR)
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        logger.setLevel(level)
        if not bars:
            datasets.enable_progress_bars()
        if previous is None:
            del os.environ["DISABLE_MULTIPROC"]
        else:
            os.environ["DISABLE_MULTIPROC"] = previous


@contextlib.contextmanager
def _templates_compiled_once() -> Iterator[None]:
    """Compile each template once. The harness compiles it for every document, which takes longer than a small model."""
    from lm_eval import utils

    compiled = functools.cache(utils.env.from_string)
    utils.env.from_string = compiled
    try:
        yield
    finally:
        del utils.env.from_string


@contextlib.contextmanager
def _rarely_collected() -> Iterator[None]:
    """Collect garbage rarely. Otherwise it takes a quarter of the harness's time."""
    previous = gc.get_threshold()
    gc.set_threshold(max(previous[0], 200_000), *previous[1:])
    try:
        yield
    finally:
        gc.set_threshold(*previous)


@contextlib.contextmanager
def _random_state_kept() -> Iterator[None]:
    """Restore the random state afterwards. The harness seeds every generator."""
    import torch

    python, numpy_state = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=range(torch.cuda.device_count()) if torch.cuda.is_available() else []):
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy_state)


def metric_name(metric: str, tag: str) -> str:
    """Return the name of a metric under a filter: "acc", or "exact_match,strict-match" for a named filter."""
    return metric if tag == "none" else f"{metric},{tag}"


def metric_value(results: Mapping[str, Any], task: str, metric: str) -> tuple[float, float | None] | None:
    """Return (value, standard error or None) of a task's metric, or None if it has no such value.

    metric: as `metric_name`; one without a filter is the task's unfiltered one, or else that of its first filter.
    """
    entry = results["results"].get(task, {})
    named = [key for key in entry if key == metric or key.startswith(f"{metric},")]
    for key in sorted(named, key=lambda key: key != f"{metric},none"):
        name, _, tag = key.partition(",")
        if isinstance(value := entry[key], int | float):
            error = entry.get(f"{name}_stderr,{tag}")
            known = isinstance(error, int | float) and math.isfinite(error)
            return float(value), float(error) if known else None
    return None
