"""Build one task of the harness with its data from files of a folder, and check its documents."""

from __future__ import annotations

import glob
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lm_eval.tasks._factory import TaskFactory
from lm_eval.tasks._yaml_loader import load_yaml

from megatron_lite.checkpoint.checksums import file_sha256
from tools.evaluation.request import TaskRequest
from tools.evaluation.row_checks import check_rows, first_line, remedy, template_fields

if TYPE_CHECKING:
    from lm_eval.api.group import Group
    from lm_eval.api.task import Task
    from lm_eval.tasks import TaskManager
    from lm_eval.tasks._index import Entry

SPLITS = ("training_split", "validation_split", "test_split")
SUFFIXES = (".jsonl", ".jsonl.gz", ".jsonl.zst", ".json", ".parquet")
LOCAL_FORMATS = ("arrow", "csv", "json", "parquet", "text")  # values of dataset_path of tasks that name their files
LABELS = {"copa": (0, 1)}  # of tasks whose functions accept any other label


@dataclass(frozen=True)
class LoadedTask:
    """A task with its data.

    Attributes:
        split: the evaluated split, as the data call it.
        other_split: whether the stock task evaluates another split.
        files: data files with their SHA-256; empty for the hub.
    """

    task: Task
    split: str
    other_split: bool
    files: dict[str, str]


class LocalDataFactory(TaskFactory):
    """The harness's factory of tasks, which replaces the data of each task and checks its rows.

    `loaded` holds the tasks that were built. A task of `request.without` is not built.
    """

    def __init__(
        self,
        manager: TaskManager,
        request: TaskRequest,
        fields: Mapping[str, Sequence[str]],
        local: Sequence[str],
    ) -> None:
        super().__init__(meta=manager.metadata)
        self.loaded: dict[str, LoadedTask] = {}
        self._index, self._request, self._fields, self._local = manager.task_index, request, fields, local
        self._listed: list[str] | None = None

    def task_names(self, name: str) -> list[str]:
        """Return the tasks of a group or tag, or the name of a single task, without building them."""
        self._listed = []
        self.build(self._index[name], registry=self._index)
        names, self._listed = self._listed, None
        return list(dict.fromkeys(names))

    def _build_group_members(self, *args: Any) -> list[Task | Group]:
        return [member for member in super()._build_group_members(*args) if member is not None]

    def _build_task(self, entry: Entry, overrides: dict[str, Any] | None) -> Task:
        changes = dict(overrides or {})
        name = changes.get("task", entry.name)
        if self._listed is not None:
            self._listed.append(name)
        if self._listed is not None or name in self._request.without:
            return None  # type: ignore[return-value]
        config = {**stock_config(entry), **changes}
        moved, paths = self._moved_data(name, config)
        changes |= moved
        files = {str(path): file_sha256(path) for path in paths.values()}
        source = ", ".join(files) or "the hub"
        try:
            task = super()._build_task(entry, changes)
        except ConnectionError as error:
            remedy = "Without the hub, give the folder of the data with --data-dir (docs/guide/evaluation.md)"
            raise ConnectionError(f"{error}. {remedy}") from error
        except Exception as error:  # raised by functions and templates of a task for a wrong value
            if not files:
                raise
            raise ValueError(
                f"{name}: the harness cannot read {source} as this task's data: {first_line(error)}. Compare the fields and "
                "values of its rows with those of the data set, or get it again"
            ) from error
        split = task.config.test_split if task.has_test_docs() else task.config.validation_split
        check_documents(name, task, f"{source}, split {split!r}")
        _exclude_own_document(task, split)
        _check_shots(name, task, split, self._request.shots, source)
        other_split = split != (config.get("test_split") or config.get("validation_split"))
        self.loaded[name] = LoadedTask(task, split, other_split, files)
        return task

    def _moved_data(self, name: str, config: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Path]]:
        """Return `local_data` of a task, with the rows of its files checked."""
        request = self._request
        if config.get("dataset_path") in LOCAL_FORMATS:
            return {}, {}
        changes, files = local_data(name, config, request.data_dir, split=request.split)
        if request.data_dir is not None and not files and not request.hub:
            raise FileNotFoundError(_missing_file(name, config, request.data_dir))
        if name in self._local and not files:
            raise FileNotFoundError(
                f"{name}: its data set on the hub is a script, which datasets 4 and later refuse, so that it needs a file "
                f"even online: give --data-dir with {' or '.join(_folders(config, name))}/test.jsonl (or validation), or "
                f"leave the task out (--without {name})"
            )
        for path in files.values():
            check_rows(name, path, self._fields.get(name) or template_fields(config))
        return changes, files


def stock_config(entry: Entry) -> dict[str, Any]:
    """Return a task's YAML in the installed harness, with its includes. Functions are names."""
    return {} if entry.yaml_path is None else load_yaml(entry.yaml_path, resolve_func=False, recursive=True)


