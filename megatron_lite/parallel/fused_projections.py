"""Several linears of one input as one step of the backward pass.

A module that applies several linears to the same tensor calls its attribute `fan_out(x, linears)`; what stands there by
default applies one after the other. Here the gradient of x is summed by the products themselves, instead of in a pass of its
own for each, and under tensor parallelism its sum over the processes travels while the weights' gradients are computed
(Shoeybi et al. 2019, arXiv 1909.08053; overlapped as in Megatron-LM's linears with asynchronous gradient all-reduce).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

if TYPE_CHECKING:
    from megatron_lite.parallel.tensor_parallel import TensorGroup


def fuse_projections(layer: nn.Module, tensor: TensorGroup | None) -> None:
    """Have the modules of a layer compute their fan-outs here. Not for ZeRO 3, which gathers a linear when it is called.

    A module with `fan_out_is_entry` enters the parallel region here.
    """
    module: Any
    for module in layer.modules():
        if hasattr(module, "fan_out"):
            entry = tensor is not None and getattr(module, "fan_out_is_entry", False)
            module.fan_out = partial(fan_out, tensor if entry else None)


def fan_out(
    tensor: TensorGroup | None,
    x: Tensor,
    linears: Sequence[nn.Linear],
    again: bool = False,
) -> tuple[Tensor, ...]:
    """linear(x) for every linear. x: [..., in]; with `tensor`, x is entered into a parallel region, unless activations
    are cut along the sequence: then it has been.

    again: and x, for one more product. What that gives as its gradient of x is added to in place, and is no more to be
    read.
    """
    group = None if tensor is None or tensor.sequence else tensor.group
    weights = [linear.weight for linear in linears]
    biases = [linear.bias for linear in linears]
    return _FanOut.apply(x, group, again, len(linears), *weights, *biases)


class _FanOut(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, group: Any, again: bool, count: int, *parameters: Tensor | None
    ) -> tuple[Tensor, ...]:
        weights, biases = parameters[:count], parameters[count:]
        ctx.save_for_backward(x, *weights)
        ctx.group, ctx.biased = group, [bias is not None for bias in biases]
        linear: Any = F.linear
        outputs = [linear(x, weight, bias) for weight, bias in zip(weights, biases, strict=True)]
        return (*outputs, *((x,) if again else ()))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, *weights = ctx.saved_tensors
        flat = [gradient.reshape(-1, gradient.shape[-1]) for gradient in gradients]
        rows = x.reshape(-1, x.shape[-1])
        dx = flat.pop().contiguous() if len(flat) > len(weights) else None
        matmuls = list(zip(flat, weights, strict=True))
        # Gradients and weights that lie side by side are one product: fewer, larger ones run at a higher rate.
        gradient, weight = _side_by_side(flat, 1), _side_by_side(weights, 0)
        if gradient is not None and weight is not None:
            matmuls = [(gradient, weight)]
        for gradient, weight in matmuls:
            dx = torch.mm(gradient, weight) if dx is None else dx.addmm_(gradient, weight)
        assert dx is not None
        work = None if ctx.group is None else dist.all_reduce(dx, group=ctx.group, async_op=True)
        of_weights: Sequence[Tensor] = [torch.mm(gradient.t(), rows) for gradient, _ in matmuls]
        if len(of_weights) < len(weights):
            of_weights = of_weights[0].split([len(weight) for weight in weights])
        of_biases = [_sum(x) if biased else None for x, biased in zip(flat, ctx.biased, strict=True)]
        if work is not None:
            work.wait()
        return dx.view_as(x), None, None, None, *of_weights, *of_biases


def _side_by_side(matrices: Sequence[Tensor], dim: int) -> Tensor | None:
    """torch.cat(matrices, dim) without a copy, where they lie so in one memory; else None."""
    first, stride = matrices[0], matrices[0].stride()
    size = sum(x.shape[dim] for x in matrices)
    if len(matrices) == 1 or stride[1] != 1 or (dim == 1 and stride[0] != size):
        return None
    at, memory = first.storage_offset(), first.untyped_storage().data_ptr()
    for x in matrices:
        if x.storage_offset() != at or x.stride() != stride or x.untyped_storage().data_ptr() != memory:
            return None
        at += x.shape[dim] * stride[dim]
    return first.as_strided((first.shape[0], size) if dim else (size, first.shape[1]), stride)


def _sum(gradient: Tensor) -> Tensor:
    """Of the rows of [rows, columns]. A product with ones reads 16-bit numbers faster than PyTorch's sum does."""
    if not gradient.is_cpu and gradient.dtype in (torch.bfloat16, torch.float16):
        return torch.mv(gradient.t(), _ones(gradient.shape[0], gradient.dtype, gradient.device))
    return gradient.sum(0)


@lru_cache(16)
def _ones(rows: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.ones(rows, dtype=dtype, device=device)
