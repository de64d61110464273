"""Calls of flash-linear-attention's GLA kernels: CUDA, 16 bits. `select_kernel.py` says which; imported on use."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...backend import missing_fla_error, replaceable
from .select_kernel import Decay, Kernel, Selection, bounded_decay

_CHUNK = 64
# The fewest channels per head that the kernels' matmuls support.
_SMALLEST = 16


@replaceable
def fla_form(
    selection: Selection,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    scale: float,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Compute `models.operators.gla.gated_linear_attention.gated_linear_attention` by a selected FLA kernel.

    Raises ImportError with the command to run where the package is missing.
    """
    try:
        from fla.ops.gla import chunk_gla, fused_recurrent_gla
        from fla.ops.simple_gla import chunk_simple_gla, fused_recurrent_simple_gla
    except ImportError as error:
        raise missing_fla_error() from error
    if min(q.shape[-1], v.shape[-1]) < _SMALLEST:
        return _padded(selection, q, k, v, log_decay, scale, initial_state, cu_seqlens)
    common: dict[str, Any] = {
        "scale": scale,
        "initial_state": None if initial_state is None else initial_state.float(),
        "output_final_state": True,
        "cu_seqlens": None if cu_seqlens is None else cu_seqlens.long(),
    }
    recurrent = selection.kernel is Kernel.FLA_RECURRENT
    if selection.decay is Decay.FIXED:
        per_head = fused_recurrent_simple_gla if recurrent else chunk_simple_gla
        return per_head(q, k, v, g_gamma=bounded_decay(log_decay[0, 0, :, 0]).contiguous(), **common)
    bounded = bounded_decay(log_decay)
    if selection.decay is Decay.PER_CHANNEL:
        bounded = bounded.expand(q.shape)
    if selection.kernel is Kernel.FLA_CHUNK_FORWARD:
        return _forward(q, k, v, bounded, scale, common["initial_state"])
    if bounded.shape[-1] == 1:
        per_head = fused_recurrent_simple_gla if recurrent else chunk_simple_gla
        return per_head(q, k, v, bounded.squeeze(-1), **common)
    if recurrent:
        return fused_recurrent_gla(q, k, v, gk=bounded, **common)
    return chunk_gla(q, k, v, bounded, **common)


def _forward(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, scale: float, initial_state: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Run the forward passes of chunk_gla and chunk_simple_gla, with cumulative decays from PyTorch and a fixed chunk size.

    The package would compile and autotune its kernel for these sums per batch size, and chunk_gla's kernels per chunk size,
    which depends on the length. Each takes seconds, and an evaluation has hundreds of shapes.
    """
    from fla.ops.gla.chunk import chunk_gla_fwd
    from fla.ops.simple_gla.chunk import chunk_simple_gla_fwd

    length = q.shape[1]
    chunks = F.pad(log_decay, (0, 0, 0, 0, 0, -length % _CHUNK)).unflatten(1, (-1, _CHUNK))
    # The kernels use exp2.
    sums = (chunks.cumsum(2) / math.log(2)).flatten(1, 2)[:, :length].contiguous()
    q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    settings: dict[str, Any] = {
        "scale": scale,
        "initial_state": None if initial_state is None else initial_state.contiguous(),
        "output_final_state": True,
        "chunk_size": _CHUNK,
    }
    with torch.cuda.device_of(q):
        if log_decay.shape[-1] == 1:
            return chunk_simple_gla_fwd(q, k, v, g=sums.squeeze(-1), **settings)
        _, _, _, state, o = chunk_gla_fwd(q, k, v, log_decay, g_cumsum=sums, **settings)
    return o, state


def _padded(
    selection: Selection,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    scale: float,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Pad small heads with zero channels, which do not change the result."""
    dim_k, dim_v = q.shape[-1], v.shape[-1]
    more_k, more_v = max(0, _SMALLEST - dim_k), max(0, _SMALLEST - dim_v)
    q, k, v = F.pad(q, (0, more_k)), F.pad(k, (0, more_k)), F.pad(v, (0, more_v))
    if log_decay.shape[-1] != 1:
        log_decay = F.pad(log_decay, (0, more_k))
    if initial_state is not None:
        initial_state = F.pad(initial_state, (0, more_v, 0, more_k))
    o, state = fla_form(selection, q, k, v, log_decay, scale, initial_state, cu_seqlens)
    return o[..., :dim_v], state[..., :dim_k, :dim_v]
