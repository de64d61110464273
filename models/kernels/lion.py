"""LION's operator on Triton kernels, with its gradients: the choice of a kernel, padding and packed segments.

A gate that is a projection of the layer's input is formed, and its gradients are, inside the same autograd node: for
short sequences the host's way through every node takes as long as the kernels.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from .lion_chunk import CHUNK
from .lion_common import BIASED_LOGITS, LOG_DECAY, LOGITS, NO_GATE, Case, Kernel
from .lion_gate import project, project_backward
from .lion_tile import TILE

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
LARGEST_HEAD = 256
# The tile kernel was the faster one, whatever the decays, up to these lengths for heads of up to so many channels, with
# 16-bit numbers (docs/results.md). Beyond, its time depends on how far the decays let a token see.
TILE_LENGTHS = {64: 192, 128: 256}


def lion(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor | None = None,
    *,
    projection: tuple[Tensor, Tensor] | None = None,
    bias: Tensor | None = None,
    logits: bool = False,
    scaled: bool = True,
    mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    kernel: str = "auto",
) -> Tensor:
    """(Q K^T * M) V as `models.bidirectional.bidirectional` defines it, in v's dtype (products of that dtype, float32 sums).

    q, k: [batch, length, heads, head_dim_k], v: [..., head_dim_v], both dims at most 256.
    decay: [batch, length, heads] log decay, or with `logits` the gate whose logsigmoid it is; or instead of that gate
    `projection` (x, weight) with gate = x weight^T + bias, x: [batch, length, size], weight: [heads, size] of x's
    dtype, bias: [heads] or None.
    kernel: "tile", "chunk" or "auto". Raises ValueError for head sizes, dtypes and sizes that the kernels do not take.
    """
    source = weight = None
    if projection is not None:
        source, weight = projection
        logits = True
    elif decay is not None:
        decay = decay.reshape(q.shape[:3])
    if mask is not None:
        padding = ~mask[:, :, None]
        q, k = q.masked_fill(padding[..., None], 0.0), k.masked_fill(padding[..., None], 0.0)
        if source is not None and weight is not None:
            decay, source, weight = torch.nn.functional.linear(source, weight), None, None
        if decay is not None:
            decay = decay.masked_fill(padding, torch.inf if logits else 0.0)
    segments = None
    if cu_seqlens is not None:
        positions = torch.arange(q.shape[1], dtype=torch.int32, device=q.device)
        segments = torch.searchsorted(cu_seqlens[1:].to(positions), positions, right=True, out_int32=True)
    gate_dtype = source.dtype if source is not None else None if decay is None else decay.dtype
    chosen, case = _case(
        kernel, q.get_device(), q.shape, v.shape[-1], v.dtype, gate_dtype, logits, bias is not None, scaled,
        segments is not None,
    )  # fmt: skip
    return _Lion.apply(q, k, v, decay, source, weight, bias, segments, chosen, case)


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
    scaled: bool,
    packed: bool,
) -> tuple[Kernel, Case]:
    batch, length, heads, dim_k = shape
    largest = max(dim_k, dim_v)
    if kernel not in _KERNELS and kernel != "auto":
        raise ValueError(f"kernel {kernel!r}: allowed are auto, {', '.join(_KERNELS)}")
    if largest > LARGEST_HEAD:
        raise ValueError(f"head sizes {dim_k}, {dim_v}: at most {LARGEST_HEAD}; use form='chunked'")
    if dtype not in _DTYPES:
        raise ValueError(f"dtype {dtype}: allowed are float32, float16, bfloat16; use form='chunked'")
    if length * heads * largest >= 2**31:
        raise ValueError(f"{length} tokens of {heads} heads overflow 32-bit addresses; use form='chunked' or fewer")
    if kernel == "auto":
        longest = next((tokens for channels, tokens in TILE_LENGTHS.items() if largest <= channels), 0)
        kernel = "tile" if length <= longest and dtype != torch.float32 else "chunk"
    mode = LOG_DECAY if gate_dtype is not None else NO_GATE
    if gate_dtype is not None and logits:
        mode = BIASED_LOGITS if biased else LOGITS
    return _KERNELS[kernel], Case(device, batch, length, heads, dim_k, dim_v, dtype, gate_dtype, mode, scaled, packed)


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
        kernel: Kernel,
        case: Case,
    ) -> Tensor:
        dtype = case.dtype
        q, k, v = _aligned(q, dtype), _aligned(k, dtype), _aligned(v, dtype)
        sums = None
        if weight is not None and source is not None:
            source, weight = _aligned(source, source.dtype), _aligned(weight, weight.dtype)
            decay, sums = project(case, kernel.chunk(case), source, weight, bias)
        elif decay is not None:
            decay = _aligned(decay, decay.dtype)
        y, saved = kernel.forward(case, q, k, v, decay, bias, sums, segments)
        ctx.save_for_backward(q, k, v, decay, source, weight, bias, segments, y, *saved)
        ctx.kernel, ctx.case = kernel, case
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, decay, source, weight, bias, segments, y, *saved = ctx.saved_tensors
        case = ctx.case
        dy = _aligned(dy, case.dtype)
        dq, dk, dv, d_decay = ctx.kernel.backward(case, dy, q, k, v, decay, bias, segments, y, saved)
        d_source = d_weight = d_bias = None
        if bias is not None:
            d_bias = d_decay.view(-1, case.heads).sum(0, dtype=torch.float32).to(bias.dtype)
        if source is not None:
            d_source, d_weight = project_backward(case, d_decay, source, weight)
            d_decay = None
        return dq, dk, dv, d_decay, d_source, d_weight, d_bias, None, None, None


def _aligned(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x contiguous, of `dtype`, at an address that vectors of 16 bytes may be read from."""
    if x.dtype != dtype:
        return x.to(dtype).contiguous()
    if not x.is_contiguous():
        return x.contiguous()
    return x.clone() if x.data_ptr() % 16 else x


_KERNELS = {"tile": TILE, "chunk": CHUNK}
