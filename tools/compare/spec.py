"""Read a comparison's YAML file and make the configuration of each run: every model in every size with every seed."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import BaseModel, ConfigDict, Field

from megatron_lite.config.files import CONFIGS, KeyPath, Sources, parse_yaml, read_sources
from megatron_lite.config.loader import ConfigError, load_config
from megatron_lite.config.schema import Config
from megatron_lite.fault_tolerance.rank_consistency import configuration_facts
from models.config import ModelConfig
from models.language_model import count_parameters
from tools.cli.yaml_file import read_as
from tools.compare.match_parameters import embedding_parameters, equal_width
from tools.compare.rungs import Ladder, Seed, steps_of_rung
from tools.loading.vocab_size import vocabulary_override

Tree = dict[str, Any]
_WIDTH, _STEPS = ("model", "intermediate_size"), ("schedule", "train_steps")
NAME = r"^[A-Za-z0-9][A-Za-z0-9._+-]*$"  # of a folder under runs/


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class ComparedModel(_Section):
    """Hold a model's label in tables, its configuration files and its own configuration keys."""

    label: str | None = None
    files: tuple[str, ...] = ()
    config: Tree = {}


class EqualParameters(_Section):
    """Choose each model's MLP width so that its parameters without embeddings match those of the reference."""

    reference: str
    tolerance: float = Field(default=0.01, gt=0, lt=1)
    multiple: int = Field(default=16, ge=1)


class Comparison(_Section):
    """Hold a comparison's file.

    Later settings override earlier ones in the order `files`, `data`, the model's `files`, `config`, the size, the model's
    `config`, the command line.

    Attributes:
        tune_kernels: autotune flash-linear-attention's kernels. It takes a minute per shape, and longer in several processes at
            once. Without it each kernel has one configuration.
        ladder: train every size for several numbers of tokens per parameter, and predict the loss of the largest size.
    """

    name: str = Field(pattern=NAME)
    title: str
    files: tuple[str, ...] = ()
    data: str | None = None
    config: Tree = {}
    sizes: dict[Annotated[str, Field(pattern=f"^$|{NAME}")], Tree] = {"": {}}
    seeds: tuple[Seed, ...] = Field(min_length=1)
    models: dict[Annotated[str, Field(pattern=NAME)], ComparedModel] = Field(min_length=1)
    equal_parameters: EqualParameters | None = None
    ladder: Ladder | None = None
    workers: int = Field(default=1, ge=1)
    tune_kernels: bool = False
    devices: tuple[int | str, ...] | None = None
    time_budget_minutes: float | None = Field(default=None, gt=0)

    @property
    def folder(self) -> Path:
        """Return the folder of the runs, tables and figures."""
        return Path("runs") / self.name

    @property
    def reference(self) -> str | None:
        """Return the model that the others are compared with; None for the first one."""
        return None if self.equal_parameters is None else self.equal_parameters.reference

    def rungs(self) -> dict[str, str]:
        """Return name of a rung -> its size in `sizes`. Without a ladder every size is one rung."""
        if self.ladder is None:
            return {size: size for size in self.sizes}
        return {rung: size for rung, (size, _) in self.ladder.rungs().items()}

    def seeds_of(self, size: str) -> tuple[int, ...]:
        """Return the seeds of a size."""
        return self.seeds if self.ladder is None else self.ladder.seeds.get(size, self.seeds)


@dataclass(frozen=True)
class Run:
    """Hold one training run of a comparison.

    Attributes:
        text: content of its configuration file, which `python train.py` reads.
        parameters: of the whole model.
        body: parameters without embedding and output projection.
    """

    model: str
    label: str
    size: str
    seed: int
    folder: Path
    text: str
    config: Config[ModelConfig]
    parameters: int
    body: int

    @property
    def name(self) -> str:
        return self.folder.name

    @property
    def file(self) -> Path:
        """Return the path of the configuration file."""
        return self.folder / "run.yml"

    @property
    def causal(self) -> bool:
        """Return whether the run trains a causal language model."""
        return self.config.data.objective == "causal"

    @property
    def complete(self) -> bool:
        """Return whether the run was trained and validated to its end."""
        return (self.folder / "summary.json").is_file()

    @property
    def measurable(self) -> bool:
        """Return whether the run is complete, causal and has a checkpoint. Folders may be copied without checkpoints."""
        return self.complete and self.causal and (self.folder / "checkpoints" / "latest").is_file()


