"""Tensor and sequence parallelism, applied from outside to plain modules.

Shoeybi et al. 2019, arXiv 1909.08053; Korthikanti et al. 2022, arXiv 2205.05198.

A module whose plan has a "row" entry is a parallel region. Its input enters the region once; with `project_inputs_is_entry` and
without sequence parallelism, the input of its fused projections does. Each process computes its heads or columns on the whole
sequence. The outputs of the row linear are summed. Between regions every process holds all activations, or with sequence
parallelism its part of the tokens:

|                   | enter (forward; backward)                           | leave (forward; backward)              |
|-------------------|-----------------------------------------------------|----------------------------------------|
| tensor            | identity; all-reduce                                | all-reduce; identity                   |
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
        group, index, count: the process group, this process's rank in it, and its size.
        sequence: activations between regions are split along the sequence; off while text is generated, whose lengths do not
            divide.
        stores_matmuls: outputs of the row linears are stored for a second forward pass, which all-reduces them again.
    """

    group: dist.ProcessGroup
    index: int
    count: int
    sequence: bool = False
    stores_matmuls: bool = False

    def enter(self, x: Tensor) -> Tensor:
        """Enter a parallel region. x: [batch, length, ...], with sequence parallelism this process's part of it."""
        return _GatherSequence.apply(x, self) if self.sequence else _SumGradient.apply(x, self)

    def leave(self, x: Tensor) -> Tensor:
        """Leave a parallel region: return the sum of every process's x [batch, length, ...], or this process's part of it.

        The sum is in place unless matmuls are stored, so nothing else may read x.
        """
        return _ScatterSequence.apply(x, self) if self.sequence else _Sum.apply(x, self)

    def gather(self, x: Tensor) -> Tensor:
        """Return [count, ...]: the tensor of every process, without a gradient."""
        return all_gather(x, self.group, self.count)


def shard_layer(layer: nn.Module, tensor: TensorGroup) -> None:
    """Shard a full-width layer in place by its sharding specs. Its outputs stay equal to those at full width.

    Raises:
        ValueError: a parameter without a spec, or a dimension that the size does not divide; names the parameter.
    """
    specs = sharding_specs(layer)
    modules = dict(layer.named_modules())
    for name, module in modules.items():
        if "row" in getattr(module, "tensor_parallel_plan", {}).values():
            module.register_forward_pre_hook(partial(_enter, tensor))
            if getattr(module, "project_inputs_is_entry", False):
                module.project_inputs = partial(_enter_and_project, tensor)
        if isinstance(module, nn.Linear) and specs[f"{name}.weight"] == ShardingSpec.ROW:
            *path, local = name.split(".")
            setattr(layer.get_submodule(".".join(path)), local, _RowLinear(module, tensor))
        for local, buffer in list(module.named_buffers(recurse=False)):
            spec = spec_of(layer, f"{name}.{local}" if name else local)
            setattr(module, local, shard_of(spec, buffer.shape, tensor.index, tensor.count).cut(buffer).clone())
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
            # DeepSpeed counts a parameter without these once per tensor group in the gradient norm.
            piece.tensor_model_parallel = piece.model_parallel = True  # type: ignore[attr-defined]
        elif specs[name] == ShardingSpec.PARTIAL_GRAD or tensor.sequence:
            # Each process has the gradient of its heads, or of its part of the sequence.
            piece.register_hook(partial(_all_reduce, tensor=tensor))
        setattr(layer.get_submodule(".".join(path)), local, piece)
    if "vocab" in getattr(layer, "tensor_parallel_plan", {}).values():
        _shard_vocabulary(layer, tensor)


