"""The harness's own tasks, with their data moved: from the hub, or from files of a folder."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from data.corpus.readers import decompressed
from megatron_lite.checkpoint.checksums import file_sha256
from models.options import nearest_names
from tools.evaluation.row_checks import row_problem
from tools.evaluation.suites import UnknownNameError

if TYPE_CHECKING:
    from lm_eval.api.task import Task
    from lm_eval.tasks import TaskManager

SPLITS = ("training_split", "validation_split", "test_split")
LABELS = {"copa": (0, 1)}  # of tasks whose functions take any other label for one of these
SUFFIXES = (".jsonl", ".jsonl.gz", ".jsonl.zst", ".json", ".parquet")


@dataclass(frozen=True)
class LoadedTask:
    """A task that is ready to be asked.

    Attributes:
        split: the one that is evaluated, as the data call it.
        moved: that is not the split that the stock task evaluates.
        files: where its data lie, with their SHA-256; empty for the hub.
    """

    task: Task
    split: str
    moved: bool
    files: dict[str, str]


def load_tasks(
    names: Sequence[str],
    *,
    without: Sequence[str] = (),
    data_dir: Path | None = None,
    hub: bool = False,
    split: str | None = None,
    fields: Mapping[str, Sequence[str]] | None = None,
    local: Sequence[str] = (),
    folders: Sequence[str] = (),
    shots: int | None = None,
) -> tuple[dict[str, LoadedTask], TaskManager]:
    """Build tasks by name, each with its data.

    Args:
        without: tasks to leave out of those that the names stand for.
        data_dir: folder of data files; None for the hub.
        hub: what the folder lacks comes from the hub.
        split: evaluate this split ("validation", "test") instead of the stock task's, where the data have it.
        fields: task -> what every row must hold.
        local: tasks whose data the hub cannot give.
        folders: where the harness keeps the tasks, if known.
        shots: examples in the prompt, if asked for.

    Raises:
        UnknownNameError: a task that the harness does not have, or one to leave out that is none of these.
        FileNotFoundError: the folder lacks a file, or a task needs one: which.
        ValueError: a row lacks a field, a document has no right choice, or a file is damaged or empty:
            the task, the file, and which row or document.
        ConnectionError: the hub is out of reach.
    """
    manager = task_manager(names, folders)
    specs: list[dict[str, Any]] = []
    files: dict[str, dict[str, str]] = {}
    leaves = _leaves(manager, names)
    for name in without:
        if name not in leaves:
            raise UnknownNameError(
                f"--without {name}: it is none of the tasks that are asked; {nearest_names(name, leaves)}"
            )
    for name in (leaf for leaf in leaves if leaf not in without):
        config = stock_config(manager, name)
        spec, found = moved_task(name, config, data_dir, split=split, needs_file=name in local and not hub)
        if data_dir is not None and not found and not hub:
            raise FileNotFoundError(_lacking(name, config, data_dir))
        if name in local and not found:
            raise FileNotFoundError(
                f"{name}: its data set on the hub is a script, which datasets 4 and later refuse, so that it needs a file "
                f"even online: give --data-dir with {' or '.join(_candidates(config, name))}/test.jsonl (or validation), or "
                f"leave the task out (--without {name})"
            )
        for path in found.values():
            check_rows(name, path, (fields or {}).get(name) or template_fields(config))
        files[name] = {str(path): file_sha256(path) for path in found.values()}
        specs.append(spec)
    loaded: dict[str, LoadedTask] = {}
    for name, task in _build(manager, specs, files).items():
        stock = stock_config(manager, name)
        used = task.config.test_split if task.has_test_docs() else task.config.validation_split
        check_documents(name, task, f"{', '.join(files[name]) or 'the hub'}, split {used!r}")
        _keep_from_own_prompt(task, used)
        _check_shots(name, task, used, shots, ", ".join(files[name]) or "the hub")
        loaded[name] = LoadedTask(
            task, used, used != (stock.get("test_split") or stock.get("validation_split")), files[name]
        )
    return loaded, manager


def task_manager(names: Sequence[str], folders: Sequence[str] = ()) -> TaskManager:
    """Return an index of the given folders of tasks if they hold all names, else of the whole harness (10 s).

    Raises UnknownNameError.
    """
    import lm_eval.tasks
    from lm_eval.tasks import TaskManager

    root = Path(lm_eval.tasks.__file__).parent
    if folders:
        manager = TaskManager(include_defaults=False, include_path=[root / folder for folder in folders])
        if all(name in manager.task_index for name in names):
            return manager
    manager = TaskManager()
    for name in names:
        if name not in manager.task_index:
            raise UnknownNameError(f"the harness has no task {name!r}; {nearest_names(name, manager.all_tasks)}")
    return manager


def stock_config(manager: TaskManager, name: str) -> dict[str, Any]:
    """Return the YAML of a task in the installed harness, with its includes. Functions are names."""
    from lm_eval.tasks._yaml_loader import load_yaml

    path = manager.task_index[name].yaml_path
    return {} if path is None else load_yaml(path, resolve_func=False, recursive=True)


def moved_task(
    name: str, config: Mapping[str, Any], data_dir: Path | None, *, split: str | None = None, needs_file: bool = False
) -> tuple[dict[str, Any], dict[str, Path]]:
    """Return a task as an entry of a group that overrides only where its data come from and which splits there are.

    Returns the entry and the files it reads, by split; none where the folder has none (then the entry is the stock task).
    """
    found: dict[str, Path] = {}
    spec: dict[str, Any] = {"task": name}
    if data_dir is not None:
        for folder in _candidates(config, name):
            found = {
                config[key]: path
                for key in SPLITS
                if config.get(key) and (path := _file(data_dir / folder, config[key])) is not None
            }
            if found:
                break
    evaluated = [key for key in ("test_split", "validation_split") if config.get(key)]
    if split is not None:
        # The harness evaluates the test split where a task has one.
        named = {config[key]: key for key in evaluated}
        if split in named and (not found or split in found):
            spec.update({key: None for key in evaluated if config[key] != split and key == "test_split"})
    if not found or not any(config[key] in found for key in evaluated):
        return spec, {}
    formats = {"parquet" if path.suffix == ".parquet" else "json" for path in found.values()}
    if len(formats) > 1:
        raise ValueError(f"{name}: {', '.join(map(str, found.values()))}: one format is expected for all splits")
    spec.update(
        dataset_path=formats.pop(),
        dataset_name=None,
        dataset_kwargs={"data_files": {key: str(path) for key, path in found.items()}},
        **{key: None for key in SPLITS if config.get(key) and config[key] not in found},
    )
    if config.get("fewshot_split") and config["fewshot_split"] not in found:
        spec["fewshot_split"] = None
    return spec, found


def check_rows(name: str, path: Path, fields: Sequence[str]) -> None:
    """Raises ValueError naming task, file, row and field for the first row that lacks a field, is no JSON object or holds
    what the harness cannot score (`row_problem`), and for no row at all."""
    number, remedy = 0, _remedy(name)
    for number, row in _rows(name, path):
        if not isinstance(row, dict):
            raise ValueError(f"{name}: {path}, row {number} is {type(row).__name__}, not a JSON object: {remedy}")
        for field in fields:
            value: Any = row
            for part in field.split("."):
                value = value.get(part) if isinstance(value, dict) else None
            if value is None:
                held = ", ".join(row) or "nothing"
                raise ValueError(f"{name}: {path}, row {number} lacks the field {field!r}; it holds {held}: {remedy}")
        if fields and (problem := row_problem(name, row)):
            raise ValueError(f"{name}: {path}, row {number} {problem}: {remedy}")
    if not number:
        raise ValueError(f"{name}: {path} holds no row: {remedy}")


def check_documents(name: str, task: Task, source: str) -> None:
    """Raise ValueError for the first document that cannot be evaluated, or whose label is none of its choices.

    The harness counts the second kind as answered wrongly: a set without labels (-1), or with labels in other words, would
    score 0.
    """
    if getattr(task, "OUTPUT_TYPE", None) != "multiple_choice" or callable(task.config.process_results):
        return
    for number, document in enumerate(task.eval_docs, start=1):
        where = f"{name}: {source}: document {number}"
        try:
            # Templates of a text are left to the harness: they take a millisecond, and the fields that they name are there.
            text = task.doc_to_text(document) if task.multiple_input or callable(task.config.doc_to_text) else None
            label = text if task.multiple_input else task.doc_to_target(document)
            if name in LABELS and document["label"] not in LABELS[name]:
                label = document["label"]
            golds = label if isinstance(label, list) else [label]
            # The first two choices are there whatever the others are.
            choices = [] if all(gold in (0, 1) for gold in golds) else task.doc_to_choice(document)
        except Exception as error:  # whatever functions and templates of a task make of a value
            raise ValueError(f"{where} cannot be asked: {first_line(error)}: {_remedy(name)}") from error
        for gold in golds:
            if gold not in (0, 1) and gold not in range(len(choices)) and gold not in choices:
                raise ValueError(
                    f"{where} has the label {gold!r}: a number from 0 to {len(choices) - 1}, or one of its choices, is "
                    f"expected. What has no labels cannot be scored (--without {name})"
                )


def template_fields(config: Mapping[str, Any]) -> list[str]:
    """Return the fields in the templates of a task. The fields that its functions read are unknown."""
    import jinja2
    import jinja2.meta

    environment, found = jinja2.Environment(), set()
    if config.get("process_docs"):
        return []
    for key in ("doc_to_text", "doc_to_target", "doc_to_choice"):
        template = config.get(key)
        if isinstance(template, str) and "{{" in template:
            found |= jinja2.meta.find_undeclared_variables(environment.parse(template))
        elif isinstance(template, str) and template.isidentifier():
            found.add(template)
    return sorted(found)


def _build(
    manager: TaskManager, specs: Sequence[dict[str, Any]], files: Mapping[str, Mapping[str, str]]
) -> dict[str, Task]:
    """Build the harness's tasks one by one, so that an error names its task."""
    built: dict[str, Task] = {}
    for spec in specs:
        name = spec["task"]
        try:
            built |= manager.load([{"group": "metalion", "task": [spec]}])["tasks"]
        except ConnectionError as error:
            raise ConnectionError(f"{error}. Without the hub the data come from a folder: --data-dir") from error
        except Exception as error:  # whatever functions and templates of a task make of a value
            if not files[name]:
                raise
            raise ValueError(
                f"{name}: the harness cannot read {', '.join(files[name])} as this task's data: {first_line(error)}. Compare the "
                "fields and values of its rows with those of the data set, or get it again"
            ) from error
    return built


