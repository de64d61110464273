"""What wraps the layers of a stage: recomputation per block, overlap and context parallelism together."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megatron_lite.config.schema import ParallelConfig
from megatron_lite.engine.parallelize import parallelize
from megatron_lite.engine.sequential import chain


class TwoParts(nn.Module):
    """A block that counts its forward passes."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.passes = nn.Linear(4, 4), 0

    def forward(self, x: Tensor) -> Tensor:
        return self.finish(*self.mix(x))

    def mix(self, x: Tensor) -> tuple[Tensor, Tensor]:
        self.passes += 1
        return x, self.linear(x)

    def finish(self, x: Tensor, mixed: Tensor) -> Tensor:
        return x + mixed.relu()


def passes(grid: Any, count: int = 5, *, recompute: Any = nullcontext, context_parallel: Any = None, **settings: Any):
    """Return the indices of the calls, and the forward passes per layer in a step of one micro-batch with two rows."""
    layers = {index: TwoParts() for index in range(count)}
    calls = parallelize(
        layers,
        count,
        ParallelConfig(**settings),
        grid,
        context_parallel=context_parallel,
        recompute=recompute,
        keep_gradients=False,
    )
    chain(list(calls.values()))(torch.ones(2, 4, requires_grad=True)).sum().backward()
    return list(calls), [layer.passes for layer in layers.values()]


@pytest.mark.parametrize("mode", ["full", "selective"])
def test_every_block_has_its_mode_with_and_without_overlap(grid, mode):
    settings = {"activation_checkpointing": {"mode": mode, "every": 2}}
    assert passes(grid, **settings) == ([0, 1, 2, 3, 4], [1, 2, 1, 2, 1])
    # All blocks are one call, in two chunks.
    assert passes(grid, **settings, tensor_overlap=True) == ([0, 1, 4], [1, 4, 2, 4, 1])


@pytest.mark.parametrize(("overlap", "entered"), [(False, 3), (True, 12)])
def test_only_blocks_run_in_the_context_of_elementwise_recomputation(grid, overlap, entered):
    contexts = []

    @contextmanager
    def recompute() -> Iterator[None]:
        contexts.append(1)
        yield

    passes(grid, recompute=recompute, activation_checkpointing={"mode": "elementwise"}, tensor_overlap=overlap)
    assert len(contexts) == entered


@pytest.mark.parametrize(("mode", "entered"), [("none", 5), ("full", 8)])
def test_every_pass_of_a_layer_runs_on_the_local_shard(grid, mode, entered):
    """Enter the context again when the backward pass recomputes a block."""
    groups = []

    @contextmanager
    def context_parallel(group: Any) -> Iterator[None]:
        groups.append((group.group, group.index, group.count))
        yield

    context_group: Any = "group"
    shared = replace(grid, context_group=context_group, context_rank=1, context_size=2)
    passes(shared, context_parallel=context_parallel, activation_checkpointing={"mode": mode})
    assert groups == [("group", 1, 2)] * entered
