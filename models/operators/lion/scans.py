"""Bidirectional linear attention with per-channel decays, as two scans of gated linear attention.

    o_i = scale sum_j sum_c q_ic k_jc exp(-|c_ic - c_jc|) v_j,      c_i = sum_{t <= i} log alpha_t

Token j < i reaches i with the factor alpha_{j+1} ... alpha_i, token j > i with alpha_{i+1} ... alpha_j. The diagonal counts
once. The forward scan is inclusive. The backward scan is exclusive, R_i = diag(alpha_{i+1}) (R_{i+1} + k_{i+1} v_{i+1}): the
causal operator on the flipped sequence, with keys alpha k of the next token.

With one mask per channel of values a scan is y_ic = sum_{j <= i} (q_i . k_j) exp(b_ic - b_jc) v_jc. This is the gradient of the
query of gated linear attention with keys v, values k and output gradient q. For the backward pass, the operator is called with
the gradient of y as the query: its output is the gradient of q, and its gradients are those of v, k and the decays.
Both scans are exclusive here, the forward one by queries of the next token, and the diagonal is computed in float32. A channel
with a strong decay sees little else: its gradients through the numerator and the normalizer nearly cancel in q and k. Rounded to
16 bits, they would leave their errors.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from ...backend import disable_compile, is_supported
from ...precision import without_autocast
from ..gla.gated_linear_attention import local_gated_linear_attention
from ..gla.select_kernel import GLAArguments, supports_triton
from ..varlen import check_packed


def two_scans(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    scale: float = 1.0,
    cu_seqlens: Tensor | None = None,
    per_value_channel: bool = False,
) -> Tensor:
    """Return the sum of both directions, [batch, length, heads, head_dim_v], of these tokens alone.

    q, k: [batch, length, heads, head_dim_k]; v: [..., head_dim_v]. log_decay: as k, or as v with per_value_channel, in float32
    (float64 for float64). k and log_decay are 0 at padding. cu_seqlens: [segments + 1] with batch 1: no segment sees another.
    `models.operators.gla.select_kernel` selects the kernel. The outputs have v's dtype; with per_value_channel they have that of
    log_decay.
    """
    if not q.shape[1]:
        return v
    flipped = last = None
    if cu_seqlens is not None:
        check_packed(q, cu_seqlens)
        # The last token of a segment has no next token. An empty segment ends where the previous one does.
        last = torch.zeros(q.shape[1] + 1, dtype=torch.bool, device=q.device).index_fill(0, cu_seqlens.long(), True)[1:]
        flipped = q.shape[1] - cu_seqlens.flip(0)
    if not per_value_channel:
        k, compute = k.to(v.dtype), scan_arguments
        if is_supported(q) and supports_triton(q, k, v, log_decay, fits_matmul_form=True):
            from ...kernels.gla.scan_arguments import scan_arguments as compute
        q, k, v, log_decay, *reversed_ones = compute(q, k, v, log_decay, last)
        o = _scan(q, k, v, log_decay, scale, cu_seqlens)
        q, k, v, log_decay = reversed_ones
        return o + _scan(q, k, v, log_decay, scale, flipped).flip(1)
    alpha = log_decay.exp()
    query = F.pad(q[:, 1:], (0, 0, 0, 0, 0, 1))
    if last is not None:
        query = query.masked_fill(last[None, :, None, None], 0.0)
    o = _scan_per_value_channel(query, k, v, log_decay, scale, cu_seqlens)
    o = F.pad(o[:, :-1], (0, 0, 0, 0, 1, 0)) * alpha
    o = o + (q.to(alpha.dtype) * k).sum(-1, keepdim=True) * scale * v
    k, v, log_decay = _flip_following(k, (v * alpha).to(v.dtype), log_decay, last)
    return o + _scan_per_value_channel(q.flip(1), k, v, log_decay, scale, flipped).flip(1)


def scan_arguments(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, last: Tensor | None) -> tuple[Tensor, ...]:
    """Return the arguments of both scans: q, k, v and log_decay, then the four of the backward scan, of the same shapes.

    last: [length] bool, True for the last token of each segment; None for unpacked sequences.
    """
    key = (k * log_decay.exp()).to(k.dtype)
    return q, k, v, log_decay, q.flip(1), *_flip_following(key, v, log_decay, last)


def _flip_following(k: Tensor, v: Tensor, log_decay: Tensor, last: Tensor | None) -> tuple[Tensor, ...]:
    """Return the flipped key, value and log decay of the token after each token, 0 after the last one of a segment."""
    following = [F.pad(x[:, 1:], (0, 0, 0, 0, 0, 1)) for x in (k, v, log_decay)]
    if last is not None:
        following = [x.masked_fill(last[None, :, None, None], 0.0) for x in following]
    return tuple(x.flip(1) for x in following)


def _scan(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, scale: float, cu_seqlens: Tensor | None) -> Tensor:
    return local_gated_linear_attention(
        GLAArguments(q, k, v, log_decay, scale, None, cu_seqlens), fits_matmul_form=True
    )[0]


@disable_compile
def _scan_per_value_channel(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, scale: float, cu_seqlens: Tensor | None
) -> Tensor:
    return _ScanPerValueChannel.apply(q, k, v, log_decay, scale, cu_seqlens)


class _ScanPerValueChannel(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, scale: float, cu_seqlens: Tensor | None
    ) -> Tensor:
        ctx.save_for_backward(q, k, v, log_decay, cu_seqlens)
        ctx.scale = scale
        # Activation checkpointing packs tensors by hooks. It would recompute the whole layer to unpack those of this inner graph.
        keep = torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x)
        with torch.inference_mode(False), torch.enable_grad(), without_autocast(v), keep:
            # Autograd refuses inference tensors, but not their copies.
            q, k, v, log_decay = (x.clone() if x.is_inference() else x.detach() for x in (q, k, v, log_decay))
            query = torch.zeros_like(v, requires_grad=True)
            return torch.autograd.grad(_scan(query, v, k, log_decay, scale, cu_seqlens), query, q)[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, log_decay, cu_seqlens = ctx.saved_tensors
        with torch.enable_grad(), without_autocast(dy):
            leaves = [x.detach().requires_grad_() for x in (k, v, log_decay)]
            dq = _scan(dy, leaves[1], leaves[0], leaves[2], ctx.scale, cu_seqlens)
            return (dq.detach(), *torch.autograd.grad(dq, leaves, q), None, None)
