"""Calls of flash-linear-attention's GLA kernels: CUDA, 16 bits. `select_kernel.py` says which; imported on use."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...backend import missing_fla_error, replaceable
from .select_kernel import Decay, GLAArguments, Kernel, Selection, bounded_decay

_CHUNK = 64
# The fewest channels per head that the kernels' matmuls support.
_SMALLEST = 16


@replaceable
def fla_form(selection: Selection, x: GLAArguments) -> tuple[Tensor, Tensor]:
    """Compute the operator by a selected FLA kernel.

    Raises ImportError with the command to run where the package is missing.
    """
    try:
        from fla.ops.gla import chunk_gla, fused_recurrent_gla
        from fla.ops.simple_gla import chunk_simple_gla, fused_recurrent_simple_gla
    except ImportError as error:
        raise missing_fla_error() from error
    q, k, v, log_decay = x[:4]
    if min(q.shape[-1], v.shape[-1]) < _SMALLEST:
        return _padded(selection, x)
    common: dict[str, Any] = {
        "scale": x.scale,
        "initial_state": None if x.initial_state is None else x.initial_state.float(),
        "output_final_state": True,
        "cu_seqlens": None if x.cu_seqlens is None else x.cu_seqlens.long(),
    }
    recurrent = selection.kernel is Kernel.FLA_RECURRENT
    per_head = fused_recurrent_simple_gla if recurrent else chunk_simple_gla
    if selection.decay is Decay.FIXED:
        return per_head(q, k, v, g_gamma=bounded_decay(log_decay[0, 0, :, 0]).contiguous(), **common)
    bounded = bounded_decay(log_decay)
    if selection.decay is Decay.PER_CHANNEL:
        bounded = bounded.expand(q.shape)
    if selection.kernel is Kernel.FLA_CHUNK_FORWARD:
        return _forward(x.with_decay(bounded))
    if bounded.shape[-1] == 1:
        return per_head(q, k, v, bounded.squeeze(-1), **common)
    if recurrent:
        return fused_recurrent_gla(q, k, v, gk=bounded, **common)
    return chunk_gla(q, k, v, bounded, **common)


def _forward(x: GLAArguments) -> tuple[Tensor, Tensor]:
    """Run the forward passes of chunk_gla and chunk_simple_gla, with cumulative decays from PyTorch and a fixed chunk size.

    The package compiles and autotunes its kernel for these sums per batch size. It does so with chunk_gla's kernels per chunk
    size, which depends on the length. Each takes seconds, and an evaluation has hundreds of shapes.
    """
    from fla.ops.gla.chunk import chunk_gla_fwd
    from fla.ops.simple_gla.chunk import chunk_simple_gla_fwd

    length, log_decay = x.q.shape[1], x.log_decay
    chunks = F.pad(log_decay, (0, 0, 0, 0, 0, -length % _CHUNK)).unflatten(1, (-1, _CHUNK))
    # The kernels use exp2.
    sums = (chunks.cumsum(2) / math.log(2)).flatten(1, 2)[:, :length].contiguous()
    q, k, v = x.q.contiguous(), x.k.contiguous(), x.v.contiguous()
    settings: dict[str, Any] = {
        "scale": x.scale,
        "initial_state": None if x.initial_state is None else x.initial_state.float().contiguous(),
        "output_final_state": True,
        "chunk_size": _CHUNK,
    }
    with torch.cuda.device_of(q):
        if log_decay.shape[-1] == 1:
            return chunk_simple_gla_fwd(q, k, v, g=sums.squeeze(-1), **settings)
        _, _, _, state, o = chunk_gla_fwd(q, k, v, log_decay, g_cumsum=sums, **settings)
    return o, state


def _padded(selection: Selection, x: GLAArguments) -> tuple[Tensor, Tensor]:
    """Pad small heads with zero channels, which do not change the result."""
    dim_k, dim_v = x.q.shape[-1], x.v.shape[-1]
    more_k, more_v = max(0, _SMALLEST - dim_k), max(0, _SMALLEST - dim_v)
    padded = GLAArguments(
        F.pad(x.q, (0, more_k)),
        F.pad(x.k, (0, more_k)),
        F.pad(x.v, (0, more_v)),
        x.log_decay if x.log_decay.shape[-1] == 1 else F.pad(x.log_decay, (0, more_k)),
        x.scale,
        None if x.initial_state is None else F.pad(x.initial_state, (0, more_v, 0, more_k)),
        x.cu_seqlens,
    )
    o, state = fla_form(selection, padded)
    return o[..., :dim_v], state[..., :dim_k, :dim_v]
