"""flash-linear-attention's kernels for the recurrence: CUDA, 16 bits. Imported only when a tensor lies there."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
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
    """As `models.operators.gla.gated_linear_attention.recurrence`. ImportError with the command to run where the
    package is missing."""
    try:
        from fla.ops.gla import chunk_gla, fused_recurrent_gla
        from fla.ops.simple_gla import chunk_simple_gla, fused_recurrent_simple_gla
    except ImportError as error:
        raise missing_package() from error
    if min(q.shape[-1], v.shape[-1]) < _SMALLEST:
        return _widened(q, k, v, log_decay, scale, initial_state, cu_seqlens)
    needs_grad = _needs_grad(q, k, v, log_decay, initial_state)
    common: dict[str, Any] = {
        "scale": scale,
        "initial_state": None if initial_state is None else initial_state.float(),
        "output_final_state": True,
        "cu_seqlens": None if cu_seqlens is None else cu_seqlens.long(),
    }
    short = q.shape[1] <= 16 and not needs_grad
    refused = gradient_is_refused(q, k, v, log_decay, initial_state)
    if log_decay.shape[-1] == 1 and _fixed(log_decay):
        scalar = fused_recurrent_simple_gla if short else chunk_simple_gla
        return scalar(q, k, v, g_gamma=log_decay[0, 0, :, 0].float().clamp_min(-80.0).contiguous(), **common)
    log_decay = a_channel(log_decay, q) if refused else _bounded(log_decay)
    if not (short or needs_grad) and cu_seqlens is None:
        return _forward(q, k, v, log_decay, scale, common["initial_state"])
    if log_decay.shape[-1] == 1:
        if short:
            return fused_recurrent_simple_gla(q, k, v, log_decay.squeeze(-1), **common)
        return chunk_simple_gla(q, k, v, log_decay.squeeze(-1), **common)
    if short:
        return fused_recurrent_gla(q, k, v, gk=log_decay, **common)
    return chunk_gla(q, k, v, log_decay, **common)


def gradient_is_refused(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, initial_state: Tensor | None) -> bool:
    """Whether the package has no gradient for these inputs' decay of one number a head, and takes it for one a channel,
    which is slower. ImportError as `fla_recurrence`."""
    if log_decay.shape[-1] != 1 or _fixed(log_decay) or not _needs_grad(q, k, v, log_decay, initial_state):
        return False
    return _scalar_gradient_is_refused()


def a_channel(log_decay: Tensor, q: Tensor) -> Tensor:
    """A decay of one number a head as one a channel of q, for kernels that have no other."""
    return _bounded(log_decay).expand(q.shape)


def _bounded(log_decay: Tensor) -> Tensor:
    # exp(-80) is zero beside 1 in float32; the kernels subtract cumulated decays, which -inf would turn into nan.
    return log_decay.float().clamp_min(-80.0)


def _needs_grad(*inputs: Tensor | None) -> bool:
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in inputs)


def _forward(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, scale: float, initial_state: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The forward passes of chunk_gla and chunk_simple_gla behind sums of the decays that are formed here.

    The package's own kernel for these sums is compiled and timed anew for every batch size, and chunk_gla's others for
    every size of chunk, which it takes from the length: seconds each, while an evaluation brings hundreds of shapes.
    """
    from fla.ops.gla.chunk import chunk_gla_fwd
    from fla.ops.simple_gla.chunk import chunk_simple_gla_fwd

    length = q.shape[1]
    chunks = F.pad(log_decay, (0, 0, 0, 0, 0, -length % _CHUNK)).unflatten(1, (-1, _CHUNK))
    # The kernels count in powers of 2.
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


_CHUNK = 64
# Channels of a head that the kernels' matrix products need at least.
_SMALLEST = 16


def _widened(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    scale: float,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Heads of few channels, with channels of zeros beside them: keys and values of zeros add nothing."""
    dim_k, dim_v = q.shape[-1], v.shape[-1]
    more_k, more_v = max(0, _SMALLEST - dim_k), max(0, _SMALLEST - dim_v)
    q, k, v = F.pad(q, (0, more_k)), F.pad(k, (0, more_k)), F.pad(v, (0, more_v))
    if log_decay.shape[-1] != 1:
        log_decay = F.pad(log_decay, (0, more_k))
    if initial_state is not None:
        initial_state = F.pad(initial_state, (0, more_v, 0, more_k))
    o, state = fla_recurrence(q, k, v, log_decay, scale, initial_state, cu_seqlens)
    return o[..., :dim_v], state[..., :dim_k, :dim_v]


def missing_package() -> ImportError:
    """The error of a kernel that is asked for without flash-linear-attention: what to install, or to set instead."""
    return ImportError(
        "CUDA training in 16 bits needs flash-linear-attention and Triton: pip install flash-linear-attention "
        "(or train with precision.dtype=fp32, which uses plain PyTorch)"
    )


def _fixed(log_decay: Tensor) -> bool:
    """Whether one number a head, without a gradient, was expanded over batch and length: known without reading it."""
    steps = zip(log_decay.shape[:2], log_decay.stride()[:2], strict=True)
    return not log_decay.requires_grad and all(size == 1 or (size and stride == 0) for size, stride in steps)


def _scalar_gradient_is_refused() -> bool:
    """Triton 3.4 to 3.7.0 compiles the gradient of chunk_simple_gla's decay wrongly on Hopper; the kernel says no."""
    try:
        from fla.utils import IS_NVIDIA_HOPPER, TRITON_ABOVE_3_4_0, TRITON_ABOVE_3_7_1
    except ImportError as error:
        raise missing_package() from error
    return bool(IS_NVIDIA_HOPPER and TRITON_ABOVE_3_4_0 and not TRITON_ABOVE_3_7_1)
