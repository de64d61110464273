"""Fused projections: several linears of one input in one autograd node.

A module that applies several linears to one tensor calls its attribute `project_inputs(x, linears)`. The default applies them
one after the other. Here the matmuls accumulate the gradient of x, without a separate addition for each. Under tensor
parallelism the all-reduce of that gradient overlaps with the gradients of the weights (Shoeybi et al. 2019, arXiv 1909.08053;
the asynchronous gradient all-reduce of Megatron-LM's linears). A linear with a true attribute `in_fp8` multiplies in FP8.
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

from megatron_lite.fp8.rowwise import (
    Quantized,
    input_gradient,
    quantize_rows,
    quantize_stacked,
    scaled_matmul,
    weight_gradient,
)

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
    weights = [linear.weight for linear in linears]
    biases = [linear.bias for linear in linears]
    in_fp8 = [getattr(linear, "in_fp8", False) for linear in linears]
    return _FusedProjections.apply(x, reduction_group(tensor), return_input, in_fp8, *weights, *biases)


def reduction_group(tensor: TensorGroup | None) -> dist.ProcessGroup | None:
    """Return the group that sums the gradient of an input that enters the tensor-parallel region here."""
    return None if tensor is None or tensor.sequence else tensor.group


def fp8_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return `F.linear` (x, weight, bias) with matmuls in FP8. x: [..., in]."""
    return _FusedProjections.apply(x, None, False, [True], weight, bias)[0]


def merged(matrices: Sequence[Tensor], dim: int) -> list[Tensor]:
    """Return the matrices with neighbours that are adjacent in memory as one view."""
    merged = [matrices[0]]
    for x in matrices[1:]:
        both = _adjacent((merged[-1], x), dim)
        merged[-1:] = [merged[-1], x] if both is None else [both]
    return merged


class _FusedProjections(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        group: Any,
        return_input: bool,
        in_fp8: Sequence[bool],
        *parameters: Tensor | None,
    ) -> tuple[Tensor, ...]:
        count = len(in_fp8)
        weights: Any = parameters[:count]
        biases = parameters[count:]
        fp8 = [i for i in range(count) if in_fp8[i]]
        plain = [i for i in range(count) if not in_fp8[i]]
        outputs: list[Any] = [None] * count
        linear: Any = F.linear
        for i in plain:
            outputs[i] = linear(x, weights[i], biases[i])
        saved: list[Tensor] = [x, *(weights[i] for i in plain)] if plain else []
        if fp8:
            rows = quantize_rows(x.reshape(-1, x.shape[-1]))
            stacked = quantize_stacked(merged([weights[i] for i in fp8], 0))
            start = 0
            for i in fp8:
                end = start + len(weights[i])
                flat = scaled_matmul(rows, Quantized(*(part[start:end] for part in stacked)), x.dtype, biases[i])
                # Not a view, because tensor parallelism sums a row linear's output in place.
                outputs[i] = torch.ops.aten._unsafe_view(flat, (*x.shape[:-1], end - start))
                start = end
            saved += [*rows, *stacked]
        ctx.save_for_backward(*saved)
        ctx.shape, ctx.group, ctx.fp8, ctx.plain = x.shape, group, fp8, plain
        ctx.biased = [bias is not None for bias in biases]
        return (*outputs, *((x,) if return_input else ()))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        saved, count = list(ctx.saved_tensors), len(ctx.biased)
        flat = [gradient.reshape(-1, gradient.shape[-1]) for gradient in gradients]
        dx = flat.pop().contiguous() if len(flat) > count else None
        if ctx.fp8:
            stacked, rows = Quantized(*saved[-2:]), Quantized(*saved[-4:-2])
            gradient = quantize_rows(*_at_most_two(merged([flat[i] for i in ctx.fp8], 1)))
            from_fp8 = input_gradient(gradient, stacked, flat[0].dtype)
            dx = from_fp8 if dx is None else dx.add_(from_fp8)
        matmuls = []
        if ctx.plain:
            x, *weights = saved[: 1 + len(ctx.plain)]
            matmuls = _matmuls(ctx.plain, [flat[i] for i in ctx.plain], weights)
            for _, of_matmul, weight in matmuls:
                dx = torch.mm(of_matmul, weight) if dx is None else dx.addmm_(of_matmul, weight)
        assert dx is not None
        work = None if ctx.group is None else dist.all_reduce(dx, group=ctx.group, async_op=True)
        of_weights: list[Tensor | None] = [None] * count
        for indices, of_matmul, _ in matmuls:
            _assign(of_weights, indices, torch.mm(of_matmul.t(), x.reshape(-1, x.shape[-1])), flat)
        if ctx.fp8:
            _assign(of_weights, ctx.fp8, weight_gradient(gradient, rows, flat[0].dtype), flat)
        of_biases = [_sum(y) if biased else None for y, biased in zip(flat, ctx.biased, strict=True)]
        if work is not None:
            work.wait()
        return dx.view(ctx.shape), None, None, None, *of_weights, *of_biases


def _assign(results: list[Tensor | None], indices: Sequence[int], whole: Tensor, gradients: Sequence[Tensor]) -> None:
    """Put the rows of `whole` at the indices: as many per index as its gradient has columns."""
    parts = whole.split([gradients[i].shape[1] for i in indices]) if len(indices) > 1 else [whole]
    for index, part in zip(indices, parts, strict=True):
        results[index] = part


def _matmuls(
    indices: list[int], gradients: Sequence[Tensor], weights: Sequence[Tensor]
) -> list[tuple[list[int], Tensor, Tensor]]:
    """Return (indices of the linears, gradient, weight) of each matmul: one if all are adjacent in memory, else one each."""
    gradient, weight = _adjacent(gradients, 1), _adjacent(weights, 0)
    if gradient is not None and weight is not None:
        return [(indices, gradient, weight)]
    return [([i], *pair) for i, *pair in zip(indices, gradients, weights, strict=True)]  # type: ignore[misc]


def _at_most_two(matrices: list[Tensor]) -> list[Tensor]:
    return matrices if len(matrices) < 3 else [torch.cat(matrices, 1)]


def _adjacent(matrices: Sequence[Tensor], dim: int) -> Tensor | None:
    """Return torch.cat(matrices, dim) as a view if the matrices are adjacent in one storage, else None."""
    first, stride = matrices[0], matrices[0].stride()
    size = sum(x.shape[dim] for x in matrices)
    if len(matrices) == 1 or stride[1] != 1 or (dim == 1 and stride[0] < size):
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
