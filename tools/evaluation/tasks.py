"""Build the harness's tasks and groups. Their data come from the hub, or from files of a folder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from models.options import nearest_names
from tools.evaluation.request import TaskRequest
from tools.evaluation.suites import UnknownNameError

if TYPE_CHECKING:  # the harness takes seconds to import; a wrong name of a suite is refused before
    from lm_eval.api.group import Group
    from lm_eval.api.task import Task
    from lm_eval.tasks import TaskManager

    from tools.evaluation.task_factory import LoadedTask


@dataclass(frozen=True)
class TaskSet:
    """Tasks by name, and the harness's objects that hold them.

    Attributes:
        tasks: every task.
        members: requested group, tag or task -> its tasks.
        roots: groups, and the tasks of no group, as `lm_eval.simple_evaluate` takes them.
    """

    tasks: dict[str, LoadedTask]
    members: dict[str, list[str]]
    roots: list[Task | Group]
    manager: TaskManager


def load_tasks(
    names: Sequence[str],
    request: TaskRequest,
    *,
    fields: Mapping[str, Sequence[str]] | None = None,
    local: Sequence[str] = (),
    folders: Sequence[str] = (),
) -> TaskSet:
    """Build tasks, groups and tags by name, with their data.

    Args:
        fields: task -> fields that every row must have.
        local: tasks whose data the hub cannot provide.
        folders: the harness's folders of the tasks, if known.

    Raises:
        UnknownNameError: a task that the harness does not have, or a name in `without` that is none of the tasks.
        FileNotFoundError: a data file is missing.
        ValueError: a row lacks a field, a document has no valid label, or a file is damaged or empty. The message names
            the task, the file, and the row or document.
        ConnectionError: the hub cannot be reached.
    """
    from tools.evaluation.task_factory import LocalDataFactory

    manager = task_manager(names, folders, request.include_path)
    factory = LocalDataFactory(manager, request, fields or {}, local)
    manager._factory = factory
    members = {name: factory.task_names(name) for name in names}
    every = list(dict.fromkeys(task for tasks in members.values() for task in tasks))
    for name in request.without:
        if name not in every:
            raise UnknownNameError(f"--without {name}: it is none of the requested tasks; {nearest_names(name, every)}")
    groups = [name for name in names if manager.task_index[name].kind.name == "GROUP"]
    in_groups = {task for name in groups for task in members[name]}
    single = [name for name in every if name not in in_groups and name not in request.without]
    built = manager.load([*groups, *single])
    roots = [*(built["groups"][name] for name in groups), *(built["tasks"][name] for name in single)]
    members = {name: [task for task in tasks if task not in request.without] for name, tasks in members.items()}
    return TaskSet(factory.loaded, members, roots, manager)


def task_manager(names: Sequence[str], folders: Sequence[str] = (), include_path: Path | None = None) -> TaskManager:
    """Return an index of the given folders of tasks if they hold all names, else of the whole harness (takes 10 s).

    include_path: a folder with more tasks, whose names replace the harness's.

    Raises UnknownNameError; FileNotFoundError for an `include_path` that is no folder.
    """
    import lm_eval.tasks

    root = Path(lm_eval.tasks.__file__).parent
    more = [] if include_path is None else [include_path]
    if include_path is not None and not include_path.is_dir():
        raise FileNotFoundError(f"--include-path {include_path}: it is no folder; give a folder with task YAMLs")
    if folders or more:
        paths = [*(root / folder for folder in folders), *more]
        manager = lm_eval.tasks.TaskManager(include_defaults=False, include_path=paths)
        if all(name in manager.task_index for name in names):
            return manager
    manager = lm_eval.tasks.TaskManager(include_path=more) if more else lm_eval.tasks.TaskManager()
    for name in names:
        if name not in manager.task_index:
            raise UnknownNameError(f"the harness has no task {name!r}; {nearest_names(name, manager.all_tasks)}")
    return manager
