"""Read an experiment (a grid of tasks, models, widths and learning rates in one YAML file) and list its runs."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from itertools import groupby, product
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from megatron_lite.config.files import CONFIGS, ConfigError
from models.options import nearest_names
from tools.cli.yaml_file import read_as

from .classification import TASKS, check_task

FOLDER = CONFIGS / "experiments"

Positive = Annotated[int, Field(ge=1)]
FromZero = Annotated[float, Field(ge=0)]


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class MoreRates(_Section):
    """Add learning rates to `lrs` for some models on some tasks."""

    tasks: tuple[str, ...] = ()
    models: tuple[str, ...] = ()
    lrs: tuple[FromZero, ...] = ()


class Only(_Section):
    """Restrict the grid of a task; null does not restrict."""

    models: tuple[str, ...] | None = None
    widths: tuple[int, ...] | None = None


class MadTask(_Section):
    """Hold the baseline settings of a MAD task and the single changes to them that make its other settings."""

    baseline: dict[str, Any] = Field(default_factory=dict)
    changes: dict[str, tuple[int | float, ...]] = Field(default_factory=dict)


class Recipe(_Section):
    """Hold the values of one model that replace those of the task; `network` adds to the model's definition."""

    widths: tuple[int, ...] | None = None
    lrs: tuple[FromZero, ...] | None = None
    weight_decays: tuple[FromZero, ...] | None = None
    epochs: int | None = Field(default=None, ge=1)
    epoch_steps: int | None = Field(default=None, ge=1)
    evaluate_every: int | None = Field(default=None, ge=1)
    batch_size: int | None = Field(default=None, ge=1)
    warmup_steps: int | None = Field(default=None, ge=0)
    network: dict[str, Any] = Field(default_factory=dict)


class TaskSettings(Recipe):
    """Hold the values of one task that replace those of the experiment; the mappings add to those of the experiment."""

    data: dict[str, Any] = Field(default_factory=dict)
    definitions: dict[str, dict[str, Any]] = Field(default_factory=dict)
    recipes: dict[str, Recipe] = Field(default_factory=dict)


class PaperRow(_Section):
    """Hold a published accuracy in percent; `width` is given if the task has several widths."""

    model: str
    task: str
    width: int | None = None
    accuracy: float


class Paper(_Section):
    """Hold published numbers for comparison."""

    source: str = ""
    rows: tuple[PaperRow, ...] = ()


class Experiment(_Section):
    """Hold an experiment file; configs/experiments/*.yml explain each key."""

    suite: Literal["mqar", "mad", "lra"]
    title: str
    output: Path
    tasks: tuple[str, ...] = Field(min_length=1)
    models: tuple[str, ...] = Field(min_length=1)
    widths: tuple[int, ...] = Field(min_length=1)
    lrs: tuple[FromZero, ...] = Field(min_length=1)
    more_lrs: MoreRates = MoreRates()
    schedule: Literal["cosine", "constant"] = "cosine"
    min_lr: float = Field(default=0.0, ge=0)
    warmup_steps: int = Field(default=0, ge=0)
    weight_decays: tuple[FromZero, ...]
    decayed: Literal["all", "matrices"]
    seeds: tuple[Annotated[int, Field(ge=0)], ...] = (0,)
    epochs: int = Field(ge=1)
    epoch_steps: int | None = Field(default=None, ge=1)
    evaluate_every: int = Field(default=1, ge=1)
    target: float | None = Field(default=None, gt=0, le=1)
    scored: Literal["last", "least_perplexity", "best_validation"] = "last"
    batch_size: Positive | dict[int, Positive]
    drop_last: bool = True
    compile: bool = False
    data: dict[str, Any] = Field(default_factory=dict)
    only: dict[str, Only] = Field(default_factory=dict)
    mad: dict[str, MadTask] = Field(default_factory=dict)
    settings: dict[str, TaskSettings] = Field(default_factory=dict)
    recipes: dict[str, Recipe] = Field(default_factory=dict)
    network: dict[str, Any]
    definitions: dict[str, dict[str, Any]]
    precision: Literal["auto", "bf16", "fp32"] = "auto"
    devices: Literal["auto"] | tuple[str, ...] = "auto"
    workers: int | None = Field(default=None, ge=1)
    side_by_side: int | None = Field(default=None, ge=1)
    graph: bool = True
    paper: Paper = Paper()

    @model_validator(mode="after")
    def _check_scored(self) -> Experiment:
        if self.scored == "best_validation" and not self.classifies:
            raise ValueError(
                f"scored = best_validation: the suite {self.suite} has no validation set; last and least_perplexity are allowed"
            )
        return self

    @property
    def classifies(self) -> bool:
        """Return whether the tasks classify whole sequences, with a validation set apart from the test."""
        return self.suite == "lra"

    def of_task(self, name: str) -> Experiment:
        """Return the experiment with the settings of one task."""
        return self._replaced_by(self.settings.get(name, TaskSettings()))

    def of_model(self, name: str) -> Experiment:
        """Return the experiment of one task with the recipe of one model, whose network includes its definition."""
        definition = Recipe(network=self.definitions[name])
        return self._replaced_by(definition)._replaced_by(self.recipes.get(name, Recipe()))

    def _replaced_by(self, values: Recipe) -> Experiment:
        update: dict[str, Any] = {}
        for key in type(values).model_fields:
            if (value := getattr(values, key)) is not None:
                update[key] = {**getattr(self, key), **value} if isinstance(value, dict) else value
        return self.model_copy(update=update)


