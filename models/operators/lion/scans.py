"""Bidirectional linear attention with per-channel decays, as two scans of gated linear attention.

    o_i = scale sum_j sum_c q_ic k_jc exp(-|c_ic - c_jc|) v_j,      c_i = sum_{t <= i} log alpha_t

Token j < i reaches i with the factor alpha_{j+1} ... alpha_i, token j > i with alpha_{i+1} ... alpha_j. The diagonal counts
once. The forward scan is inclusive. The backward scan is exclusive, R_i = diag(alpha_{i+1}) (R_{i+1} + k_{i+1} v_{i+1}): the
causal operator on the flipped sequence, with keys alpha k of the next token.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...backend import disable_compile
from ..gla.gated_linear_attention import local_gated_linear_attention
from ..gla.select_kernel import GLAArguments, supports_triton


def two_scans(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, scale: float = 1.0, cu_seqlens: Tensor | None = None
) -> Tensor:
    """Return the sum of both directions, [batch, length, heads, head_dim_v], of these tokens alone.

    q, k, log_decay: [batch, length, heads, head_dim_k], the last two 0 at padding, log_decay in float32 (float64 for float64).
    v: [..., head_dim_v]. cu_seqlens: [segments + 1] with batch 1: no segment sees another. The outputs have v's dtype. The
    kernels of gated linear attention compute both directions in one autograd node. Other cases are two calls of the operator.
    """
    if not q.shape[1]:
        return v
    rounded = k.to(v.dtype)
    if supports_triton(q, rounded, v, log_decay, fits_matmul_form=True):
        return on_kernels(q, rounded, v, log_decay, scale, cu_seqlens)
    forward_arguments = GLAArguments(q, rounded, v, log_decay, scale, None, cu_seqlens)
    forward, _ = local_gated_linear_attention(forward_arguments, fits_matmul_form=True)
    following = (k * log_decay.exp()).to(v.dtype), v, log_decay
    key, value, decay = (F.pad(t[:, 1:], (0, 0, 0, 0, 0, 1)) for t in following)
    flipped = None
    if cu_seqlens is not None:
        # The last token of a segment has no next token. An empty segment ends where the previous one does.
        last = torch.zeros(q.shape[1] + 1, dtype=torch.bool, device=q.device).index_fill(0, cu_seqlens.long(), True)[1:]
        key, decay = (t.masked_fill(last[None, :, None, None], 0.0) for t in (key, decay))
        flipped = q.shape[1] - cu_seqlens.flip(0)
    backward_arguments = GLAArguments(q.flip(1), key.flip(1), value.flip(1), decay.flip(1), scale, None, flipped)
    backward, _ = local_gated_linear_attention(backward_arguments, fits_matmul_form=True)
    return forward + backward.flip(1)


@disable_compile
def on_kernels(*arguments: Any) -> Tensor:
    """Compute `models.kernels.gla.both_directions.both_directions`, imported on use."""
    from ...kernels.gla.both_directions import both_directions

    return both_directions(*arguments)
