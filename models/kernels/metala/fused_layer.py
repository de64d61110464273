"""MetaLA's decay and key from their projection, and the layer's core: decay, recurrence and epilogue in one autograd node.

    g = logsigmoid(a) / 16      k = 1 - exp(g)      da = (dg - dk exp(g)) sigmoid(-a) / 16

a has 16 bits, g float32. PyTorch's own kernels would read and write the float32 values in between six times.
The recurrence and the self-augmentation both read q, k and v, and k and g are functions of a. The kernel of the
recurrence's gradients (`kernels/gla/chunk_output.py`) adds the gradients that meet, and forms that of a. The gradients of
q, a, v and the output gate lie side by side, so that one matmul can take them
(`megatron_lite/parallel/fused_projections.py`).
Reference: `models.mixers.metala`, one step after the other.
"""

# Kernels take pointers and scalars that have no Python type.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ...recompute import recomputable
from ..gla.common import Case
from ..gla.gla import backward, case_of, forward
from ..launch import aligned, over_elements
from .epilogue import backward_apart, forward_apart

try:
    import triton
    import triton.language as tl
except ImportError as error:
    raise ImportError("MetaLA's kernels need Triton: pip install triton") from error


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


def decay_and_key(a: Tensor) -> tuple[Tensor, Tensor]:
    """log decay in float32 and key in a's dtype, both of a's shape."""
    return _DecayAndKey.apply(a)


class _DecayAndKey(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a: Tensor) -> tuple[Tensor, Tensor]:
        a = aligned(a)
        log_decay, key = torch.empty_like(a, dtype=torch.float32), torch.empty_like(a)
        if a.numel():
            _launches(a.device, a.dtype, a.numel())[0](a, log_decay, key)
        ctx.save_for_backward(a)
        return log_decay, key

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_log_decay: Tensor, d_key: Tensor) -> Tensor:
        (a,) = ctx.saved_tensors
        da = torch.empty_like(a)
        if a.numel():
            _launches(a.device, a.dtype, a.numel())[1](aligned(d_log_decay), aligned(d_key), a, da)
        return da


@triton.jit
def _log_decay(a):
    z = tl.exp2(tl.abs(a) * -1.4426950408889634)
    # log(1 + z) as 2 artanh(z / (2 + z)), to full relative precision: z is at most 1, the series' next term under 2e-8.
    x = z / (2.0 + z)
    y = x * x
    series = 1.0 + y * (1.0 / 3 + y * (0.2 + y * (1.0 / 7 + y * (1.0 / 9 + y * (1.0 / 11 + y * (1.0 / 13))))))
    return (tl.minimum(a, 0.0) - 2.0 * x * series) * 0.0625


@triton.jit
def _decay_and_key_forward(a, log_decay, key, N, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    g = _log_decay(tl.load(a + i, mask=i < N, other=0.0).to(tl.float32))
    tl.store(log_decay + i, g, mask=i < N)
    # 1 - exp(g) loses its digits where g is small; the series ends where the next term is under 1e-8 of the sum.
    series = -g * (1.0 + g * (0.5 + g * (1.0 / 6 + g * (1.0 / 24 + g * (1.0 / 120 + g * (1.0 / 720))))))
    k = tl.where(g > -0.125, series, 1.0 - tl.exp2(g * 1.4426950408889634))
    tl.store(key + i, k.to(key.dtype.element_ty), mask=i < N)


@triton.jit
def _decay_and_key_backward(d_log_decay, d_key, a, da, N, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(a + i, mask=i < N, other=0.0).to(tl.float32)
    dg = tl.load(d_log_decay + i, mask=i < N, other=0.0)
    dk = tl.load(d_key + i, mask=i < N, other=0.0).to(tl.float32)
    d = (dg - dk * tl.exp(_log_decay(x))) * tl.sigmoid(-x) * 0.0625
    tl.store(da + i, d.to(da.dtype.element_ty), mask=i < N)


_launches = over_elements(_decay_and_key_forward, _decay_and_key_backward, block=1024)
