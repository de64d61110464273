"""Derive the values that follow from other keys, and check combinations of keys.

`derived_values` works on the raw tree, before types are checked, and ignores values of wrong types. `problems_of` checks a
finished `Config`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from ..parallel.layout import Layout, Limits, layout_problems, limits_of, nearest_layouts
from ..plural import counted
from .data_checks import data_problems
from .files import KeyPath
from .fp8_schema import fp8_problems
from .image_schema import tokens_per_image
from .optimizer_schema import muon_conflict
from .schema import CheckpointConfig, Config, RunConfig
from .section import without_effect

DERIVED_KEYS: tuple[tuple[str, str], ...] = (
    ("run", "directory"),
    ("checkpoint", "directory"),
    ("batch", "gradient_accumulation_steps"),
    ("batch", "global_batch_size"),
    ("batch", "micro_batch_size"),
    ("parallel", "tensor_overlap"),
    ("schedule", "warmup_steps"),
    ("schedule", "decay_steps"),
)
BATCH_KEYS = ("micro_batch_size", "global_batch_size", "gradient_accumulation_steps")
EQUATION = "global_batch_size = micro_batch_size x gradient_accumulation_steps x data ranks"


@dataclass(frozen=True)
class Problem:
    """A key and what is wrong with it, as text to print after the key."""

    path: KeyPath
    text: str


@dataclass(frozen=True)
class Derived:
    """A value that follows from other keys, and the name of these keys."""

    value: Any
    reason: str


def derived_values(tree: Mapping[str, Any], world_size: int) -> tuple[dict[KeyPath, Derived], list[Problem]]:
    """Return the derived values of keys that `tree` does not set, and the problems for which no value exists.

    world_size: number of processes of the run.
    """
    derived: dict[KeyPath, Derived] = {}

    def given(section: str, key: str) -> Any:
        return (tree.get(section) or {}).get(key)

    name = given("run", "name") or RunConfig.model_fields["name"].default
    directory = given("run", "directory") or RunConfig.model_fields["directory"].default
    checkpoints = given("checkpoint", "directory") or CheckpointConfig.model_fields["directory"].default
    if isinstance(name, str) and isinstance(directory, str) and isinstance(checkpoints, str):
        directory = directory.replace("{name}", name)
        checkpoints = checkpoints.replace("{run.directory}", directory).replace("{name}", name)
        derived["run", "directory"] = Derived(directory, "run.name")
        derived["checkpoint", "directory"] = Derived(checkpoints, "run.directory")

    tokens = tokens_per_image(tree.get("model") or {})
    if tokens and given("batch", "sequence_length") is None:
        derived["batch", "sequence_length"] = Derived(tokens, "model.image_size and model.patch_size")
    steps = given("schedule", "train_steps")
    if _count(steps):
        if given("schedule", "decay_steps") is None:
            derived["schedule", "decay_steps"] = Derived(steps, "schedule.train_steps")
        fraction = given("schedule", "warmup_fraction")
        if given("schedule", "warmup_steps") is None and isinstance(fraction, int | float) and 0 <= fraction <= 1:
            derived["schedule", "warmup_steps"] = Derived(round(fraction * steps), "schedule.warmup_fraction")

    problems = []
    if given("schedule", "warmup_steps") is not None and given("schedule", "warmup_fraction") is not None:
        text = "and schedule.warmup_fraction both given: one of them is allowed; set the other to null"
        problems.append(Problem(("schedule", "warmup_steps"), text))
    sizes = {key: given("parallel", key) for key in ("tensor", "pipeline", "context")}
    sizes = {key: size for key, size in sizes.items() if _count(size)}
    model_ranks = math.prod(sizes.values())
    batch: dict[KeyPath, Derived] | Problem
    if world_size % model_ranks:
        batch = _does_not_divide(sizes, world_size, tree.get("model") or {}, given("batch", "sequence_length"))
    else:
        where = f"{world_size} from WORLD_SIZE" if model_ranks == 1 else f"WORLD_SIZE {world_size} / {model_ranks}"
        batch = _solve_batch(
            {key: given("batch", key) for key in BATCH_KEYS}, world_size // model_ranks, where=f"{EQUATION} ({where})"
        )
    if isinstance(batch, Problem):
        problems.append(batch)
    else:
        derived.update(batch)
        if given("parallel", "tensor_overlap") is None and sizes.get("tensor", 1) > 1:
            micro = given("batch", "micro_batch_size")
            if micro is None and ("batch", "micro_batch_size") in derived:
                micro = derived["batch", "micro_batch_size"].value
            packed = given("data", "reset_at_documents")
            conflict = _overlap_conflict({**(tree.get("parallel") or {}), **sizes}, micro, packed)
            if not given("parallel", "cuda_graph"):
                conflict = "parallel.cuda_graph = false"
            reason = conflict or "parallel.cuda_graph, parallel.tensor and an even micro-batch size"
            derived["parallel", "tensor_overlap"] = Derived(not conflict, reason)
    return derived, problems


def problems_of(config: Config[Any]) -> Iterator[Problem]:
    """Yield the combinations of valid values that cannot run."""
    schedule, checkpoint = config.schedule, config.checkpoint
    limit, budget = f"at most schedule.train_steps = {schedule.train_steps} is allowed", schedule.time_budget_minutes
    if budget is not None:
        limit += f", which schedule.time_budget_minutes = {budget:g} lowers to the speed of the machine"
    if schedule.warmup_steps > schedule.train_steps:
        adapts = "" if budget is None else "; schedule.warmup_fraction adapts to it"
        yield Problem(("schedule", "warmup_steps"), f"= {schedule.warmup_steps}: {limit}{adapts}")
    elif schedule.warmup_steps > schedule.decay_steps:
        text = f"= {schedule.decay_steps}: at least schedule.warmup_steps = {schedule.warmup_steps} is allowed"
        yield Problem(("schedule", "decay_steps"), text)
    elif schedule.kind == "wsd" and (
        # Rounded as in `lr_schedule.learning_rate`: 10 warmup steps of 100 allow a fraction of 0.9.
        round(schedule.wsd_decay_fraction * schedule.decay_steps) > schedule.decay_steps - schedule.warmup_steps
    ):
        maximum = math.floor((1 - schedule.warmup_steps / schedule.decay_steps) * 1000 + 1e-6) / 1000
        text = (
            f"= {schedule.wsd_decay_fraction} of {schedule.decay_steps} steps begins before the warmup of "
            f"{schedule.warmup_steps} ends: at most {maximum:g} is allowed"
        )
        yield Problem(("schedule", "wsd_decay_fraction"), text)
    if schedule.kind != "wsd":
        unused = without_effect(schedule, ("schedule",), "schedule.kind = wsd", name="wsd_decay_fraction")
        yield from itertools.starmap(Problem, unused)
    if late := [step for step in checkpoint.extra_steps if step > schedule.train_steps]:
        yield Problem(("checkpoint", "extra_steps"), f"holds {', '.join(map(str, late))}: {limit}")
    yield from _layout_problems(config)
    if config.precision.dtype == "fp16" and config.run.device == "cpu":
        text = "= fp16 does not train on the cpu (run.device = cpu): auto, bf16 and fp32 are allowed"
        yield Problem(("precision", "dtype"), text)
    conflict = muon_conflict(config.precision.dtype, config.parallel.zero_stage)
    if config.optimizer.name == "muon" and conflict:
        yield Problem(("optimizer", "name"), f"= muon {conflict}")
    if config.optimizer.name == "adamw":
        unused = without_effect(config.optimizer.muon, ("optimizer", "muon"), "optimizer.name = muon")
        yield from itertools.starmap(Problem, unused)
    if config.precision.dtype != "fp16":
        unused = without_effect(config.precision.fp16, ("precision", "fp16"), "precision.dtype = fp16")
        yield from itertools.starmap(Problem, unused)
    if config.precision.optimizer_state == "bf16" and config.precision.dtype != "bf16":
        text = f"= bf16 with precision.dtype = {config.precision.dtype}: fp32 is allowed, or set precision.dtype=bf16"
        yield Problem(("precision", "optimizer_state"), text)
    length, positions = config.batch.sequence_length, getattr(config.model, "max_positions", None)
    if positions is not None and length > positions:
        text = f"= {length}: at most model.max_positions = {positions} is allowed"
        yield Problem(("batch", "sequence_length"), text)
    if 0 < config.run.spike_factor <= 1:
        text = f"= {config.run.spike_factor} would skip ordinary steps: 0 (off) or a number above 1 is allowed"
        yield Problem(("run", "spike_factor"), text)
    run, ranks = config.run, config.batch.data_ranks * config.parallel.model_ranks
    limit, key = min((getattr(run, key), key) for key in ("timeout_minutes", "save_timeout_minutes"))
    if ranks > 1 and run.watchdog_minutes >= limit:
        text = (
            f"= {run.watchdog_minutes:g} of {ranks} processes: run.{key} = {limit:g} ends the run before any stack is printed: "
            f"less than {limit:g}, or 0 (off), is allowed, or raise run.{key}"
        )
        yield Problem(("run", "watchdog_minutes"), text)
    yield from itertools.starmap(Problem, itertools.chain(data_problems(config), fp8_problems(config)))


def _layout_problems(config: Config[Any]) -> Iterator[Problem]:
    parallel, length = config.parallel, config.batch.sequence_length
    recomputed = parallel.activation_checkpointing
    if recomputed.others != "none" and recomputed.every == 1:
        text = (
            f"= {recomputed.others} with every = 1, so there are no other blocks: set every, or mode={recomputed.others}"
            " for all"
        )
        yield Problem(("parallel", "activation_checkpointing", "others"), text)
    if parallel.pipeline > 1 and parallel.zero_stage > 1:
        yield Problem(
            ("parallel", "zero_stage"),
            f"= {parallel.zero_stage} is not supported with parallel.pipeline = {parallel.pipeline}, whose stages keep "
            "gradients over many micro-batches: 0 and 1 are allowed, or parallel.pipeline = 1",
        )
    packed = config.data.reset_at_documents
    conflict = _overlap_conflict(parallel.model_dump(), config.batch.micro_batch_size, packed)
    if parallel.tensor_overlap and conflict:
        yield Problem(
            ("parallel", "tensor_overlap"), f"= true is not supported with {conflict}: set it to false, or to null"
        )
    conflict = _cuda_graph_conflict(config)
    if parallel.cuda_graph and conflict:
        yield Problem(("parallel", "cuda_graph"), f"= true is not supported with {conflict}: set it to false")
    requested = Layout(parallel.tensor, parallel.pipeline, parallel.context, parallel.sequence_parallel)
    limits = limits_of(config.model, length)
    unsupported = list(layout_problems(requested, limits))
    for index, (key, text) in enumerate(unsupported):
        if index == len(unsupported) - 1:
            # Image classifiers have no pipeline stages (`image_problems`).
            stages = 1 if config.data.objective == "classification" else limits.num_layers
            ranks = config.batch.data_ranks * parallel.model_ranks
            near = nearest_layouts(requested, ranks, replace(limits, num_layers=stages))
            text += f"; nearest legal layouts: {' or '.join(map(str, near))}"
        yield Problem(("parallel", key), text)


def _overlap_conflict(parallel: Mapping[str, Any], micro_batch_size: Any, reset_at_documents: Any) -> str:
    """Return the key and value that rule out tensor-parallel overlap; empty if it is supported.

    parallel: the section, in which only `tensor` must be set.
    """
    conflicts = {
        "parallel.tensor = 1": parallel["tensor"] == 1,
        f"parallel.context = {parallel.get('context')}": parallel.get("context") not in (None, 1),
        "parallel.zero_stage = 3": parallel.get("zero_stage") == 3,
        "parallel.sequence_parallel = true": parallel.get("sequence_parallel") is True,
        "parallel.compile = true": parallel.get("compile") is True,
        f"batch.micro_batch_size = {micro_batch_size}, which is odd": _count(micro_batch_size) and micro_batch_size % 2,
        "data.reset_at_documents = true, which makes one row of a micro-batch": reset_at_documents is True,
    }
    return next((text for text, bad in conflicts.items() if bad), "")


def _cuda_graph_conflict(config: Config[Any]) -> str:
    """Return the key and value that rule out CUDA graphs; empty if they are supported."""
    parallel = config.parallel
    conflicts = {
        f"parallel.pipeline = {parallel.pipeline}, which has several micro-batches in flight": parallel.pipeline > 1,
        f"parallel.context = {parallel.context}": parallel.context > 1,
        "parallel.zero_stage = 3, which moves the weights": parallel.zero_stage == 3,
        "parallel.compile = true": parallel.compile,
        "run.device = cpu": config.run.device == "cpu",
    }
    return next((text for text, bad in conflicts.items() if bad), "")


def _does_not_divide(sizes: Mapping[str, int], world_size: int, model: Mapping[str, Any], length: Any) -> Problem:
    """Return the problem of a world size that the model ranks do not divide, with the nearest layouts.

    model, length: raw values of the configuration; their numbers limit the layouts.
    """
    product = math.prod(sizes.values())
    named = " x ".join(f"{key} {size}" for key, size in sizes.items() if size > 1)
    requested = Layout(sizes.get("tensor", 1), sizes.get("pipeline", 1), sizes.get("context", 1))
    sharded_sizes = {
        key: model[key] for key in ("num_heads", "intermediate_size", "vocab_size") if _count(model.get(key))
    }
    layers: Any = model.get("num_layers")
    problem = "" if requested.context > 1 else "not requested"
    limits = Limits(sharded_sizes, layers if _count(layers) else 1, length if _count(length) else 1 << 30, problem)
    near = nearest_layouts(requested, world_size, limits)
    return Problem(
        ("parallel",),
        f": {named} = {product} processes hold one copy of the model: the run must have a multiple of {product}, and "
        f"WORLD_SIZE is {world_size}; start it with torchrun --nproc-per-node {product} (WORLD_SIZE={product} shows "
        f"the configuration without a start), or take {' or '.join(map(str, near))}",
    )


def _solve_batch(given: Mapping[str, Any], ranks: int, *, where: str) -> dict[KeyPath, Derived] | Problem:
    """Return the missing one of the three batch sizes. Return {} if one has a wrong type, which is reported elsewhere."""
    known = {key: value for key, value in given.items() if value is not None}
    if not all(map(_count, known.values())):
        return {}
    if len(known) < 2:
        return Problem(("batch",), f"needs two of {', '.join(BATCH_KEYS)}: {where}")
    micro, total, accumulation = (given[key] for key in BATCH_KEYS)
    reason = f"{EQUATION}, {counted(ranks, 'data rank')}"
    if total is None:
        return {("batch", "global_batch_size"): Derived(micro * accumulation * ranks, reason)}
    if micro is not None and accumulation is not None:
        product = micro * accumulation * ranks
        if product == total:
            return {}
        text = (
            f"= {total} is not {micro} x {accumulation} x {ranks} = {product}: {where}; "
            f"set batch.global_batch_size={product}, or set one of the three to null and it is derived"
        )
        return Problem(("batch", "global_batch_size"), text)
    open_key, fixed_key, fixed = (
        ("gradient_accumulation_steps", "micro_batch_size", micro)
        if accumulation is None
        else ("micro_batch_size", "gradient_accumulation_steps", accumulation)
    )
    if total % (fixed * ranks) == 0:
        return {("batch", open_key): Derived(total // (fixed * ranks), reason)}
    unit = fixed * ranks
    below = total // unit * unit
    choices = [f"batch.global_batch_size={choice}" for choice in (below, below + unit) if choice]
    if total % ranks == 0:
        # From `fixed` outwards: the divisors of a large batch size take minutes to enumerate.
        near = (number for distance in itertools.count() for number in (fixed - distance, fixed + distance))
        nearest = next(number for number in near if number > 0 and total // ranks % number == 0)
        choices.append(f"batch.{fixed_key}={nearest}")
    text = (
        f"= {total} is no multiple of {fixed_key} {fixed} x {ranks} data ranks = {unit}: {where}; "
        f"nearest: {' or '.join(choices)}"
    )
    return Problem(("batch", "global_batch_size"), text)


def _count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1
