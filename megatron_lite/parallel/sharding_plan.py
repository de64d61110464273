"""Sharding specs: each parameter has exactly one, and sharding, gradients, checkpoints and conversion all read it.

A module declares `tensor_parallel_plan`: the name of one of its parameters or submodules -> the value of a `ShardingSpec`.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from torch import Tensor, nn


class ShardingSpec(StrEnum):
    """How tensor parallelism holds a parameter.

    COLUMN: the output features of a linear layer (rows of its weight) are sharded.
    ROW: the input features (columns of its weight) are sharded; the outputs are summed.
    VOCAB: the vocabulary (first dimension) is sharded.
    HEADS: the first dimension is sharded along with the heads.
    REPLICATED: every rank holds the whole parameter and computes its whole gradient.
    PARTIAL_GRAD: every rank holds the whole parameter and computes a part of its gradient; the parts are summed.
    """

    COLUMN = "column"
    ROW = "row"
    VOCAB = "vocab"
    HEADS = "heads"
    REPLICATED = "replicated"
    PARTIAL_GRAD = "partial_grad"

    @classmethod
    def _missing_(cls, value: object) -> ShardingSpec | None:
        """Return the spec for a name that checkpoints of earlier versions hold."""
        return {"shard": cls.HEADS, "replicated, gradient summed": cls.PARTIAL_GRAD}.get(str(value))


@dataclass(frozen=True)
class Shard:
    """The part of a tensor that a process holds: part `index` of `count` equal ones along `dim`. Count 1 is all of it.

    A piece of a checkpoint is a range of the flattened shard. A shard along the first dimension is a range of the flattened
    tensor too.
    """

    dim: int = 0
    index: int = 0
    count: int = 1

    def cut(self, full: Tensor) -> Tensor:
        """Return this part of a full tensor as a view. Raises ValueError if the count does not divide the dimension."""
        if self.count == 1:
            return full
        size = full.shape[self.dim]
        if size % self.count:
            raise ValueError(f"dimension {self.dim} of {tuple(full.shape)} does not divide into {self.count} parts")
        return full.narrow(self.dim, self.index * (size // self.count), size // self.count)

    def shape(self, full: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of this part of a tensor of shape `full`."""
        return (*full[: self.dim], full[self.dim] // self.count, *full[self.dim + 1 :]) if self.count > 1 else full


def sharding_specs(module: nn.Module) -> dict[str, ShardingSpec]:
    """Return the sharding spec of every parameter of a module, by parameter name.

    The innermost plan that names the parameter, or a submodule on the way to it, decides.

    Raises:
        ValueError: a parameter without a spec, or a spec that does not exist.
    """
    specs: dict[str, ShardingSpec] = {}
    for name, _ in module.named_parameters(remove_duplicate=False):
        spec = spec_of(module, name)
        if spec not in list(ShardingSpec):
            problem = "no plan names it" if spec is None else f"its spec is {spec!r}"
            raise ValueError(
                f"{type(module).__name__} parameter {name}: {problem}; the tensor_parallel_plan of its module must give it "
                f"one of {', '.join(ShardingSpec)}"
            )
        specs[name] = ShardingSpec(spec)
    return specs


def spec_of(module: nn.Module, name: str) -> str | None:
    """Return the spec that the plans in `module` give to a parameter or buffer; None if no plan names it."""
    first, _, rest = name.partition(".")
    inner = spec_of(getattr(module, first), rest) if rest else None
    return getattr(module, "tensor_parallel_plan", {}).get(first) if inner is None else inner


def shard_of(spec: str | None, shape: tuple[int, ...], index: int, count: int) -> Shard:
    """Return the shard of a tensor of shape `shape` with this spec on rank `index` of `count` of a tensor-parallel group.

    The bias of a row-parallel linear layer (one dimension) is not sharded: it is added once, after the all-reduce.
    """
    if count == 1:
        return Shard()
    if spec in (ShardingSpec.COLUMN, ShardingSpec.VOCAB, ShardingSpec.HEADS):
        return Shard(0, index, count)
    if spec == ShardingSpec.ROW and len(shape) == 2:
        return Shard(1, index, count)
    return Shard()
