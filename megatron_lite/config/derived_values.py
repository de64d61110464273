"""Derive the values that follow from other keys.

The functions read the raw tree, before types are checked, and ignore values of wrong types.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..parallel.layout import Layout, Limits, nearest_layouts
from ..plural import counted
from .checks import Problem, is_count, overlap_conflict
from .files import KeyPath
from .image_schema import tokens_per_image
from .schema import CheckpointConfig, RunConfig

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
class Derived:
    """A value that follows from other keys, and the name of these keys."""

    value: Any
    reason: str


def derived_values(tree: Mapping[str, Any], world_size: int) -> tuple[dict[KeyPath, Derived], list[Problem]]:
    """Return the derived values of keys that `tree` does not set, and the problems for which no value exists.

    world_size: number of processes of the run.
    """
    derived = {**_folders(tree), **_steps(tree)}
    tokens = tokens_per_image(tree.get("model") or {})
    if tokens and _value(tree, "batch", "sequence_length") is None:
        derived["batch", "sequence_length"] = Derived(tokens, "model.image_size and model.patch_size")
    problems = []
    if _value(tree, "schedule", "warmup_steps") is not None and _value(tree, "schedule", "warmup_fraction") is not None:
        text = "and schedule.warmup_fraction both given: one of them is allowed; set the other to null"
        problems.append(Problem(("schedule", "warmup_steps"), text))
    sizes = {key: _value(tree, "parallel", key) for key in ("tensor", "pipeline", "context")}
    sizes = {key: size for key, size in sizes.items() if is_count(size)}
    batch = _batch(tree, sizes, world_size)
    if isinstance(batch, Problem):
        problems.append(batch)
    else:
        derived |= batch
        if _value(tree, "parallel", "tensor_overlap") is None and sizes.get("tensor", 1) > 1:
            derived["parallel", "tensor_overlap"] = _tensor_overlap(tree, sizes, batch)
    return derived, problems


def _value(tree: Mapping[str, Any], section: str, key: str) -> Any:
    return (tree.get(section) or {}).get(key)


def _folders(tree: Mapping[str, Any]) -> dict[KeyPath, Derived]:
    """Return the folders of the run and of its checkpoints, with the names in place of {name} and {run.directory}."""
    name = _value(tree, "run", "name") or RunConfig.model_fields["name"].default
    directory = _value(tree, "run", "directory") or RunConfig.model_fields["directory"].default
    checkpoints = _value(tree, "checkpoint", "directory") or CheckpointConfig.model_fields["directory"].default
    if not (isinstance(name, str) and isinstance(directory, str) and isinstance(checkpoints, str)):
        return {}
    directory = directory.replace("{name}", name)
    checkpoints = checkpoints.replace("{run.directory}", directory).replace("{name}", name)
    return {
        ("run", "directory"): Derived(directory, "run.name"),
        ("checkpoint", "directory"): Derived(checkpoints, "run.directory"),
    }


def _steps(tree: Mapping[str, Any]) -> dict[KeyPath, Derived]:
    """Return the steps of decay and warmup that follow from the number of training steps."""
    steps, fraction = _value(tree, "schedule", "train_steps"), _value(tree, "schedule", "warmup_fraction")
    derived: dict[KeyPath, Derived] = {}
    if not is_count(steps):
        return derived
    if _value(tree, "schedule", "decay_steps") is None:
        derived["schedule", "decay_steps"] = Derived(steps, "schedule.train_steps")
    has_fraction = isinstance(fraction, int | float) and 0 <= fraction <= 1
    if has_fraction and _value(tree, "schedule", "warmup_steps") is None:
        derived["schedule", "warmup_steps"] = Derived(round(fraction * steps), "schedule.warmup_fraction")
    return derived


def _tensor_overlap(tree: Mapping[str, Any], sizes: Mapping[str, int], batch: Mapping[KeyPath, Derived]) -> Derived:
    """Return whether half micro-batches overlap: with CUDA graphs, unless another key rules it out.

    sizes: ranks per kind of model parallelism. batch: the derived batch size.
    """
    micro = _value(tree, "batch", "micro_batch_size")
    if micro is None and ("batch", "micro_batch_size") in batch:
        micro = batch["batch", "micro_batch_size"].value
    packed = _value(tree, "data", "reset_at_documents")
    conflict = overlap_conflict({**(tree.get("parallel") or {}), **sizes}, micro, packed)
    if not _value(tree, "parallel", "cuda_graph"):
        conflict = "parallel.cuda_graph = false"
    return Derived(not conflict, conflict or "parallel.cuda_graph, parallel.tensor and an even micro-batch size")


def _batch(tree: Mapping[str, Any], sizes: Mapping[str, int], world_size: int) -> dict[KeyPath, Derived] | Problem:
    """Return the batch size that is not set, as `_solve_batch`. sizes: ranks per kind of model parallelism."""
    model_ranks = math.prod(sizes.values())
    if world_size % model_ranks:
        return _does_not_divide(sizes, world_size, tree.get("model") or {}, _value(tree, "batch", "sequence_length"))
    where = f"{world_size} from WORLD_SIZE" if model_ranks == 1 else f"WORLD_SIZE {world_size} / {model_ranks}"
    given = {key: _value(tree, "batch", key) for key in BATCH_KEYS}
    return _solve_batch(given, world_size // model_ranks, where=f"{EQUATION} ({where})")


def _does_not_divide(sizes: Mapping[str, int], world_size: int, model: Mapping[str, Any], length: Any) -> Problem:
    """Return the problem of a world size that the model ranks do not divide, with the nearest layouts.

    model, length: raw values of the configuration; their numbers limit the layouts.
    """
    product = math.prod(sizes.values())
    named = " x ".join(f"{key} {size}" for key, size in sizes.items() if size > 1)
    requested = Layout(sizes.get("tensor", 1), sizes.get("pipeline", 1), sizes.get("context", 1))
    sharded_sizes = {
        key: model[key] for key in ("num_heads", "intermediate_size", "vocab_size") if is_count(model.get(key))
    }
    layers: Any = model.get("num_layers")
    problem = "" if requested.context > 1 else "not requested"
    limits = Limits(sharded_sizes, layers if is_count(layers) else 1, length if is_count(length) else 1 << 30, problem)
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
    if not all(map(is_count, known.values())):
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
        # From `fixed` outwards: the divisors of a large batch size take minutes to enumerate. No divisor is above the quotient.
        quotient = total // ranks
        start = min(fixed, quotient)
        near = (number for distance in itertools.count() for number in (start - distance, start + distance))
        nearest = next(number for number in near if number > 0 and quotient % number == 0)
        choices.append(f"batch.{fixed_key}={nearest}")
    text = (
        f"= {total} is no multiple of {fixed_key} {fixed} x {ranks} data ranks = {unit}: {where}; "
        f"nearest: {' or '.join(choices)}"
    )
    return Problem(("batch", "global_batch_size"), text)
