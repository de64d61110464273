"""LION's operator on Triton kernels, with its gradients, padding and packed segments.

Projected decay logits and the feature map, with their gradients, belong to the same autograd node: for short sequences the
host time per node equals the time of the kernels.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ...recompute import recomputable
from .chunk import CHUNK
from .common import BIAS, BIASED_LOGITS, LOG_DECAY, LOGITS, NO_GATE, Kernel, LionCase
from .feature_map import PHI, both, both_gradients, normalised_silu
from .gate import project, project_backward
from .tile import TILE


def lion(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor | None = None,
    *,
    projection: tuple[Tensor, Tensor] | None = None,
    bias: Tensor | None = None,
    logits: bool = False,
    phi: str | None = None,
    scaled: bool = True,
    mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    kernel: str,
) -> Tensor:
    """Return (Q K^T * M) V as `models.operators.lion.bidirectional_attention.bidirectional_linear_attention`, in v's dtype.

    Matmuls have this dtype and accumulate in float32.
    q, k: [batch, length, heads, head_dim_k], v: [..., head_dim_v], both dims at most 256, float32, float16 or bfloat16.
    decay: [batch, length, heads] log decay, or with `logits` its decay logits. Instead of decay logits: `projection`
    (x, weight), x weight^T + bias with x [batch, length, size], weight [heads, size] of x's dtype, bias [heads] or None.
    bias alone: the decay logits of every token.
    phi: "silu" or "silu_paper" (`models.operators.lion.feature_map`), first applied to q and k, and rounded to v's dtype.
    kernel: "tile" or "chunk". Raises ValueError for sizes that overflow 32-bit addresses.
    """
    source = weight = None
    if projection is not None:
        source, weight = projection
        logits = True
    elif decay is not None:
        decay = decay.reshape(q.shape[:3])
    segments = None
    if mask is not None and source is not None and weight is not None:
        decay, source, weight = torch.nn.functional.linear(source, weight), None, None
    elif mask is not None and decay is None and bias is not None:
        decay, bias, logits = bias.float().expand(q.shape[:3]), None, True
    if cu_seqlens is not None:
        positions = torch.arange(q.shape[1], dtype=torch.int32, device=q.device)
        segments = torch.searchsorted(cu_seqlens[1:].to(positions), positions, right=True, out_int32=True)
    gate = next((x for x in (source, decay, bias) if x is not None), None)
    alone = gate is bias and gate is not None
    chosen, case = _case(
        kernel, q.get_device(), q.shape, v.shape[-1], v.dtype, None if gate is None else gate.dtype, logits, bias is not None,
        alone, scaled, segments is not None,
    )  # fmt: skip
    # Padded keys are set to 0 after the feature map.
    if phi is not None and not (mask is None and q.dtype == k.dtype == v.dtype):
        q, k, phi = normalised_silu(q, phi, v.dtype), normalised_silu(k, phi, v.dtype), None
    if mask is not None:
        padding = ~mask[:, :, None]
        q, k = q.masked_fill(padding[..., None], 0.0), k.masked_fill(padding[..., None], 0.0)
        if decay is not None:
            decay = decay.masked_fill(padding, torch.inf if logits else 0.0)
    return _Lion.apply(q, k, v, decay, source, weight, bias, segments, 0 if phi is None else PHI[phi], chosen, case)


@lru_cache(4096)
def _case(
    kernel: str,
    device: int,
    shape: torch.Size,
    dim_v: int,
    dtype: torch.dtype,
    gate_dtype: torch.dtype | None,
    logits: bool,
    biased: bool,
    alone: bool,
    scaled: bool,
    packed: bool,
) -> tuple[Kernel, LionCase]:
    batch, length, heads, dim_k = shape
    if length * heads * max(dim_k, dim_v) >= 2**31:
        raise ValueError(
            f"{length} tokens with {heads} heads of {max(dim_k, dim_v)} channels overflow 32-bit addresses: use "
            "form='chunked', or shorter sequences"
        )
    mode = LOG_DECAY if gate_dtype is not None else NO_GATE
    if alone:
        mode = BIAS
    elif gate_dtype is not None and logits:
        mode = BIASED_LOGITS if biased else LOGITS
    return _KERNELS[kernel], LionCase(
        device, batch, length, heads, dim_k, dim_v, dtype, gate_dtype, mode, scaled, packed
    )


class _Lion(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        decay: Tensor | None,
        source: Tensor | None,
        weight: Tensor | None,
        bias: Tensor | None,
        segments: Tensor | None,
        phi: int,
        kernel: Kernel,
        case: LionCase,
    ) -> Tensor:
        dtype = case.dtype
        q, k, v = _aligned(q, dtype), _aligned(k, dtype), _aligned(v, dtype)
        raw: tuple[Tensor, ...] = (q, k) if phi else ()
        if phi:
            q, k = both(raw[0], raw[1], phi)
            recomputable((q, k), both, *raw, phi)
        sums = None
        if weight is not None and source is not None:
            source, weight = _aligned(source, source.dtype), _aligned(weight, weight.dtype)
            decay, sums = project(case, kernel.chunk(case), source, weight, bias)
        elif decay is not None:
            decay = _aligned(decay, decay.dtype)
        y, saved = kernel.forward(case, q, k, v, decay, bias, sums, segments)
        ctx.save_for_backward(q, k, v, decay, source, weight, bias, segments, y, *raw, *saved)
        ctx.phi, ctx.kernel, ctx.case = phi, kernel, case
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, decay, source, weight, bias, segments, y, *saved = ctx.saved_tensors
        case = ctx.case
        raw, saved = saved[: 2 if ctx.phi else 0], saved[2 if ctx.phi else 0 :]
        dy = _aligned(dy, case.dtype)
        dq, dk, dv, d_decay = ctx.kernel.backward(case, dy, q, k, v, decay, bias, segments, y, saved)
        if ctx.phi:
            dq, dk = both_gradients(dq, dk, raw[0], raw[1], ctx.phi)
        d_source = d_weight = d_bias = None
        if source is not None:
            d_source, d_weight, d_bias = project_backward(case, d_decay, source, weight, bias)
            d_decay = None
        elif case.mode == BIAS:
            d_bias, d_decay = d_decay.sum(0).to(bias.dtype), None
        elif bias is not None:
            d_bias = d_decay.view(-1, case.heads).sum(0, dtype=torch.float32).to(bias.dtype)
        return dq, dk, dv, d_decay, d_source, d_weight, d_bias, None, None, None, None


def _aligned(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return x in `dtype`, contiguous and at a multiple of 16 bytes, for vector loads."""
    if x.dtype != dtype:
        return x.to(dtype).contiguous()
    if not x.is_contiguous():
        return x.contiguous()
    return x.clone() if x.data_ptr() % 16 else x


_KERNELS = {"tile": TILE, "chunk": CHUNK}
