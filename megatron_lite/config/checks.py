"""Check combinations of the keys of a finished `Config`."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from ..parallel.layout import Layout, layout_problems, limits_of, nearest_layouts
from .data_checks import data_problems
from .files import KeyPath
from .fp8_schema import fp8_problems
from .optimizer_schema import muon_conflict
from .schema import Config
from .section import without_effect


@dataclass(frozen=True)
class Problem:
    """A key and what is wrong with it, as text to print after the key."""

    path: KeyPath
    text: str


def problems_of(config: Config[Any]) -> Iterator[Problem]:
    """Yield the combinations of valid values that cannot run."""
    yield from _schedule_problems(config)
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


def _schedule_problems(config: Config[Any]) -> Iterator[Problem]:
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
    conflict = overlap_conflict(parallel.model_dump(), config.batch.micro_batch_size, packed)
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


def is_count(value: Any) -> bool:
    """Return whether a raw value is a whole number from 1 on."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def overlap_conflict(parallel: Mapping[str, Any], micro_batch_size: Any, reset_at_documents: Any) -> str:
    """Return the key and value that rule out tensor-parallel overlap; empty if it is supported.

    parallel: the section, in which only `tensor` must be set.
    """
    conflicts = {
        "parallel.tensor = 1": parallel["tensor"] == 1,
        f"parallel.context = {parallel.get('context')}": parallel.get("context") not in (None, 1),
        "parallel.zero_stage = 3": parallel.get("zero_stage") == 3,
        "parallel.sequence_parallel = true": parallel.get("sequence_parallel") is True,
        "parallel.compile = true": parallel.get("compile") is True,
        f"batch.micro_batch_size = {micro_batch_size}, which is odd": is_count(micro_batch_size)
        and micro_batch_size % 2,
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
