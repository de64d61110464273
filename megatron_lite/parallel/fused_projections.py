"""Fused projections: several linears of one input in one autograd node.

A module that applies several linears to one tensor calls its attribute `project_inputs(x, linears)`. The default applies them
one after the other. Here the matmuls accumulate the gradient of x, without a separate addition for each. Under tensor
parallelism the all-reduce of that gradient overlaps with the gradients of the weights (Shoeybi et al. 2019, arXiv 1909.08053;
the asynchronous gradient all-reduce of Megatron-LM's linears).
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
    """Replace `project_inputs` of the layer's modules. Not for ZeRO 3, which gathers a linear when it is called.

    A module with `project_inputs_is_entry` enters the tensor-parallel region here.
    """
    module: Any
    for module in layer.modules():
        if hasattr(module, "project_inputs"):
            entry = tensor is not None and getattr(module, "project_inputs_is_entry", False)
            module.project_inputs = partial(project_inputs, tensor if entry else None)


def project_inputs(
    tensor: TensorGroup | None,
    x: Tensor,
    linears: Sequence[nn.Linear],
    return_input: bool = False,
) -> tuple[Tensor, ...]:
    """Return linear(x) of every linear, in order.

    x: [..., in]. tensor: enter the tensor-parallel region here; with sequence parallelism x has entered it already.
    return_input: also return x, for one more matmul. Its gradient of x is accumulated in place and must not be read after.
    """
    group = None if tensor is None or tensor.sequence else tensor.group
    weights = [linear.weight for linear in linears]
    biases = [linear.bias for linear in linears]
    return _FusedProjections.apply(x, group, return_input, len(linears), *weights, *biases)


class _FusedProjections(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, group: Any, return_input: bool, count: int, *parameters: Tensor | None
    ) -> tuple[Tensor, ...]:
        weights, biases = parameters[:count], parameters[count:]
        ctx.save_for_backward(x, *weights)
        ctx.group, ctx.biased = group, [bias is not None for bias in biases]
        linear: Any = F.linear
        outputs = [linear(x, weight, bias) for weight, bias in zip(weights, biases, strict=True)]
        return (*outputs, *((x,) if return_input else ()))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, *weights = ctx.saved_tensors
        flat = [gradient.reshape(-1, gradient.shape[-1]) for gradient in gradients]
        rows = x.reshape(-1, x.shape[-1])
        dx = flat.pop().contiguous() if len(flat) > len(weights) else None
        matmuls = list(zip(flat, weights, strict=True))
        # Adjacent gradients and weights need one matmul: fewer, larger matmuls run at a higher rate.
        gradient, weight = _adjacent(flat, 1), _adjacent(weights, 0)
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


def _adjacent(matrices: Sequence[Tensor], dim: int) -> Tensor | None:
    """Return torch.cat(matrices, dim) as a view if the matrices are adjacent in one storage, else None."""
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
    """Return the sum over the rows of [rows, columns]. A matmul with ones reads 16 bits faster than PyTorch's sum."""
    if not gradient.is_cpu and gradient.dtype in (torch.bfloat16, torch.float16):
        return torch.mv(gradient.t(), _ones(gradient.shape[0], gradient.dtype, gradient.device))
    return gradient.sum(0)


@lru_cache(16)
def _ones(rows: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.ones(rows, dtype=dtype, device=device)