def _keep_from_own_prompt(task: Task, used: str) -> None:
    """Keep a document out of the examples in its own prompt, if they come from the evaluated split.

    The harness leaves it out where the split of the examples is called as the test split, or neither has a name.
    """
    examples = task.config.fewshot_config
    source = examples.split or task.config.training_split or task.config.validation_split or task.config.test_split
    if source == used and examples.samples is None:
        examples.split = task.config.test_split  # the examples themselves were read when the task was built


def _check_shots(name: str, task: Task, used: str, shots: int | None, source: str) -> None:
    """Raise ValueError for more examples in the prompt than there are other rows."""
    wanted = shots if shots is not None and task.get_config("num_fewshot") != 0 else task.get_config("num_fewshot")
    if not wanted:
        return
    rows = len(list(task.fewshot_docs()))
    examples = task.config.fewshot_config
    split = examples.split or task.config.training_split or used
    allowed = rows - (split == used and examples.samples is None)  # a document is no example in its own prompt
    if wanted > allowed:
        raise ValueError(
            f"{name}: {wanted} examples in the prompt, but {source} has {rows} rows to take them from (split {split!r}): "
            f"ask for {allowed} at most (--shots), or leave the task out (--without {name})"
        )


def first_line(error: Exception) -> str:
    """Return the type of an error and its first line."""
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"