def read_comparison(path: Path) -> Comparison:
    """Read a comparison's file. Raises ValueError naming the key or the missing file, or OSError."""
    if not path.is_file():
        problem = "is a folder" if path.is_dir() else "does not exist"
        raise ValueError(
            f"{path} {problem}: give a comparison's YAML file, such as configs/experiments/compare_lm.yml "
            "(docs/guide/comparing.md describes its keys)"
        )
    comparison = read_as(Comparison, path)
    if comparison.reference is not None and comparison.reference not in comparison.models:
        raise ValueError(
            f"{path}: equal_parameters.reference = {comparison.reference} is not a model of this file; "
            f"allowed are {', '.join(comparison.models)}"
        )
    if (ladder := comparison.ladder) is not None:
        if comparison.equal_parameters is not None:
            raise ValueError(f"{path}: equal_parameters and ladder both set the MLP widths; remove equal_parameters")
        if unknown := sorted(ladder.parameters.keys() - comparison.sizes.keys()):
            raise ValueError(
                f"{path}: ladder.parameters has the size {unknown[0]}, which `sizes` lacks; allowed are "
                f"{', '.join(comparison.sizes)}"
            )
        tuned = () if ladder.tuning is None else ladder.tuning.models
        if unknown := sorted(set(tuned) - comparison.models.keys()):
            raise ValueError(
                f"{path}: ladder.tuning.models has {unknown[0]}; allowed are {', '.join(comparison.models)}"
            )
    return comparison


def plan_runs(
    comparison: Comparison,
    *,
    overrides: Sequence[str] = (),
    models: Sequence[str] = (),
    sizes: Sequence[str] = (),
    seeds: Sequence[int] = (),
) -> list[Run]:
    """Return the runs of a comparison seed by seed, restricted to the given models, sizes and seeds.

    Raises:
        ValueError: an unknown model or size, two runs with one folder, or no width with equal parameters.
        ConfigError: an invalid configuration.
    """
    models = _selected("models", models, list(comparison.models))
    rungs = comparison.rungs()
    # --sizes takes a rung, or a size with all its rungs.
    names = _selected("sizes", sizes, list(dict.fromkeys([*rungs.values(), *rungs])))
    sizes = [rung for rung, size in rungs.items() if {rung, size} & set(names)]
    cells = {(size, model): _cell(comparison, size, model, overrides) for size in sizes for model in models}
    equal = comparison.equal_parameters
    if equal is not None:
        for size in sizes:
            reference = cells.get((size, equal.reference)) or _cell(comparison, size, equal.reference, overrides)
            for model in models:
                if model != equal.reference:
                    cells[size, model] = _with_equal_parameters(
                        f"{model} in size {size}" if size else model, cells[size, model], reference, equal
                    )
    if comparison.ladder is not None:
        _set_rungs(cells, comparison.ladder)
    parameters = {key: count_parameters(config.model) for key, (_, config) in cells.items()}
    runs: dict[Path, Run] = {}
    all_seeds = dict.fromkeys(seeds or [seed for size in sizes for seed in comparison.seeds_of(rungs[size])])
    for seed, size, model in itertools.product(all_seeds, sizes, models):
        if seed not in (seeds or comparison.seeds_of(rungs[size])):
            continue
        run = _run(comparison, size, model, seed, *cells[size, model], parameters[size, model])
        if (other := runs.setdefault(run.folder, run)) is not run:
            raise ValueError(
                f"models.{model} in size {size or '(none)'} and models.{other.model} in size {other.size or '(none)'} "
                f"would both use the folder {run.folder}: rename one of them"
            )
    return list(runs.values())


def differing_keys(run: Run) -> list[str]:
    """Return the keys whose values differ between the run's file, with its includes, and the plan.

    Each entry reads "key: VALUE in the file, VALUE now".
    """
    saved, planned = map(configuration_facts, (read_sources([run.file]).tree, parse_yaml(run.text, "").tree))
    return [
        f"{key}: {saved.get(key, 'not given')} in the file, {planned.get(key, 'not given')} now"
        for key in {**saved, **planned}
        if saved.get(key) != planned.get(key)
    ]


_Cell = tuple[Tree, Config[ModelConfig]]


