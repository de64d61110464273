"""Compute the layouts in which a model can run, without building anything or starting a process."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Layout:
    """Sizes of the parallel dimensions; data ranks are the processes over their product.

    Attributes:
        tensor, pipeline, context: as in `ParallelConfig`.
        sequence_parallel: with tensor parallelism.
    """

    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    sequence_parallel: bool = False

    @property
    def model_ranks(self) -> int:
        """Return the processes of one data rank."""
        return self.tensor * self.pipeline * self.context

    def __str__(self) -> str:
        return f"tensor {self.tensor} x pipeline {self.pipeline} x context {self.context}"


@dataclass(frozen=True)
class Limits:
    """Limits that the model and the batch set for a layout.

    Attributes:
        sharded_sizes: configuration key -> a number that the tensor size must divide.
        num_layers: residual blocks; a pipeline stage holds at least one.
        sequence_length: a multiple of the context (and sequence-parallel) size.
        context_parallel_error: the reason why context parallelism is not supported; empty if it is.
        conv_kernels: configuration key -> tokens of a convolution; all but one may lie in the previous shard.
    """

    sharded_sizes: Mapping[str, int]
    num_layers: int
    sequence_length: int
    context_parallel_error: str = ""
    conv_kernels: Mapping[str, int] = field(default_factory=dict)


def limits_of(model: Any, sequence_length: int) -> Limits:
    """Return the limits of a model section.

    The section may define `num_layers` and the methods `sharded_sizes`, `context_parallel_error` and `conv_kernels`.
    """
    parts = {"sharded_sizes": dict, "context_parallel_error": str, "conv_kernels": dict}
    values = {name: getattr(model, name, empty)() for name, empty in parts.items()}
    return Limits(num_layers=getattr(model, "num_layers", 1), sequence_length=sequence_length, **values)


def layout_problems(layout: Layout, limits: Limits) -> Iterator[tuple[str, str]]:
    """Yield (key of the section `parallel`, what is wrong with its value) for every limit that the layout exceeds."""
    for key, size in limits.sharded_sizes.items():
        if size % layout.tensor:
            yield "tensor", f"= {layout.tensor} does not divide {key} = {size}"
    if layout.pipeline > limits.num_layers:
        yield (
            "pipeline",
            f"= {layout.pipeline}: a stage needs a block; at most model.num_layers = {limits.num_layers} are allowed",
        )
    if layout.context > 1 and limits.context_parallel_error:
        yield "context", f"= {layout.context}: {limits.context_parallel_error}; 1 is allowed"
    if layout.sequence_parallel and layout.tensor == 1:
        yield "sequence_parallel", "= true needs parallel.tensor > 1: set it to false, or raise parallel.tensor"
    parts = layout.context * (layout.tensor if layout.sequence_parallel else 1)
    if limits.sequence_length % parts:
        key = "context" if layout.context > 1 else "sequence_parallel"
        yield (
            key,
            f"splits every sequence into {parts} parts: batch.sequence_length = {limits.sequence_length} must be a multiple of "
            f"{parts}",
        )
    shard = limits.sequence_length // layout.context
    for key, size in limits.conv_kernels.items():
        if layout.context > 1 and shard < size - 1:
            yield (
                "context",
                f"= {layout.context} splits batch.sequence_length = {limits.sequence_length} into shards of {shard} tokens, "
                f"but {key} = {size} reads {size - 1} tokens of the previous shard",
            )


def legal_layouts(processes: int, limits: Limits, *, sequence_parallel: bool = False) -> list[Layout]:
    """Return every layout whose sizes divide the processes and that the limits allow."""
    divisors = [number for number in range(1, processes + 1) if processes % number == 0]
    layouts = (
        Layout(tensor, pipeline, context, sequence_parallel and tensor > 1)
        for tensor, pipeline, context in itertools.product(divisors, repeat=3)
    )
    return [one for one in layouts if processes % one.model_ranks == 0 and not any(layout_problems(one, limits))]


def nearest_layouts(wanted: Layout, processes: int, limits: Limits) -> list[Layout]:
    """Return the three legal layouts nearest to the wanted one. The distance is the sum of |log2| of the size ratios."""

    def distance(layout: Layout) -> tuple[float, int]:
        sizes = ("tensor", "pipeline", "context")
        return sum(abs(math.log2(getattr(layout, k) / getattr(wanted, k))) for k in sizes), -layout.model_ranks

    return sorted(legal_layouts(processes, limits, sequence_parallel=wanted.sequence_parallel), key=distance)[:3]


def stage_bounds(costs: Sequence[float], stages: int) -> list[int]:
    """Return the first layer of every pipeline stage, and one past the last. Contiguous stages get nearly equal costs."""
    if stages == 1:
        return [0, len(costs)]
    from deepspeed.runtime.utils import partition_balanced

    return [int(bound) for bound in partition_balanced([max(1, round(cost)) for cost in costs], stages)]
