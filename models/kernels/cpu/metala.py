"""MetaLA's gate, recurrence and epilogue as one step, in C++ on a CPU; on CUDA: `models/kernels/metala/fused_layer.py`.

Token by token, not in chunks: with heads of some ten channels that is less arithmetic than the chunked products, right for
every decay, and a head's state never leaves the first cache. The backward pass starts from the states at every 32nd token.
Reference: the three steps one after the other, `models.mixers.metala`.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ...operators.gla.gated_linear_attention import check
from .build import is_supported, run, shared_object

_CHUNK = 32
# Of a head's state: a chunk's states lie on a thread's stack.
_LARGEST = 8192


def supports_metala_core(q: Tensor, a: Tensor, v: Tensor, aug_weight: Tensor, gate: Tensor) -> bool:
    """Whether `metala_core` computes with these: heads of a multiple of 16 channels, and a compiler is here."""
    keys, values = q.shape[-1], v.shape[-1]
    if (
        not is_supported(q, a, v, aug_weight, gate)
        or keys % 16
        or values % 16
        or keys * values > _LARGEST
        or not v.numel()
    ):
        return False
    return _shared_object(q.dtype, keys, values) is not None


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
    """metala_epilogue(recurrence(q, k, v, g), q, k, v, aug_weight, gate), g = logsigmoid(a) / 16, k = 1 - exp(g); and the
    final states in float32.

    q, a: [batch, length, heads, head_dim_k]; the others as in `models.operators.metala.metala_epilogue` and
    `models.operators.gla.gated_linear_attention.recurrence`, errors too. The gradients of q, a, v and gate lie side by
    side, so that the products with their weights can be one.
    """
    check(q, a, v, a, initial_state, cu_seqlens)
    batch, length, heads, keys = q.shape
    if cu_seqlens is None:
        bounds = torch.arange(0, (batch + 1) * length, length)
    else:
        bounds = cu_seqlens.to(torch.int64).contiguous()
    if initial_state is None:
        initial_state = torch.zeros(len(bounds) - 1, heads, keys, v.shape[-1])
    return _MetaLACore.apply(q, a, v, aug_weight, gate, initial_state.float(), bounds, scale, eps)


def _shared_object(dtype: torch.dtype, keys: int, values: int) -> ctypes.CDLL | None:
    return shared_object("metala", dtype, KEYS=keys, VALUES=values, CHUNK=_CHUNK)


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
        heads, keys, values = q.shape[2], q.shape[3], v.shape[3]
        sequences, tokens = len(bounds) - 1, q.shape[0] * q.shape[1]
        state, y = initial.clone(memory_format=torch.contiguous_format), torch.empty_like(inputs[4])
        starts = None
        if any(ctx.needs_input_grad):
            starts = state.new_empty(tokens // _CHUNK + sequences, heads, keys, values)
        compiled = _shared_object(q.dtype, keys, values)
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
        heads, keys, values = q.shape[2], q.shape[3], v.shape[3]
        sequences = len(bounds) - 1
        dy = torch.zeros_like(gate) if dy is None else dy.contiguous()
        shape = sequences, heads, keys, values
        d_state = starts.new_zeros(shape) if d_final is None else d_final.clone(memory_format=torch.contiguous_format)
        widths = [heads * keys, heads * keys, heads * values, heads * values]
        side_by_side = q.new_empty(*q.shape[:2], sum(widths))
        dq, da, dv, d_gate = side_by_side.split(widths, -1)
        d_weight = starts.new_empty(sequences, heads * keys)
        run(
            _shared_object(q.dtype, keys, values), "backward", *inputs, starts, dy, d_state, dq, da, dv, d_gate, d_weight, bounds,
            sequences, heads, sum(widths), ctx.scale, ctx.eps,
        )  # fmt: skip
        dq, da, dv = (x.unflatten(-1, (heads, -1)) for x in (dq, da, dv))
        return dq, da, dv, d_weight.sum(0).to(aug_weight.dtype), d_gate, d_state, None, None, None
