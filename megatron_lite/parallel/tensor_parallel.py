"""Tensor and sequence parallelism (Shoeybi et al. 2019, arXiv 1909.08053; Korthikanti et al. 2022, arXiv 2205.05198),
applied from outside to plain modules.

A module whose plan has a "row" entry is a parallel region: its input is entered once (with `project_inputs_is_entry` the input of
its fused projections, unless the sequence is cut), each process computes its heads or columns on the whole sequence, and the row
linear's outputs are summed. Between regions every process holds the whole
activations, or with sequence parallelism its part of the tokens:

|                   | enter (forward; backward)                           | leave (forward; backward)              |
|-------------------|-----------------------------------------------------|----------------------------------------|
| tensor            | as it is; sum of the gradients                      | sum; as it is                          |
| with sequence     | all-gather of the tokens; reduce-scatter            | reduce-scatter; all-gather             |
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from megatron_lite.parallel.collectives import all_gather, reduce_scatter
from megatron_lite.parallel.sharding_plan import ShardingSpec, shard_of, sharding_specs, spec_of


@dataclass
class TensorGroup:
    """The processes that share every layer.

    Attributes:
        group, index, count: the processes, and this one's place among them.
        sequence: activations between regions are cut along the sequence; switched off while text is generated, whose
            lengths do not divide.
        products_kept: the products of the row linears are kept for a second forward pass, which sums them again.
    """

    group: dist.ProcessGroup
    index: int
    count: int
    sequence: bool = False
    products_kept: bool = False

    def enter(self, x: Tensor) -> Tensor:
        """Into a parallel region. x: [batch, length, ...], with sequence parallelism this process's part of it."""
        return _GatherSequence.apply(x, self) if self.sequence else _SumGradient.apply(x, self)

    def leave(self, x: Tensor) -> Tensor:
        """Out of a parallel region: the sum of every process's x [batch, length, ...], or this process's part of it.

        The sum is formed in the memory of x, which must be a result that nothing else reads, unless products are kept.
        """
        return _ScatterSequence.apply(x, self) if self.sequence else _Sum.apply(x, self)

    def gather(self, x: Tensor) -> Tensor:
        """[count, ...]: the tensor of every process, without a gradient."""
        return all_gather(x, self.group, self.count)


def shard_layer(layer: nn.Module, tensor: TensorGroup) -> None:
    """Cut a whole layer in place to this process's part, by its sharding specs; it then computes what it did whole.

    Raises:
        ValueError: a dimension that does not divide (the parameter is named), or a module that cannot be cut.
    """
    specs = sharding_specs(layer)
    modules = dict(layer.named_modules())
    for name, module in modules.items():
        if "row" in getattr(module, "tensor_parallel_plan", {}).values():
            module.register_forward_pre_hook(partial(_enter, tensor))
            if getattr(module, "project_inputs_is_entry", False):
                module.project_inputs = partial(_entered, tensor)
        if isinstance(module, nn.Linear) and specs[f"{name}.weight"] == ShardingSpec.ROW:
            *path, local = name.split(".")
            setattr(layer.get_submodule(".".join(path)), local, _RowLinear(module, tensor))
        _cut_buffers(layer, name, module, tensor)
    for name, parameter in list(layer.named_parameters()):
        *path, local = name.split(".")
        shard = shard_of(specs[name], tuple(parameter.shape), tensor.index, tensor.count)
        try:
            piece = nn.Parameter(shard.cut(parameter.detach()).clone())
        except ValueError as error:
            raise ValueError(
                f"parallel.tensor = {tensor.count}: {type(layer).__name__} parameter {name}: {error}"
            ) from error
        if shard.count > 1:
            # DeepSpeed counts a parameter without these once a tensor group in the gradient norm.
            piece.tensor_model_parallel = piece.model_parallel = True  # type: ignore[attr-defined]
        elif specs[name] == ShardingSpec.PARTIAL_GRAD or tensor.sequence:
            # Every process saw a part: of the heads, or of the sequence.
            piece.register_hook(partial(_summed, tensor))
        setattr(layer.get_submodule(".".join(path)), local, piece)
    if "vocab" in getattr(layer, "tensor_parallel_plan", {}).values():
        _cut_vocabulary(layer, tensor)


