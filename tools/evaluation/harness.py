"""Run suites through the harness and assemble `results.json`: the harness's own format, and the key `metalion`.

The key holds hashes of weights and data, the suites, and per task the split, the chance level and the requests that were
too long. For paired comparisons it holds each document's value of each metric.
"""

from __future__ import annotations

import contextlib
import io
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from models.options import nearest_names
from tools.evaluation import multirc
from tools.evaluation.document_metrics import chance_level, majority_scores, metrics_by_document, task_hash
from tools.evaluation.harness_context import fast, quiet, unchanged_random_state
from tools.evaluation.request import TaskRequest
from tools.evaluation.request_pairs import RequestCounts
from tools.evaluation.suites import Suite, read_suite, suite_names, task_suite
from tools.evaluation.tasks import TaskSet, load_tasks

if TYPE_CHECKING:
    from tools.evaluation.task_factory import LoadedTask

# Resamples for the standard error of a metric without a formula (perplexity). The harness's 100,000 take minutes.
BOOTSTRAP = 1000
SEED_ARGUMENTS = ("random_seed", "numpy_random_seed", "torch_random_seed", "fewshot_random_seed")


@dataclass(frozen=True)
class Prepared:
    """Hold suites and their tasks with data, for any number of evaluations.

    whole_sets: task -> documents of the whole set, where the project's suites state it.
    """

    request: TaskRequest
    suites: tuple[Suite, ...]
    task_set: TaskSet
    whole_sets: Mapping[str, int] = field(default_factory=dict)

    @property
    def tasks(self) -> dict[str, LoadedTask]:
        """Return the tasks by name."""
        return self.task_set.tasks


def data_folder(folder: Path, otherwise: str = "") -> Path:
    """Return a folder of --data-dir with `~` as the home folder. Raises FileNotFoundError if it does not exist.

    otherwise: ends the message, as another way to give the data.
    """
    folder = folder.expanduser()
    if not folder.is_dir():
        raise FileNotFoundError(
            f"--data-dir {folder}: no such folder. Name a folder with the data sets (docs/guide/evaluation.md){otherwise}"
        )
    return folder


def prepare_tasks(request: TaskRequest) -> Prepared:
    """Read suites and data. Raises as `read_suite`, `load_tasks` and `check_metrics`, and ValueError without a task.

    Raises FileNotFoundError if the data folder does not exist.
    """
    if request.data_dir is not None:
        hub = ", or leave --data-dir out: the data then come from the hub"
        request = replace(request, data_dir=data_folder(request.data_dir, hub))
    suites = [read_suite(name) for name in request.suites]
    if request.tasks:
        suites.append(task_suite(request.tasks))
    suite_tasks = dict.fromkeys(task for suite in suites for task in suite.tasks)
    if not suite_tasks.keys() - set(request.without):
        raise ValueError("nothing to evaluate: name a suite (--suite superglue,commonsense) or a task (--tasks piqa)")
    # The fields of the project's own suites hold for tasks that are named alone, too.
    known = [*map(read_suite, suite_names()), *suites]
    with quiet():
        task_set = load_tasks(
            list(suite_tasks),
            request,
            fields={task: fields for suite in known for task, fields in suite.fields.items()},
            local=[task for suite in known for task in suite.local],
            folders=list(dict.fromkeys(folder for suite in known for folder in suite.folders)),
        )
    for suite in suites:
        check_metrics(suite, task_set.tasks)
    return Prepared(request, tuple(suites), task_set, {t: n for suite in known for t, n in suite.documents.items()})


def check_metrics(suite: Suite, tasks: Mapping[str, LoadedTask]) -> None:
    """Raise ValueError for a column of a metric that its task does not have, naming the task's metrics."""
    for column in suite.columns:
        if column.task not in tasks or not column.metric:
            continue
        task = tasks[column.task].task
        metric, _, tag = column.metric.partition(",")
        metrics = [*task.aggregation(), *(multirc.METRICS if column.task == "multirc" else ())]
        filters = [ensemble.name for ensemble in getattr(task, "_filters", ())]
        for kind, name, allowed in (("metric", metric, metrics), ("filter", tag, filters)):
            if name and name not in allowed:
                raise ValueError(
                    f"the suite {suite.name}: {column.task} has no {kind} {name!r}; {nearest_names(name, allowed)} "
                    f"(column {column.label})"
                )


