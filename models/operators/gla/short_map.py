"""Causal linear attention of short sequences by its whole attention map, where a kernel for it stands ready."""

from __future__ import annotations

import torch
from torch import Tensor

from ...backend import is_supported
from ..context_parallel import context_parallel_group

# Tokens for which what is quadratic in them costs less than states between chunks do, and channels of a head that the
# kernels take.
_LONGEST, _LARGEST = 512, 128


def short_map(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    *,
    scale: float = 1.0,
    taylor: bool = False,
    scaled: bool,
    cu_seqlens: Tensor | None,
    initial_state: Tensor | None,
    return_state: bool,
) -> Tensor | None:
    """`models.kernels.quadratic_attention.causal_map` of whole sequences from no state on; None where it is not for
    that: on other
    devices, with a state, in packed or longer sequences, whose form is `models.operators.gla.gated_linear_attention`.

    Arguments as there; log_decay: [batch, length, heads] or with a last axis of 1.
    """
    with_state = (
        return_state or initial_state is not None or cu_seqlens is not None or context_parallel_group() is not None
    )
    if with_state or not 1 < q.shape[1] <= _LONGEST or max(q.shape[-1], v.shape[-1]) > _LARGEST:
        return None
    if q.dtype not in (torch.bfloat16, torch.float16) or not q.dtype == k.dtype == v.dtype or not is_supported(v):
        return None
    from ...kernels.quadratic_attention import causal_map

    log_decay = None if log_decay is None else log_decay.reshape(q.shape[:3])
    return causal_map(q, k, v, log_decay, scale=scale, taylor=taylor, scaled=scaled)