def _enter(tensor: TensorGroup, module: nn.Module, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    if not tensor.sequence and getattr(module, "project_inputs_is_entry", False):
        return arguments
    return (tensor.enter(arguments[0]), *arguments[1:])


def _entered(
    tensor: TensorGroup, x: Tensor, linears: Sequence[nn.Linear], return_input: bool = False
) -> tuple[Tensor, ...]:
    x = x if tensor.sequence else tensor.enter(x)
    return (*(linear(x) for linear in linears), *((x,) if return_input else ()))


def _summed(tensor: TensorGroup, gradient: Tensor) -> Tensor:
    total = gradient.contiguous().clone()
    dist.all_reduce(total, group=tensor.group)
    return total


def _cut_buffers(layer: nn.Module, name: str, module: nn.Module, tensor: TensorGroup) -> None:
    for local, buffer in list(module.named_buffers(recurse=False)):
        shard = shard_of(spec_of(layer, f"{name}.{local}" if name else local), buffer.shape, tensor.index, tensor.count)
        setattr(module, local, shard.cut(buffer).clone())


class _RowLinear(nn.Module):
    """A linear whose input features are cut: the partial products are summed, the bias is added once."""

    def __init__(self, linear: nn.Linear, tensor: TensorGroup) -> None:
        super().__init__()
        self.weight, self.bias, self._tensor = linear.weight, linear.bias, tensor

    def forward(self, x: Tensor) -> Tensor:
        y = self._tensor.leave(F.linear(x, self.weight))
        return y if self.bias is None else y + self.bias


@dataclass(frozen=True)
class _VocabularyPart:
    """What the cross entropy of a part of the vocabulary needs of the others."""

    tensor: TensorGroup

    @property
    def index(self) -> int:
        return self.tensor.index

    @property
    def count(self) -> int:
        return self.tensor.count

    def gather(self, x: Tensor) -> Tensor:
        return self.tensor.gather(x)


def _cut_vocabulary(layer: Any, tensor: TensorGroup) -> None:
    """The vocabulary-parallel embedding (`lookup`) or head (`project`, `cross_entropy`) of Megatron-LM."""
    if hasattr(layer, "lookup"):
        layer.lookup = partial(_vocabulary_lookup, tensor, layer.lookup)
        return
    project: Callable[..., Tensor] = layer.project
    cross_entropy: Callable[..., Tensor] = layer.cross_entropy

    def project_all(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return _GatherLast.apply(project(tensor.enter(hidden), weight, bias), tensor)

    def cross_entropy_all(
        hidden: Tensor, weight: Tensor, labels: Tensor, loss_weight: Tensor | None, **options: Any
    ) -> Tensor:
        return cross_entropy(
            tensor.enter(hidden), weight, labels, loss_weight, vocabulary=_VocabularyPart(tensor), **options
        )

    layer.project, layer.cross_entropy = project_all, cross_entropy_all


def _vocabulary_lookup(
    tensor: TensorGroup, lookup: Callable[..., Tensor], tokens: Tensor, weight: Tensor, vectors: Tensor | None
) -> Tensor:
    local = tokens - tensor.index * weight.shape[0]
    elsewhere = (local < 0) | (local >= weight.shape[0])
    rows = lookup(local.masked_fill(elsewhere, 0), weight, None).masked_fill(elsewhere.unsqueeze(-1), 0.0)
    if vectors is not None:  # added once; elsewhere the gradient is zero, not absent
        rows = rows + vectors * float(tensor.index == 0)
    return tensor.leave(rows)


class _SumGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, tensor: TensorGroup) -> Tensor:
        ctx.tensor = tensor
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _all_reduce(grad, ctx.tensor), None


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, tensor: TensorGroup) -> Tensor:
        if tensor.products_kept or not x.is_contiguous():
            return _all_reduce(x, tensor)
        ctx.mark_dirty(x)
        _sum_in_place(x, tensor)
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class _GatherSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, tensor: TensorGroup) -> Tensor:
        ctx.tensor = tensor
        return _gather_sequence(x, tensor)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _scatter_sequence(grad, ctx.tensor), None


class _ScatterSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, tensor: TensorGroup) -> Tensor:
        ctx.tensor = tensor
        return _scatter_sequence(x, tensor)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _gather_sequence(grad, ctx.tensor), None


class _GatherLast(torch.autograd.Function):
    """All-gather along the last dimension; each process's gradient is its own part, since all compute the same."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, tensor: TensorGroup) -> Tensor:
        ctx.tensor = tensor
        return all_gather(x, tensor.group, tensor.count).movedim(0, -2).flatten(-2)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad.chunk(ctx.tensor.count, -1)[ctx.tensor.index], None


def _all_reduce(x: Tensor, tensor: TensorGroup) -> Tensor:
    total = x.clone(memory_format=torch.contiguous_format)
    _sum_in_place(total, tensor)
    return total


def _sum_in_place(x: Tensor, tensor: TensorGroup) -> None:
    # Asynchronous, because it is then at work on the group's own stream, of high priority: a sum that waits for room behind
    # another half's products would hold up its own half.
    work = dist.all_reduce(x, group=tensor.group, async_op=True)
    if work is not None:
        work.wait()


# A process's part is a block of the micro batch's tokens, counted through its sequences, so that the parts lie one after the
# other in memory as they are sent. Between regions nothing looks at a token's neighbours or its place.


def _gather_sequence(x: Tensor, tensor: TensorGroup) -> Tensor:
    """[batch, length / count, ...], a process's tokens -> [batch, length, ...]."""
    batch, part, *rest = x.shape
    return all_gather(x, tensor.group, tensor.count).view(batch, part * tensor.count, *rest)


def _scatter_sequence(x: Tensor, tensor: TensorGroup) -> Tensor:
    """The sum of every process's x [batch, length, ...], of which each keeps its tokens [batch, length / count, ...]."""
    batch, length, *rest = x.shape
    parts = x.contiguous().view(tensor.count, batch, length // tensor.count, *rest)
    return reduce_scatter(parts, tensor.group)
