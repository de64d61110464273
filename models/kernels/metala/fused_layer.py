"""MetaLA's gate, recurrence and epilogue as one step of the backward pass.

q, k and v are read by the recurrence and by the self-augmentation, k and the log decay g are functions of a: the gradients
that meet are summed by the kernel that forms those of the recurrence (`chunk_output.py`), instead of being written,
read and summed, and it forms that of a where it has those of k and g. Those of q, a, v and the output gate lie side by
side, so that the products with their weights can be one (`megatron_lite/parallel/fused_projections.py`).
Reference: the three steps one after the other, `models.mixers.metala`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ...recompute import recomputable
from ..gla.common import Case
from ..gla.gla import backward, case_of, forward
from ..launch import aligned
from .decay_and_key import decay_and_key
from .epilogue import backward_apart, forward_apart


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
    final states.

    q, a: [batch, length, heads, head_dim_k]; the others as in `metala_epilogue.metala_epilogue` and
    `models.operators.gla.gated_linear_attention.recurrence`; scale above 0. Raises ValueError as `vector_decay.vector_decay`.
    """
    case = case_of(q, a, v, scale, initial_state, cu_seqlens, layer=True)
    initial_state = None if initial_state is None else initial_state.float()
    return _MetaLACore.apply(q, a, v, aug_weight, gate, initial_state, cu_seqlens, case, eps)


class _MetaLACore(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        a: Tensor,
        v: Tensor,
        aug_weight: Tensor,
        gate: Tensor,
        initial: Tensor | None,
        cu_seqlens: Tensor | None,
        case: Case,
        eps: float,
    ) -> tuple[Tensor, Tensor]:
        q, a, v, gate = (aligned(x) for x in (q, a, v, gate))
        g, k = decay_and_key(a)
        recomputable((g, k), decay_and_key, a)
        o, final, kept = forward(case, q, k, v, g, initial, cu_seqlens)
        y = forward_apart(o, q, k, v, aug_weight, gate, eps)
        recomputable(y, forward_apart, o, q, k, v, aug_weight, gate, eps)
        ctx.save_for_backward(o, aug_weight, gate, q, k, v, g, initial, *kept)
        ctx.case, ctx.eps = case, eps
        ctx.set_materialize_grads(False)
        return y, final

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor | None, d_final: Tensor | None) -> tuple[Tensor | None, ...]:
        o, aug_weight, gate, *saved = ctx.saved_tensors
        q, k, v, g = saved[:4]
        dy = torch.zeros_like(gate) if dy is None else aligned(dy)
        keys, values = q.shape[2] * q.shape[3], gate.shape[2]
        side_by_side = q.new_empty(*q.shape[:2], 2 * (keys + values))
        dq, da, dv, d_gate = side_by_side.split([keys, keys, values, values], dim=-1)
        do, d_strength, d_weight = backward_apart(dy, o, q, k, v, aug_weight, gate, ctx.eps, dv, d_gate)
        dg = torch.empty_like(g)  # where a chunk is strong
        d_initial = backward(ctx.case, do, d_final, dq, da, dv, dg, (d_strength, aug_weight), *saved)
        heads = q.shape[2]
        dq, da, dv = (x.unflatten(-1, (heads, -1)) for x in (dq, da, dv))
        return dq, da, dv, d_weight, d_gate, d_initial, None, None, None
