"""A SwiGLU MLP in FP8 as one autograd node. The kernels between the matmuls write FP8, without a 16-bit copy.

    [gate, up] = x W_gu'      h = SiLU(gate) * up      y = h W_down'

h and the gradients of gate and up are the widest tensors of a block. A 16-bit copy would be written once and read once more to
quantise it. The backward pass reads x and h in FP8, and gate and up in `precision.dtype`.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
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
from megatron_lite.fp8.swiglu import swiglu_backward_rows, swiglu_rows
from megatron_lite.parallel.fused_projections import merged, reduction_group

if TYPE_CHECKING:
    from megatron_lite.parallel.tensor_parallel import TensorGroup


def fuse_mlp(module: Any, tensor: TensorGroup | None) -> bool:
    """Replace the forward pass of a sharded MLP with `is_swiglu`, unless its projections have biases. Return whether it did."""
    fuses = getattr(module, "is_swiglu", False) and module.gate_proj.bias is None
    if fuses:
        module.forward = partial(_forward, module, reduction_group(tensor))
    return fuses


def _forward(module: Any, group: dist.ProcessGroup | None, x: Tensor) -> Tensor:
    y = _Fp8MLP.apply(x, group, module.gate_proj.weight, module.up_proj.weight, module.down_proj.weight)
    # A row linear of tensor parallelism ends the parallel region.
    return y if isinstance(module.down_proj, nn.Linear) else module.down_proj.leave(y)


class _Fp8MLP(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
        rows = quantize_rows(x.reshape(-1, x.shape[-1]))
        first, second = quantize_stacked(merged([gate, up], 0)), quantize_rows(down)
        gate_up = scaled_matmul(rows, first, x.dtype)
        hidden = swiglu_rows(gate_up)
        y = scaled_matmul(hidden, second, x.dtype)
        ctx.save_for_backward(*rows, *first, gate_up, *hidden, *second)
        ctx.shape, ctx.group = x.shape, group
        # Not a view, because tensor parallelism sums the output in place.
        return torch.ops.aten._unsafe_view(y, (*x.shape[:-1], len(down)))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors
        gate_up, dtype = saved[4], dy.dtype
        rows, first, hidden, second = (Quantized(*saved[i : i + 2]) for i in (0, 2, 5, 7))
        gradient = quantize_rows(dy.reshape(-1, dy.shape[-1]))
        of_gate_up = swiglu_backward_rows(input_gradient(gradient, second, dtype), gate_up)
        of_down = weight_gradient(gradient, hidden, dtype)
        dx = input_gradient(of_gate_up, first, dtype)
        work = None if ctx.group is None else dist.all_reduce(dx, group=ctx.group, async_op=True)
        of_gate, of_up = weight_gradient(of_gate_up, rows, dtype).chunk(2)
        if work is not None:
            work.wait()
        return dx.view(ctx.shape), None, of_gate, of_up, of_down
