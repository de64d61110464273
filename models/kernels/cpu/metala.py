"""The core of a MetaLA layer in C++ on a CPU: decay and key, gated linear attention and epilogue in one step.

It works token by token. With small heads this is less arithmetic than matmuls in chunks, correct for every decay, and a head's
state stays in the L1 cache. The backward pass starts from the states at every 32nd token. Reference: the three steps in
`models/operators/metala.py`. On CUDA: `models/kernels/metala.py`.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .build import is_supported, run, shared_object

_CHUNK = 32
# Largest state of a head, in elements: the states of a chunk are on a thread's stack.
_LARGEST = 8192


def supports_metala_core(q: Tensor, a: Tensor, v: Tensor, aug_weight: Tensor, gate: Tensor) -> bool:
    """Return whether `metala_core` computes with these: heads of a multiple of 16 channels, and a compiler is installed."""
    if not is_supported(q, a, v, aug_weight, gate) or not v.numel():
        return False
    head_dim_k, head_dim_v = q.shape[-1], v.shape[-1]
    if head_dim_k % 16 or head_dim_v % 16 or head_dim_k * head_dim_v > _LARGEST:
        return False
    return _shared_object(q.dtype, head_dim_k, head_dim_v) is not None


def metala_core(
    q: Tensor,
    a: Tensor,
    v: Tensor,
    aug_weight: Tensor,
    gate: Tensor,
    scale: float,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    eps: float = 1e-5,
) -> tuple[Tensor, Tensor]:
    """Return the output and the final states in float32 of `models.operators.metala.metala`, whose caller checks the shapes.

    q, a: [batch, length, heads, head_dim_k]. The gradients of q, a, v and gate are adjacent in memory, so that one matmul can
    take them.
    """
    batch, length, heads, head_dim_k = q.shape
    if cu_seqlens is None:
        bounds = torch.arange(0, (batch + 1) * length, length)
    else:
        bounds = cu_seqlens.to(torch.int64).contiguous()
    if initial_state is None:
        initial_state = torch.zeros(len(bounds) - 1, heads, head_dim_k, v.shape[-1])
    # An int would be passed to the C++ function as an integer.
    return _MetaLACore.apply(q, a, v, aug_weight, gate, initial_state.float(), bounds, float(scale), float(eps))


def _shared_object(dtype: torch.dtype, head_dim_k: int, head_dim_v: int) -> ctypes.CDLL | None:
    return shared_object("metala", dtype, KEYS=head_dim_k, VALUES=head_dim_v, CHUNK=_CHUNK)


class _MetaLACore(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        a: Tensor,
        v: Tensor,
        aug_weight: Tensor,
        gate: Tensor,
        initial: Tensor,
        bounds: Tensor,
        scale: float,
        eps: float,
    ) -> tuple[Tensor, Tensor]:
        inputs = [x.contiguous() for x in (q, a, v, aug_weight, gate)]
        heads, head_dim_k, head_dim_v = q.shape[2], q.shape[3], v.shape[3]
        sequences, tokens = len(bounds) - 1, q.shape[0] * q.shape[1]
        state, y = initial.clone(memory_format=torch.contiguous_format), torch.empty_like(inputs[4])
        starts = None
        if any(ctx.needs_input_grad):
            starts = state.new_empty(tokens // _CHUNK + sequences, heads, head_dim_k, head_dim_v)
        compiled = _shared_object(q.dtype, head_dim_k, head_dim_v)
        run(compiled, "forward", *inputs, state, starts, y, bounds, sequences, heads, scale, eps)
        ctx.save_for_backward(*inputs, starts, bounds)
        ctx.scale, ctx.eps = scale, eps
        ctx.set_materialize_grads(False)
        return y, state

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor | None, d_final: Tensor | None) -> tuple[Tensor | None, ...]:
        *inputs, starts, bounds = ctx.saved_tensors
        q, _, v, aug_weight, gate = inputs
        heads, head_dim_k, head_dim_v = q.shape[2], q.shape[3], v.shape[3]
        sequences = len(bounds) - 1
        dy = torch.zeros_like(gate) if dy is None else dy.contiguous()
        shape = sequences, heads, head_dim_k, head_dim_v
        d_state = starts.new_zeros(shape) if d_final is None else d_final.clone(memory_format=torch.contiguous_format)
        widths = [heads * head_dim_k, heads * head_dim_k, heads * head_dim_v, heads * head_dim_v]
        gradients = q.new_empty(*q.shape[:2], sum(widths))
        dq, da, dv, d_gate = gradients.split(widths, -1)
        d_weight = starts.new_empty(sequences, heads * head_dim_k)
        compiled = _shared_object(q.dtype, head_dim_k, head_dim_v)
        run(
            compiled, "backward", *inputs, starts, dy, d_state, dq, da, dv, d_gate, d_weight, bounds,
            sequences, heads, sum(widths), ctx.scale, ctx.eps,
        )  # fmt: skip
        dq, da, dv = (x.unflatten(-1, (heads, -1)) for x in (dq, da, dv))
        return dq, da, dv, d_weight.sum(0).to(aug_weight.dtype), d_gate, d_state, None, None, None
