"""Fused projections: several linears of one input in one autograd node.

A module that applies several linears to one tensor calls its attribute `project_inputs(x, linears)`. The default applies them
one after the other. Here the matmuls accumulate the gradient of x, without a separate addition for each. Under tensor
parallelism the all-reduce of that gradient overlaps with the gradients of the weights (Shoeybi et al. 2019, arXiv 1909.08053;
the asynchronous gradient all-reduce of Megatron-LM's linears). A linear with the attribute `fp8_recipe` multiplies in FP8.
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

from megatron_lite.fp8.rowwise import Recipe, input_gradient, quantize_rows, scaled_matmul, weight_gradient

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
    recipes = [getattr(linear, "fp8_recipe", None) for linear in linears]
    return _FusedProjections.apply(x, group, return_input, recipes, *weights, *biases)


def fp8_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, recipe: Recipe) -> Tensor:
    """Return `F.linear` (x, weight, bias) with matmuls in FP8. x: [..., in]."""
    return _FusedProjections.apply(x, None, False, [recipe], weight, bias)[0]


class _FusedProjections(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        group: Any,
        return_input: bool,
        recipes: Sequence[Recipe | None],
        *parameters: Tensor | None,
    ) -> tuple[Tensor, ...]:
        count = len(recipes)
        weights: Any = parameters[:count]
        biases = parameters[count:]
        ctx.save_for_backward(x, *weights)
        ctx.group, ctx.recipes, ctx.biased = group, recipes, [bias is not None for bias in biases]
        rows = quantize_rows(x.reshape(-1, x.shape[-1])) if any(recipes) else None
        linear: Any = F.linear
        outputs = []
        for weight, bias, recipe in zip(weights, biases, recipes, strict=True):
            if recipe is None:
                outputs.append(linear(x, weight, bias))
                continue
            assert rows is not None
            flat = scaled_matmul(rows, quantize_rows(weight), x.dtype, fast=True)
            # Not a view, because tensor parallelism sums a row linear's output in place.
            y = torch.ops.aten._unsafe_view(flat, (*x.shape[:-1], len(weight)))
            outputs.append(y if bias is None else y + bias)
        return (*outputs, *((x,) if return_input else ()))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, *weights = ctx.saved_tensors
        flat = [gradient.reshape(-1, gradient.shape[-1]) for gradient in gradients]
        rows = x.reshape(-1, x.shape[-1])
        dx = flat.pop().contiguous() if len(flat) > len(weights) else None
        matmuls = _matmuls(flat, weights, ctx.recipes)
        for _, recipe, gradient, weight in matmuls:
            if recipe is not None:
                from_fp8 = input_gradient(recipe, gradient, weight)
                dx = from_fp8 if dx is None else dx.add_(from_fp8)
            else:
                dx = torch.mm(gradient, weight) if dx is None else dx.addmm_(gradient, weight)
        assert dx is not None
        work = None if ctx.group is None else dist.all_reduce(dx, group=ctx.group, async_op=True)
        of_weights: list[Tensor | None] = [None] * len(weights)
        for indices, recipe, gradient, _ in matmuls:
            whole = torch.mm(gradient.t(), rows) if recipe is None else weight_gradient(recipe, gradient, rows)
            parts = whole.split([len(weights[i]) for i in indices]) if len(indices) > 1 else [whole]
            for index, part in zip(indices, parts, strict=True):
                of_weights[index] = part
        of_biases = [_sum(x) if biased else None for x, biased in zip(flat, ctx.biased, strict=True)]
        if work is not None:
            work.wait()
        return dx.view_as(x), None, None, None, *of_weights, *of_biases


def _matmuls(
    gradients: Sequence[Tensor], weights: Sequence[Tensor], recipes: Sequence[Recipe | None]
) -> list[tuple[list[int], Recipe | None, Tensor, Tensor]]:
    """Return (indices of the linears, recipe, gradient, weight) of each matmul: fewer, larger matmuls run at a higher rate.

    Linears in FP8 share one, because its operands are copied anyway. The others do if they are adjacent in memory.
    """
    matmuls: list[tuple[list[int], Recipe | None, Tensor, Tensor]] = []
    for quantized in (True, False):
        indices = [index for index, recipe in enumerate(recipes) if (recipe is not None) == quantized]
        if not indices:
            continue
        several = [gradients[i] for i in indices], [weights[i] for i in indices]
        gradient, weight = _adjacent(several[0], 1), _adjacent(several[1], 0)
        if quantized and len(indices) > 1:
            gradient = torch.cat(several[0], 1) if gradient is None else gradient
            weight = torch.cat(several[1]) if weight is None else weight
        if gradient is not None and weight is not None:
            matmuls.append((indices, recipes[indices[0]], gradient, weight))
        else:
            matmuls += [([i], recipes[i], gradients[i], weights[i]) for i in indices]
    return matmuls


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