@dataclass(frozen=True)
class Run:
    """Hold all settings that the result of one training run depends on.

    Attributes:
        data: arguments of the task's generator except `length`, and the numbers of examples.
        network: keys of `models.config.ModelConfig` and of `tools.synthetic.network`.
        epoch_steps: steps per epoch; the next epochs read the next examples until all are read. None for all examples.
    """

    suite: str
    task: str
    model: str
    width: int
    lr: float
    weight_decay: float
    seed: int
    length: int
    epochs: int
    evaluate_every: int
    target: float | None
    batch_size: int
    min_lr: float
    decayed: str
    precision: str
    data: dict[str, Any]
    network: dict[str, Any]
    warmup_steps: int = 0
    scored: str = "last"
    schedule: str = "cosine"
    drop_last: bool = True
    epoch_steps: int | None = None
    compile: bool = False

    @property
    def classifies(self) -> bool:
        """Return whether the task classifies whole sequences."""
        return self.suite == "lra"

    @property
    def base_task(self) -> str:
        """Return the task without its setting in MAD: `compression` of `compression/vocabulary=32`."""
        return self.task.partition("/")[0]

    @cached_property
    def id(self) -> str:
        """Return 12 hexadecimal digits that identify the settings."""
        return _digest(self._settings())

    @cached_property
    def sweep(self) -> str:
        """Return an id without learning rate and weight decay: the best run of a sweep is its result."""
        return _digest({key: value for key, value in self._settings().items() if key not in ("lr", "weight_decay")})

    def _settings(self) -> dict[str, Any]:
        """Return the settings that are not defaults, so that a new key with a default keeps the ids of old results."""
        defaults = {field.name: field.default for field in fields(self)}
        return {key: value for key, value in asdict(self).items() if value != defaults[key]}

    @property
    def steps_per_pass(self) -> int:
        """Return optimizer steps per pass over the examples. `drop_last` leaves out a part of a batch, another one each pass."""
        examples = int(self.data["train_examples"])
        return max(1, examples // self.batch_size) if self.drop_last else -(-examples // self.batch_size)

    @property
    def steps_per_epoch(self) -> int:
        """Return optimizer steps per epoch, which is a pass or, with `epoch_steps`, a part of one."""
        return min(self.steps_per_pass, self.epoch_steps or self.steps_per_pass)

    @property
    def steps(self) -> int:
        """Return the optimizer steps of a run that does not stop early."""
        return self.steps_per_epoch * self.epochs

    @property
    def name(self) -> str:
        """Return a name for messages."""
        return f"{self.task} {self.model} d={self.width}"


def load_experiment(suite: str, overrides: Sequence[str] = (), path: Path | None = None) -> Experiment:
    """Read configs/experiments/<suite>.yml, or `path`, with `key=value` overrides.

    Raises ConfigError listing all errors, for settings of an unknown task, and for an override that a task's settings or a
    model's recipe replaces.
    """
    experiment = read_as(Experiment, path or FOLDER / f"{suite}.yml", overrides, suite=suite)
    known = dict.fromkeys([*experiment.tasks, *experiment.mad, *TASKS])
    for name in experiment.settings:
        if name not in known:
            raise ConfigError([f"settings.{name} belongs to no task; {nearest_names(name, known)}"])
    for task, word in product(experiment.tasks, overrides):
        rest = word.removeprefix(f"settings.{task}.")
        key, _, below = rest.partition("=")[0].partition(".")
        for place, values in _replacements(experiment, task).items():
            value = getattr(values, key, None)
            replaced = value not in (None, {}) and (not below or below.partition(".")[0] in value)
            if replaced and word != f"{place}.{rest}":
                raise ConfigError([f"{word}: {place} replaces this key; override {place}.{rest}"])
    return experiment


def _replacements(experiment: Experiment, task: str) -> dict[str, Recipe]:
    """Return the settings of a task and the recipes of its models, by their keys."""
    settings = experiment.settings.get(task, TaskSettings())
    replacements: dict[str, Recipe] = {f"settings.{task}": settings}
    for model in experiment.models:
        if model in settings.recipes:
            replacements[f"settings.{task}.recipes.{model}"] = settings.recipes[model]
        elif model in experiment.recipes:
            replacements[f"recipes.{model}"] = experiment.recipes[model]
    return replacements


def plan(experiment: Experiment, precision: str) -> list[Run]:
    """Return the distinct runs of an experiment, with the runs of one sweep adjacent.

    precision: "bf16" or "fp32", in which the models compute. Raises ValueError for an invalid value or an empty grid.
    """
    runs = []
    for name in experiment.tasks:
        runs += _runs_of_task(experiment.of_task(name), name, precision)
    if not runs:
        raise ValueError(
            f"no run remains of tasks = {list(experiment.tasks)}, models = {list(experiment.models)}, widths = "
            f"{list(experiment.widths)}; `only` restricts the models and widths of these tasks, change it or the lists: "
            f"{ {name: only.model_dump(exclude_none=True) for name, only in experiment.only.items()} }"
        )
    return list({run.id: run for run in runs}.values())


def _runs_of_task(experiment: Experiment, name: str, precision: str) -> list[Run]:
    """Return the runs of a task, or of all settings of a MAD task."""
    named = {
        "models": experiment.models,
        f"settings.{name}.recipes": experiment.recipes,
        "more_lrs.models": experiment.more_lrs.models,
    }
    for key, models in named.items():
        for model in models:
            if model not in experiment.definitions:
                raise ValueError(
                    f"{key}: {model!r} is not in `definitions`; {nearest_names(model, experiment.definitions)}"
                )
    runs = []
    for task, length, data in _settings_of(experiment, name):
        only = experiment.only.get(name, Only())
        for model in experiment.models:
            if only.models is None or model in only.models:
                runs += _runs_of_model(experiment.of_model(model), name, model, task, length, data, precision)
    return runs


def _runs_of_model(
    experiment: Experiment, name: str, model: str, task: str, length: int, data: dict[str, Any], precision: str
) -> list[Run]:
    """Return the runs of one model in one setting of a task. experiment: `Experiment.of_model`."""
    only, more = experiment.only.get(name, Only()), experiment.more_lrs
    widths = [w for w in experiment.widths if only.widths is None or w in only.widths]
    extra = more.lrs if name in more.tasks and model in more.models else ()
    values = {key.name: getattr(experiment, key.name) for key in fields(Run) if key.name in Experiment.model_fields}
    values |= {"task": task, "model": model, "length": length, "data": data, "precision": precision}
    values["batch_size"] = _batch_size(experiment, length)
    return [
        Run(**values, width=width, lr=lr, weight_decay=decay, seed=seed)
        for width, seed in product(widths, experiment.seeds)
        for lr, decay in product(sorted({*experiment.lrs, *extra}), experiment.weight_decays)
    ]


def sweeps(runs: Iterable[Run]) -> list[list[Run]]:
    """Group adjacent runs by sweep."""
    return [list(group) for _, group in groupby(runs, key=lambda run: run.sweep)]


def _settings_of(experiment: Experiment, name: str) -> list[tuple[str, int, dict[str, Any]]]:
    """Return (full name, length, generator arguments) for each setting of a task."""
    if experiment.suite == "mqar":
        length, _, pairs = name.partition("x")
        if not (length.isdecimal() and pairs.isdecimal()):
            raise ValueError(f"tasks: {name!r}: allowed is LENGTHxPAIRS, for example 256x16")
        return [(name, int(length), {**experiment.data, "pairs": int(pairs)})]
    if experiment.classifies:
        check_task(name)
        data = dict(experiment.data)
        if "length" not in data:
            raise ValueError(f"settings.{name}.data.length is missing: set it to the tokens per example")
        return [(name, whole_number(f"settings.{name}.data.length", data.pop("length")), data)]
    base, _, setting = name.partition("/")
    if base not in experiment.mad:
        raise ValueError(f"tasks: {name!r} is unknown; {nearest_names(name, experiment.mad)}")
    task = experiment.mad[base]
    named = {base: task.baseline}
    named |= {f"{base}/{key}={v}": {**task.baseline, key: v} for key, values in task.changes.items() for v in values}
    if setting == "baseline":
        named = {base: task.baseline}
    elif setting:
        if name not in named:
            raise ValueError(f"tasks: {name!r} is unknown; {nearest_names(name, [*named, f'{base}/baseline'])}")
        named = {name: named[name]}
    settings = []
    for full, values in named.items():
        data = {**experiment.data, **values}
        settings.append((full, whole_number(f"mad.{base}: length", data.pop("length", None)), data))
    return settings


def whole_number(key: str, value: Any) -> int:
    """Return a number of a section `data`. Raises ValueError if it is no whole number >= 1."""
    if not isinstance(value, int | float) or value < 1 or not float(value).is_integer():
        raise ValueError(f"{key} = {json.dumps(value)}: whole number >= 1 is allowed")
    return int(value)


def _batch_size(experiment: Experiment, length: int) -> int:
    if isinstance(experiment.batch_size, int):
        return experiment.batch_size
    if length not in experiment.batch_size:
        raise ValueError(
            f"batch_size = {experiment.batch_size} has no value for length {length}: add batch_size.{length}=N"
        )
    return experiment.batch_size[length]


def _digest(values: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:12]
