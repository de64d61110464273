"""flash-linear-attention's kernels for the recurrence: CUDA, 16 bits. Imported only when a tensor lies there."""

from __future__ import annotations

import torch
from torch import Tensor


def fla_recurrence(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    scale: float,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """As `models.recurrence.recurrence`. ImportError with the command to run where the package is missing."""
    try:
        from fla.ops.gla import chunk_gla, fused_recurrent_gla
        from fla.ops.simple_gla import chunk_simple_gla, fused_recurrent_simple_gla
    except ImportError as error:
        raise ImportError(
            "CUDA training in 16 bits needs flash-linear-attention and Triton: pip install flash-linear-attention "
            "(or train with precision.dtype=fp32, which uses plain PyTorch)"
        ) from error
    inputs = (q, k, v, log_decay) if initial_state is None else (q, k, v, log_decay, initial_state)
    needs_grad = torch.is_grad_enabled() and any(x.requires_grad for x in inputs)
    common = {
        "scale": scale,
        "initial_state": None if initial_state is None else initial_state.float(),
        "output_final_state": True,
        "cu_seqlens": None if cu_seqlens is None else cu_seqlens.long(),
    }
    # exp(-80) is zero beside 1 in float32; the kernels subtract cumulated decays, which -inf would turn into nan.
    log_decay = log_decay.float().clamp_min(-80.0)
    short = q.shape[1] <= 16 and not needs_grad
    if log_decay.shape[-1] == 1:
        if short:
            return fused_recurrent_simple_gla(q, k, v, log_decay.squeeze(-1), **common)
        if not needs_grad:
            return chunk_simple_gla(q, k, v, log_decay.squeeze(-1), **common)
        # The gated backward of chunk_simple_gla is refused on Hopper with Triton 3.4 to 3.7.0.
        log_decay = log_decay.expand(q.shape)
    if short:
        return fused_recurrent_gla(q, k, v, gk=log_decay, **common)
    return chunk_gla(q, k, v, log_decay, **common)