def local_data(
    name: str, config: Mapping[str, Any], data_dir: Path | None, *, split: str | None = None
) -> tuple[dict[str, Any], dict[str, Path]]:
    """Return the keys that move a task's data to files of a folder and select the splits, and the files by split.

    There are no files if the folder has none for the evaluated splits.

    Raises ValueError for files of several formats.
    """
    files: dict[str, Path] = {}
    for folder in _folders(config, name) if data_dir is not None else ():
        files = {
            config[key]: path
            for key in (*SPLITS, "fewshot_split")
            if config.get(key) and (path := _file(Path(data_dir or "") / folder, config[key])) is not None
        }
        if files:
            break
    evaluated = {config[key]: key for key in ("test_split", "validation_split") if config.get(key)}
    changes: dict[str, Any] = {}
    # The harness evaluates the test split where a task has one.
    preferred = split is not None and split == config.get("validation_split") and (not files or split in files)
    if preferred and "test_split" in evaluated.values():
        changes["test_split"] = None
    if not files.keys() & evaluated.keys():
        return changes, {}
    formats = {"parquet" if path.suffix == ".parquet" else "json" for path in files.values()}
    if len(formats) > 1:
        raise ValueError(f"{name}: {', '.join(map(str, files.values()))}: one format is expected for all splits")
    changes.update(
        dataset_path=formats.pop(),
        dataset_name=None,
        dataset_kwargs={"data_files": {key: glob.escape(str(path)) for key, path in files.items()}},
        **{key: None for key in SPLITS if config.get(key) and config[key] not in files},
    )
    if config.get("fewshot_split") and config["fewshot_split"] not in files:
        changes["fewshot_split"] = None
    return changes, files


def check_documents(name: str, task: Task, source: str) -> None:
    """Raise ValueError for the first document that cannot be evaluated, or whose label is none of its choices.

    The harness counts the second kind as wrong answers: a set without labels (-1), or with other labels, would score 0.
    """
    if getattr(task, "OUTPUT_TYPE", None) != "multiple_choice" or callable(task.config.process_results):
        return
    for number, document in enumerate(task.eval_docs, start=1):
        where = f"{name}: {source}: document {number}"
        try:
            # Templates of a text are not rendered here: this takes a millisecond each, and their fields were checked.
            text = task.doc_to_text(document) if task.multiple_input or callable(task.config.doc_to_text) else None
            label = text if task.multiple_input else task.doc_to_target(document)
            if name in LABELS and document["label"] not in LABELS[name]:
                label = document["label"]
            golds = label if isinstance(label, list) else [label]
            # Every task has the first two choices.
            choices = [] if all(gold in (0, 1) for gold in golds) else task.doc_to_choice(document)
        except Exception as error:  # raised by functions and templates of a task for a wrong value
            raise ValueError(f"{where} cannot be evaluated: {first_line(error)}: {remedy(name)}") from error
        for gold in golds:
            if gold not in (0, 1) and gold not in range(len(choices)) and gold not in choices:
                raise ValueError(
                    f"{where} has the label {gold!r}: a number from 0 to {len(choices) - 1}, or one of its choices, is "
                    f"expected. A set without labels cannot be scored (--without {name})"
                )


def _exclude_own_document(task: Task, split: str) -> None:
    """Keep a document out of the examples in its own prompt, if they come from the evaluated split.

    The harness does so only if the split of the examples has the name of the test split, or neither has a name.
    """
    examples = task.config.fewshot_config
    source = examples.split or task.config.training_split or task.config.validation_split or task.config.test_split
    if source == split and examples.samples is None:
        examples.split = task.config.test_split  # the examples were already read when the task was built


def _check_shots(name: str, task: Task, evaluated: str, shots: int | None, source: str) -> None:
    """Raise ValueError for more examples in the prompt than there are other rows."""
    configured = task.get_config("num_fewshot")
    count = configured if shots is None or configured == 0 else shots
    if not count:
        return
    rows = len(list(task.fewshot_docs()))
    examples = task.config.fewshot_config
    split = examples.split or task.config.training_split or evaluated
    allowed = rows - (split == evaluated and examples.samples is None)
    if count > allowed:
        raise ValueError(
            f"{name}: {count} examples in the prompt, but {source} has {rows} rows to take them from (split {split!r}): "
            f"allowed are at most {allowed} (--shots), or leave the task out (--without {name})"
        )


def _folders(config: Mapping[str, Any], name: str) -> list[str]:
    """Return folders that may hold a task's data, by the names of the data set: super_glue/boolq, ai2_arc/ARC-Easy, piqa."""
    path = str(config.get("dataset_path") or "").rpartition("/")[2]
    subset = config.get("dataset_name")
    return list(dict.fromkeys(f for f in (f"{path}/{subset}" if subset else "", path, subset or "", name) if f))


def _file(folder: Path, split: str) -> Path | None:
    return next((p for suffix in SUFFIXES if (p := folder / f"{split}{suffix}").is_file()), None)


def _missing_file(name: str, config: Mapping[str, Any], data_dir: Path) -> str:
    splits = [config[key] for key in ("test_split", "validation_split") if config.get(key)] or ["validation"]
    places = " or ".join(f"{data_dir / folder}/{split}.jsonl" for folder in _folders(config, name) for split in splits)
    return (
        f"{name}: the data folder lacks its file, {places} (also .gz, .zst, .json, .parquet). Put it there, leave the task "
        f"out (--without {name}), or take missing files from the hub (--hub)"
    )
