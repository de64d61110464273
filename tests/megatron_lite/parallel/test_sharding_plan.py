"""Sharding specs and the shards that follow from them."""

from __future__ import annotations

from typing import ClassVar

import pytest
import torch
from torch import nn

from megatron_lite.parallel.sharding_plan import Shard, ShardingSpec, shard_of, sharding_specs


class Inner(nn.Module):
    tensor_parallel_plan: ClassVar[dict[str, str]] = {"weight": "column"}

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.scale = nn.Parameter(torch.zeros(4, 2)), nn.Parameter(torch.zeros(4))


class Outer(nn.Module):
    tensor_parallel_plan: ClassVar[dict[str, str]] = {"inner": "replicated"}

    def __init__(self) -> None:
        super().__init__()
        self.inner = Inner()


def test_the_innermost_plan_decides():
    assert sharding_specs(Outer()) == {"inner.weight": "column", "inner.scale": "replicated"}


def test_checkpoints_of_earlier_versions_name_their_specs():
    assert ShardingSpec("shard") is ShardingSpec.HEADS
    assert ShardingSpec("replicated, gradient summed") is ShardingSpec.PARTIAL_GRAD


def test_dimension_that_does_not_divide_is_refused():
    assert Shard(1, 1, 2).cut(torch.arange(6).view(1, 6)).tolist() == [[3, 4, 5]]
    with pytest.raises(ValueError, match=r"dimension 0 of \(4, 2\) does not divide into 3 parts"):
        Shard(0, 0, 3).cut(torch.zeros(4, 2))


@pytest.mark.parametrize(
    ("spec", "shape", "shard"),
    [
        ("column", (4, 2), Shard(0, 1, 2)),
        ("column", (4,), Shard(0, 1, 2)),
        ("vocab", (4, 2), Shard(0, 1, 2)),
        ("heads", (4, 2, 2), Shard(0, 1, 2)),
        ("row", (4, 2), Shard(1, 1, 2)),
        ("row", (4,), Shard()),  # a bias, added once
        ("replicated", (4, 2), Shard()),
        ("partial_grad", (4, 2), Shard()),
    ],
)
def test_shard_of_a_rank(spec, shape, shard):
    assert shard_of(spec, shape, 1, 2) == shard
    assert shard_of(spec, shape, 0, 1) == Shard()
    assert shard.cut(torch.zeros(shape)).shape == shard.shape(shape)