def _leaves(manager: TaskManager, names: Sequence[str]) -> list[str]:
    """Return the tasks, with tags and groups replaced by their members."""
    found: dict[str, None] = {}
    for name in names:
        entry = manager.task_index[name]
        members = sorted(entry.tags) if entry.kind.name == "TAG" else None
        if entry.kind.name == "GROUP":
            listed = (entry.cfg or {}).get("task") or []
            members = [item if isinstance(item, str) else item.get("task", item.get("group")) for item in listed]
            if not all(isinstance(member, str) and member in manager.task_index for member in members):
                raise UnknownNameError(f"the group {name!r} holds more than names of tasks: name its tasks one by one")
        found.update(dict.fromkeys([name] if members is None else _leaves(manager, members)))
    return list(found)


def _candidates(config: Mapping[str, Any], name: str) -> list[str]:
    """Return folders in which a task's data may be, by the names of the data set: super_glue/boolq, ai2_arc/ARC-Easy, piqa."""
    path = str(config.get("dataset_path") or "").rpartition("/")[2]
    subset = config.get("dataset_name")
    return list(dict.fromkeys(f for f in (f"{path}/{subset}" if subset else "", path, subset or "", name) if f))


def _file(folder: Path, split: str) -> Path | None:
    return next((p for suffix in SUFFIXES if (p := folder / f"{split}{suffix}").is_file()), None)


def _lacking(name: str, config: Mapping[str, Any], data_dir: Path) -> str:
    splits = [config[key] for key in ("test_split", "validation_split") if config.get(key)] or ["validation"]
    places = " or ".join(
        f"{data_dir / folder}/{split}.jsonl" for folder in _candidates(config, name) for split in splits
    )
    return (
        f"{name}: the data folder lacks its file, {places} (also .gz, .zst, .json, .parquet). Put it there, leave the task "
        f"out (--without {name}), or let the hub give what the folder lacks (--hub)"
    )


def _rows(name: str, path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield rows with their line, or their place in a JSON list. Raises ValueError as `check_rows`."""
    if path.suffix == ".parquet":
        yield from enumerate(_parquet_rows(name, path), start=1)
        return
    try:
        text = b"".join(piece for piece, _ in decompressed(path)).decode()
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        raise ValueError(f"{name}: {path}, row {line} is no UTF-8 ({error.reason}): {_remedy(name)}") from error
    whole = path.suffix == ".json" and text.lstrip().startswith("[")
    lines = [text] if whole else text.split("\n")
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            content = json.loads(line)
        except ValueError as error:
            raise ValueError(f"{name}: {path}, row {number} is no JSON ({error}): {_remedy(name)}") from error
        yield from enumerate(content, start=1) if whole else [(number, content)]


def _parquet_rows(name: str, path: Path) -> list[dict[str, Any]]:
    import pyarrow
    import pyarrow.parquet

    try:
        return pyarrow.parquet.read_table(path).to_pylist()
    except (pyarrow.ArrowException, OSError) as error:
        raise ValueError(f"{name}: {path} is no whole Parquet file ({first_line(error)}): {_remedy(name)}") from error


def _remedy(name: str) -> str:
    """Return what to do about a file that cannot be used."""
    return f"get the file again, or leave the task out (--without {name})"