def _cell(comparison: Comparison, size: str, name: str, overrides: Sequence[str]) -> _Cell:
    """Return all keys of a model in one size and the configuration that they make.

    They include the keys of included files, so that `differing_keys` notices an edited file.
    """
    model = comparison.models[name]
    data = () if comparison.data is None else (comparison.data,)
    files = [_resolved(file) for file in (*comparison.files, *data, *model.files)]
    merged, command_line = Sources(), read_sources((), overrides)
    for tree in (comparison.config, comparison.sizes[comparison.rungs()[size]], model.config, command_line.tree):
        for key, value in tree.items():
            merged.set((key,), value, "")
    merged.problems.extend(command_line.problems)
    if merged.problems:
        raise ConfigError(merged.problems)
    if comparison.ladder is not None:
        if merged.get(_STEPS) is not None:
            raise ValueError("schedule.train_steps: the ladder sets it; change ladder.tokens_per_parameter instead")
        # Until the batch is known. Other steps of the file may not be larger.
        merged.set(_STEPS, 10**9, "")
    for word in vocabulary_override(files, _words(merged.tree)):
        merged.set(("model", "vocab_size"), int(word.partition("=")[2]), "")
    words = _words(merged.tree)
    return read_sources(files, words).tree, _loaded(files, words, size, name)


def _loaded(files: Sequence[str], words: Sequence[str], size: str, model: str) -> Config[ModelConfig]:
    """Return the configuration of a model in one size. Raises ConfigError, whose problems name both."""
    try:
        return load_config(files, words, model_type=ModelConfig, world_size=1)
    except ConfigError as error:
        place = f"(model {model}, size {size})" if size else f"(model {model})"
        problems = list(error.problems)
        # Each word is a whole section, which the comparison's file sets in parts.
        for word in words:
            problems = [problem.replace(f"(override {word})", place) for problem in problems]
        # A missing key has no origin.
        raise ConfigError(
            [problem if problem.endswith(")") else f"{problem} {place}" for problem in problems]
        ) from error


def _with_equal_parameters(name: str, cell: _Cell, reference: _Cell, equal: EqualParameters) -> _Cell:
    tree, config = cell
    target = count_parameters(reference[1].model) - embedding_parameters(reference[1].model)
    try:
        width = equal_width(config.model, target, multiple=equal.multiple, tolerance=equal.tolerance)
    except ValueError as error:
        raise ValueError(f"equal_parameters, {name} with the reference {equal.reference}: {error}") from error
    model = replace(config.model, intermediate_size=width)
    return _with_values(tree, {_WIDTH: width}), config.model_copy(update={"model": model})


def _set_rungs(cells: dict[tuple[str, str], _Cell], ladder: Ladder) -> None:
    """Set MLP width and steps of every cell; the rungs of one size share the width."""
    rungs = ladder.rungs()
    widths: dict[tuple[str, str], int] = {}
    for (rung, model), (tree, config) in cells.items():
        size = rungs[rung][0]
        if (size, model) not in widths:
            target = round(ladder.parameters[size])
            try:
                width = equal_width(config.model, target, multiple=ladder.multiple, tolerance=ladder.tolerance)
            except ValueError as error:
                raise ValueError(f"ladder.parameters.{size}, {model}: {error}") from error
            widths[size, model] = width
        changed = _with_values(tree, {_WIDTH: widths[size, model], _STEPS: steps_of_rung(ladder, rung, config)})
        # Read again, since other keys derive from the steps or have them as a limit.
        cells[rung, model] = changed, _loaded((), _words(changed), rung, model)


def _with_values(tree: Tree, values: Mapping[KeyPath, int]) -> Tree:
    """Return a copy of a tree with other values."""
    merged = Sources(tree=json.loads(json.dumps(tree)))
    for key, value in values.items():
        merged.set(key, value, "")
    return merged.tree


def _run(
    comparison: Comparison, size: str, model: str, seed: int, tree: Tree, config: Config[ModelConfig], parameters: int
) -> Run:
    name = "-".join(filter(None, (model, size, f"seed{seed}")))
    folder = comparison.folder / name
    content = {**tree, "run": {**tree.get("run", {}), "name": name, "directory": str(folder), "seed": seed}}
    text = yaml.safe_dump(content, sort_keys=False, allow_unicode=True)
    label = comparison.models[model].label or model
    body = parameters - embedding_parameters(config.model)
    return Run(model, label, size, seed, folder, text, config, parameters, body)


def _words(tree: Tree) -> list[str]:
    return [f"{key}={json.dumps(value)}" for key, value in tree.items()]


def _resolved(file: str) -> str:
    """Return a name relative to configs/ unchanged, and a file of the working folder as an absolute path."""
    return file if (CONFIGS / file).is_file() or not Path(file).is_file() else str(Path(file).resolve())


def _selected(option: str, requested: Sequence[str], known: list[str]) -> list[str]:
    for name in requested:
        if name not in known:
            allowed = (
                f"allowed are {', '.join(names)}" if (names := list(filter(None, known))) else "leave the option out"
            )
            raise ValueError(f"--{option} {name} is not in the comparison; {allowed}")
    return [name for name in known if name in requested] if requested else known