def _enter(tensor: TensorGroup, module: nn.Module, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    if not tensor.sequence and getattr(module, "project_inputs_is_entry", False):
        return arguments
    return (tensor.enter(arguments[0]), *arguments[1:])


def _enter_and_project(
    tensor: TensorGroup, x: Tensor, linears: Sequence[nn.Linear], return_input: bool = False
) -> tuple[Tensor, ...]:
    x = x if tensor.sequence else tensor.enter(x)
    return (*(linear(x) for linear in linears), *((x,) if return_input else ()))


class _RowLinear(nn.Module):
    """A linear with sharded input features: the partial results are summed, the bias is added once."""

    def __init__(self, linear: nn.Linear, tensor: TensorGroup) -> None:
        super().__init__()
        self.weight, self.bias, self._tensor = linear.weight, linear.bias, tensor
        self.matmul: Callable[[Tensor, Tensor], Tensor] | None = None  # instead of `F.linear`

    def forward(self, x: Tensor) -> Tensor:
        # ZeRO 3 replaces `F.linear` after this module is built.
        return self.leave((self.matmul or F.linear)(x, self.weight))

    def leave(self, y: Tensor) -> Tensor:
        """Return the layer's output for this process's result of the matmul."""
        y = self._tensor.leave(y)
        return y if self.bias is None else y + self.bias


def _shard_vocabulary(layer: Any, tensor: TensorGroup) -> None:
    """Replace `lookup` of an embedding, or `project` and `cross_entropy` of a head, by Megatron-LM's vocabulary-parallel ones."""
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
        return cross_entropy(tensor.enter(hidden), weight, labels, loss_weight, vocabulary=tensor, **options)

    layer.project, layer.cross_entropy = project_all, cross_entropy_all


def _vocabulary_lookup(
    tensor: TensorGroup, lookup: Callable[..., Tensor], tokens: Tensor, weight: Tensor, vectors: Tensor | None
) -> Tensor:
    local = tokens - tensor.index * weight.shape[0]
    elsewhere = (local < 0) | (local >= weight.shape[0])
    rows = lookup(local.masked_fill(elsewhere, 0), weight, None).masked_fill(elsewhere.unsqueeze(-1), 0.0)
    if vectors is not None:  # added on one rank; on the others the gradient is zero, not absent
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
        if tensor.stores_matmuls or not x.is_contiguous():
            return _all_reduce(x, tensor)
        ctx.mark_dirty(x)
        _all_reduce_in_place(x, tensor)
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
    """All-gather along the last dimension. All processes compute the same gradient, so each keeps its part."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, tensor: TensorGroup) -> Tensor:
        ctx.tensor = tensor
        return all_gather(x, tensor.group, tensor.count).movedim(0, -2).flatten(-2)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad.chunk(ctx.tensor.count, -1)[ctx.tensor.index], None


def _all_reduce(x: Tensor, tensor: TensorGroup) -> Tensor:
    total = x.clone(memory_format=torch.contiguous_format)
    _all_reduce_in_place(total, tensor)
    return total


def _all_reduce_in_place(x: Tensor, tensor: TensorGroup) -> None:
    # An asynchronous all-reduce runs on the group's stream, which has priority over matmuls of the other chunk (tensor overlap).
    work = dist.all_reduce(x, group=tensor.group, async_op=True)
    if work is not None:
        work.wait()


# A process's part is a contiguous block of the flattened tokens of the micro-batch, so that no copy is needed before a
# collective. Between regions no layer reads a token's neighbours or its position.


def _gather_sequence(x: Tensor, tensor: TensorGroup) -> Tensor:
    """Return [batch, length, ...] from the tokens of every process, [batch, length / count, ...]."""
    batch, part, *rest = x.shape
    return all_gather(x, tensor.group, tensor.count).view(batch, part * tensor.count, *rest)


def _scatter_sequence(x: Tensor, tensor: TensorGroup) -> Tensor:
    """Return this process's tokens [batch, length / count, ...] of the sum of every process's x [batch, length, ...]."""
    batch, length, *rest = x.shape
    parts = x.contiguous().view(tensor.count, batch, length // tensor.count, *rest)
    return reduce_scatter(parts, tensor.group)
