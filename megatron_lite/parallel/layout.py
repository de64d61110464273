"""Which layouts a model can run in, as arithmetic: nothing is built and no process is started."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
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
        """Processes of one data rank."""
        return self.tensor * self.pipeline * self.context

    def __str__(self) -> str:
        return f"tensor {self.tensor} x pipeline {self.pipeline} x context {self.context}"


@dataclass(frozen=True)
class Limits:
    """What a run's model and batch allow.

    Attributes:
        cut_sizes: configuration key -> a number that the tensor size must divide.
        num_layers: residual blocks; a pipeline stage holds at least one.
        sequence_length: context (and sequence) parallelism must divide it.
        context_parallel_error: why no sequence can be split over processes; empty where it can.
    """

    cut_sizes: Mapping[str, int]
    num_layers: int
    sequence_length: int
    context_parallel_error: str = ""


def limits_of(model: Any, sequence_length: int) -> Limits:
    """The limits of a model section, as far as it tells them (`cut_sizes()`, `num_layers`, `context_parallel_error()`)."""
    cut_sizes = getattr(model, "cut_sizes", dict)
    refused = getattr(model, "context_parallel_error", str)
    return Limits(cut_sizes(), getattr(model, "num_layers", 1), sequence_length, refused())


def layout_problems(layout: Layout, limits: Limits) -> Iterator[tuple[str, str]]:
    """(key of the section `parallel`, what is wrong with its value) for everything that rules the layout out."""
    for key, size in limits.cut_sizes.items():
        if size % layout.tensor:
            yield "tensor", f"= {layout.tensor} does not divide {key} = {size}"
    if layout.pipeline > limits.num_layers:
        yield (
            "pipeline",
            f"= {layout.pipeline}: at most one stage a block, model.num_layers = {limits.num_layers}, is allowed",
        )
    if layout.context > 1 and limits.context_parallel_error:
        yield "context", f"= {layout.context}: {limits.context_parallel_error}; 1 is allowed"
    if layout.sequence_parallel and layout.tensor == 1:
        yield "sequence_parallel", "= true needs parallel.tensor > 1: set it to false, or cut the layers"
    parts = layout.context * (layout.tensor if layout.sequence_parallel else 1)
    if limits.sequence_length % parts:
        key = "context" if layout.context > 1 else "sequence_parallel"
        yield (
            key,
            f"cuts every sequence into {parts} parts, which does not divide batch.sequence_length = "
            f"{limits.sequence_length}",
        )


def legal_layouts(processes: int, limits: Limits, *, sequence_parallel: bool = False) -> list[Layout]:
    """Every layout whose sizes divide the processes and that the limits allow."""
    divisors = [number for number in range(1, processes + 1) if processes % number == 0]
    found = []
    for tensor, pipeline, context in itertools.product(divisors, repeat=3):
        layout = Layout(tensor, pipeline, context, sequence_parallel and tensor > 1)
        if processes % layout.model_ranks == 0 and not any(layout_problems(layout, limits)):
            found.append(layout)
    return found


def nearest_layouts(wanted: Layout, processes: int, limits: Limits, count: int = 3) -> list[Layout]:
    """The legal layouts nearest to the wanted one: fewest and smallest changes of a size, as a factor, first."""

    def distance(layout: Layout) -> tuple[float, int]:
        pairs = (
            (layout.tensor, wanted.tensor),
            (layout.pipeline, wanted.pipeline),
            (layout.context, wanted.context),
        )
        return sum(abs(math.log2(a / b)) for a, b in pairs), -layout.model_ranks

    return sorted(legal_layouts(processes, limits, sequence_parallel=wanted.sequence_parallel), key=distance)[:count]


def stage_bounds(costs: Sequence[float], stages: int) -> list[int]:
    """First layer of every pipeline stage, and one past the last: as equal in cost as contiguous layers allow."""
    if stages == 1:
        return [0, len(costs)]
    from deepspeed.runtime.utils import partition_balanced

    return [int(bound) for bound in partition_balanced([max(1, round(cost)) for cost in costs], stages)]