def evaluate(lm: Any, prepared: Prepared, *, use_cache: Path | None = None) -> dict[str, Any] | None:
    """Evaluate a model on all tasks. Return the results with their samples, or None on processes that do not write them.

    The random state of the process does not change.

    lm: an `lm_eval.api.model.LM`. use_cache: as `lm_eval.simple_evaluate`, for models without a cache of their own.
    """
    import lm_eval
    from lm_eval.loggers import EvaluationTracker
    from lm_eval.utils import sanitize_model_name

    request, started = prepared.request, time.perf_counter()
    multiturn = (
        bool(request.apply_chat_template) if request.fewshot_as_multiturn is None else request.fewshot_as_multiturn
    )
    main = is_main_process(lm)
    for loaded in prepared.tasks.values():
        loaded.task._instances = None  # requests and answers of an earlier evaluation
    # The bars of a cached model are the harness's own.
    errors = contextlib.nullcontext() if use_cache else contextlib.redirect_stderr(io.StringIO())
    tracker = EvaluationTracker()
    with unchanged_random_state(), fast(), quiet(), contextlib.redirect_stdout(io.StringIO()), errors:
        results = lm_eval.simple_evaluate(
            model=lm,
            tasks=prepared.task_set.roots,
            num_fewshot=request.shots,
            bootstrap_iters=BOOTSTRAP if main else 0,
            task_manager=prepared.task_set.manager,
            use_cache=None if use_cache is None else str(use_cache),
            limit=request.limit,
            system_instruction=request.system_instruction,
            apply_chat_template=request.apply_chat_template,
            fewshot_as_multiturn=multiturn,
            gen_kwargs=request.gen_kwargs,
            evaluation_tracker=tracker,
            **dict(zip(SEED_ARGUMENTS, request.seed, strict=True)),
        )
    if results is None or not main:
        return None
    facts = tracker.general_config_tracker
    facts.log_end_time()
    name = str(getattr(lm, "name", type(lm).__name__))
    results.update(asdict(facts), model_name=name, model_name_sanitized=sanitize_model_name(name))
    samples = results["samples"]
    if "multirc" in samples:
        for key, value in multirc.multirc_metrics(samples["multirc"]).items():
            results["results"]["multirc"][f"{key},none"] = value
            if not key.endswith("_stderr"):
                results["higher_is_better"]["multirc"][key] = True
    results["task_hashes"] = {task: task_hash(rows) for task, rows in samples.items()}
    if hasattr(lm, "count"):  # a model whose cache may have answered
        lm.count(request for loaded in prepared.tasks.values() for request in loaded.task.instances)
    counts = getattr(lm, "counts", None) or RequestCounts()
    results["metalion"] = {
        "suites": [suite.name for suite in prepared.suites],
        "members": prepared.task_set.members,
        "whole_set": {task: n for task, n in prepared.whole_sets.items() if task in samples},
        **task_settings(prepared),
        "majority": {
            task: scores
            for task, rows in samples.items()
            if (scores := majority_scores(task, prepared.tasks[task].task, rows))
        },
        "chance": {task: chance for task, rows in samples.items() if (chance := chance_level(rows)) is not None},
        **counts.by_task(),
        **model_settings(lm),
        "longest_request": counts.longest,
        "tokens_asked": counts.tokens,
        "tokens_read": getattr(getattr(lm, "scorer", None), "read", None),
        "seconds": round(time.perf_counter() - started, 3),
        "documents": {task: metrics_by_document(task, rows) for task, rows in samples.items()},
    }
    return results


def is_main_process(lm: Any) -> bool:
    """Return whether this process writes the results. A model of the harness has one process."""
    return getattr(getattr(lm, "processes", None), "is_main", True)


def task_settings(prepared: Prepared) -> dict[str, Any]:
    """Return split and data of every task, the tasks on another split than the stock one, and the examples in the prompt."""
    return {
        "split": {name: loaded.split for name, loaded in prepared.tasks.items()},
        "other_split": sorted(name for name, loaded in prepared.tasks.items() if loaded.other_split),
        "data": {name: loaded.files or _hub_fingerprint(loaded) for name, loaded in prepared.tasks.items()},
        "shots": prepared.request.shots,
        **prepared.request.prompt_settings,
    }


def shots_of(prepared: Prepared) -> dict[str, int]:
    """Return task -> number of examples in the prompt, as the harness counts them. --shots does not change a task with 0."""
    configured = {name: loaded.task.get_config("num_fewshot") for name, loaded in prepared.tasks.items()}
    requested = prepared.request.shots
    return {name: shots or 0 if requested is None or shots == 0 else requested for name, shots in configured.items()}


def model_settings(lm: Any) -> dict[str, Any]:
    """Return the settings of a model that its answers depend on, besides the weights."""
    return {
        "max_length": getattr(lm, "max_length", None),
        "score": getattr(lm, "score_name", "log-likelihood"),
    }


def _hub_fingerprint(loaded: LoadedTask) -> dict[str, str]:
    dataset = loaded.task.dataset[loaded.split]
    return {str(loaded.task.config.dataset_path): str(getattr(dataset, "_fingerprint", ""))}
