"""LION's operator on Triton kernels, with its gradients: the choice of a kernel, padding and packed segments."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..precision import ROW_SUM_EPS
from .lion_chunk import backward as chunk_backward
from .lion_chunk import forward as chunk_forward
from .lion_common import LOG_DECAY, LOGITS, NO_GATE
from .lion_tile import backward as tile_backward
from .lion_tile import forward as tile_forward

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
LARGEST_HEAD = 256
# The tile kernel was the faster one up to this many tokens and channels, with 16-bit numbers (H200; docs/results.md).
# Beyond, its time depends on the decays: at 512 tokens 0.7 of the chunk kernel's where 30 tokens are remembered, 1.8
# of it where all are.
# Up to 64 tokens Triton 3.6 compiled one of its launches to wrong numbers; the present one is not measured there yet, so
# the choice starts above.
TILE_LENGTHS, TILE_HEAD = range(65, 129), 64


def lion(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor | None = None,
    *,
    logits: bool = False,
    scaled: bool = True,
    mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    kernel: str = "auto",
) -> Tensor:
    """(Q K^T * M) V as `models.bidirectional.bidirectional` defines it, in v's dtype (products of that dtype, float32 sums).

    q, k: [batch, length, heads, head_dim_k], v: [..., head_dim_v], both dims at most 256.
    decay: [batch, length, heads] log decay, or with `logits` the gate whose logsigmoid it is.
    kernel: "tile", "chunk" or "auto". Raises ValueError for head sizes, dtypes and sizes that the kernels do not take.
    """
    if kernel not in _KERNELS and kernel != "auto":
        raise ValueError(f"kernel {kernel!r}: allowed are auto, {', '.join(_KERNELS)}")
    if max(q.shape[-1], v.shape[-1]) > LARGEST_HEAD:
        raise ValueError(f"head sizes {q.shape[-1]}, {v.shape[-1]}: at most {LARGEST_HEAD}; use form='chunked'")
    if v.dtype not in _DTYPES:
        raise ValueError(f"dtype {v.dtype}: allowed are float32, float16, bfloat16; use form='chunked'")
    length, heads = q.shape[1:3]
    if length * heads * max(q.shape[-1], v.shape[-1]) >= 2**31:
        raise ValueError(f"{length} tokens of {heads} heads overflow 32-bit addresses; use form='chunked' or fewer")
    if kernel == "auto":
        short = length in TILE_LENGTHS and max(q.shape[-1], v.shape[-1]) <= TILE_HEAD and v.dtype != torch.float32
        kernel = "tile" if short else "chunk"
    if decay is not None:
        decay = decay.reshape(q.shape[:3])
    if mask is not None:
        padding = ~mask[:, :, None]
        q, k = q.masked_fill(padding[..., None], 0.0), k.masked_fill(padding[..., None], 0.0)
        if decay is not None:
            decay = decay.masked_fill(padding, torch.inf if logits else 0.0)
    segments = None
    if cu_seqlens is not None:
        positions = torch.arange(length, dtype=torch.int32, device=q.device)
        segments = torch.searchsorted(cu_seqlens[1:].to(positions), positions, right=True, out_int32=True)
    mode = NO_GATE if decay is None else LOGITS if logits else LOG_DECAY
    return _Lion.apply(q.to(v.dtype), k.to(v.dtype), v, decay, segments, mode, scaled, kernel)


class _Lion(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        decay: Tensor | None,
        segments: Tensor | None,
        mode: int,
        scaled: bool,
        kernel: str,
    ) -> Tensor:
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
        decay = None if decay is None else decay.contiguous()
        y, saved = _KERNELS[kernel][0](q, k, v, decay, segments, mode, scaled, ROW_SUM_EPS)
        ctx.save_for_backward(q, k, v, decay, segments, y, *saved)
        ctx.arguments = mode, scaled, kernel
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, decay, segments, y, *saved = ctx.saved_tensors
        mode, scaled, kernel = ctx.arguments
        dq, dk, dv, d_decay = _KERNELS[kernel][1](
            dy.contiguous(), q, k, v, decay, segments, y, tuple(saved), mode, scaled, ROW_SUM_EPS
        )
        return dq, dk, dv, None if decay is None else d_decay.to(decay.dtype), None, None, None, None


_KERNELS: dict[str, tuple[Any, Any]] = {"tile": (tile_forward, tile_backward), "chunk": (chunk_forward, chunk_backward)}
