"""LION's operator on Triton kernels, with its gradients, padding and packed segments.

Projected decay logits and the feature map, with their gradients, belong to the same autograd node: for short sequences the
host time per node equals the time of the kernels.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ...recompute import recomputable
from ..launch import aligned, check_addresses
from .chunk import CHUNK
from .common import BIAS, BIASED_LOGITS, LOG_DECAY, LOGITS, NO_DECAY, Kernel, LionCase, LionInputs
from .decay_logits import LARGEST, project, project_backward
from .feature_map import PHI, feature_map_gradients, feature_maps, normalized_silu
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
    normalized: bool = True,
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
    if source is not None and weight is not None and (mask is not None or len(weight) > LARGEST):
        decay, source, weight = torch.nn.functional.linear(source, weight), None, None
    elif mask is not None and decay is None and bias is not None:
        decay, bias, logits = bias.float().expand(q.shape[:3]), None, True
    if cu_seqlens is not None:
        positions = torch.arange(q.shape[1], dtype=torch.int32, device=q.device)
        segments = torch.searchsorted(cu_seqlens[1:].to(positions), positions, right=True, out_int32=True)
    alone = source is None and decay is None and bias is not None
    origin = next((x for x in (source, decay, bias) if x is not None), None)
    selected, case = _case(
        kernel, q.get_device(), q.shape, v.shape[-1], v.dtype, None if origin is None else origin.dtype, logits,
        None if bias is None else bias.dtype, alone, normalized, segments is not None,
    )  # fmt: skip
    # Padded keys are set to 0 after the feature map.
    if phi is not None and not (mask is None and q.dtype == k.dtype == v.dtype):
        q, k, phi = normalized_silu(q, phi, v.dtype), normalized_silu(k, phi, v.dtype), None
    if mask is not None:
        padding = ~mask[:, :, None]
        q, k = q.masked_fill(padding[..., None], 0.0), k.masked_fill(padding[..., None], 0.0)
        if decay is not None:
            decay = decay.masked_fill(padding, torch.inf if logits else 0.0)
    inputs = q, k, v, decay, bias, segments
    return _Lion.apply(*inputs, source, weight, 0 if phi is None else PHI[phi], selected, case)


@lru_cache(4096)
def _case(
    kernel: str,
    device: int,
    shape: torch.Size,
    dim_v: int,
    dtype: torch.dtype,
    decay_dtype: torch.dtype | None,
    logits: bool,
    bias_dtype: torch.dtype | None,
    alone: bool,
    normalized: bool,
    packed: bool,
) -> tuple[Kernel, LionCase]:
    batch, length, heads, dim_k = shape
    check_addresses(length, heads * max(dim_k, dim_v))
    mode = LOG_DECAY if decay_dtype is not None else NO_DECAY
    if alone:
        mode = BIAS
    elif decay_dtype is not None and logits:
        mode = LOGITS if bias_dtype is None else BIASED_LOGITS
    return _KERNELS[kernel], LionCase(
        device, batch, length, heads, dim_k, dim_v, dtype, decay_dtype, mode, normalized, packed, bias_dtype
    )


class _Lion(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Tensor:
        """Compute (*LionInputs, x and weight of the projection or None, code of phi, kernel, case)."""
        q, k, v, decay, bias, segments, source, weight, phi, kernel, case = arguments
        q, k, v = (aligned(x.to(case.dtype)) for x in (q, k, v))
        bias = None if bias is None else bias.contiguous()
        raw: tuple[Tensor, ...] = (q, k) if phi else ()
        if phi:
            q, k = feature_maps(raw[0], raw[1], phi)
            recomputable((q, k), feature_maps, *raw, phi)
        sums = None
        if source is not None:
            source, weight = aligned(source), aligned(weight)
            decay, sums = project(case, kernel.chunk(case), source, weight, bias)
        elif decay is not None:
            decay = aligned(decay)
        inputs = LionInputs(q, k, v, decay, bias, segments)
        y, saved = kernel.forward(case, inputs, sums)
        ctx.save_for_backward(*inputs, source, weight, y, *raw, *saved)
        ctx.phi, ctx.kernel, ctx.case = phi, kernel, case
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        saved = list(ctx.saved_tensors)
        inputs, (source, weight, y), saved = LionInputs(*saved[:6]), saved[6:9], saved[9:]
        raw, saved = saved[: 2 if ctx.phi else 0], saved[2 if ctx.phi else 0 :]
        case: LionCase = ctx.case
        bias: Any = inputs.bias
        dq, dk, dv, d_decay = ctx.kernel.backward(case, aligned(dy.to(case.dtype)), inputs, y, saved)
        if ctx.phi:
            dq, dk = feature_map_gradients(dq, dk, raw[0], raw[1], ctx.phi)
        d_source = d_weight = d_bias = None
        if source is not None:
            d_source, d_weight, d_bias = project_backward(case, d_decay, source, weight, bias)
            d_decay = None
        elif case.mode == BIAS:
            d_bias, d_decay = d_decay.sum(0).to(bias.dtype), None
        elif bias is not None:
            d_bias = d_decay.view(-1, case.heads).sum(0, dtype=torch.float32).to(bias.dtype)
        return dq, dk, dv, d_decay, d_bias, None, d_source, d_weight, None, None, None


_KERNELS = {"tile": TILE, "chunk": CHUNK}
