"""Softmax attention of given queries, keys and values: which implementation of PyTorch computes it."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..backend import SIXTEEN_BITS, available, replaceable


@replaceable
def dot_product(
    q: Tensor, k: Tensor, v: Tensor, allowed: Tensor | None, is_causal: bool, window: int | None = None
) -> Tensor:
    """Return softmax(q k^T / sqrt(head_dim)) v for q, k, v [batch, heads, length, head_dim].

    allowed: bool, broadcastable to [batch, heads, query length, key length]; None if is_causal or without a mask.
    is_causal: the last query and the last key are one token; there may be more keys than queries.
    window: with is_causal, a query reads its own key and window - 1 earlier ones; None for all earlier ones.
    """
    queries, keys = q.shape[2], k.shape[2]
    if is_causal and window is not None and window < keys:
        if _takes_flash(q):
            return _windowed_flash(q, k, v, window)
        key = torch.arange(keys, device=q.device)
        distance = torch.arange(keys - queries, keys, device=q.device)[:, None] - key
        allowed, is_causal = (distance >= 0) & (distance < window), False
    elif is_causal and queries != keys:
        # Imported here, because it imports the compiler, which takes as long as importing torch.
        from torch.nn.attention.bias import causal_lower_right

        allowed, is_causal = causal_lower_right(queries, keys), False
    return F.scaled_dot_product_attention(q, k, v, attn_mask=allowed, is_causal=is_causal)


def _takes_flash(q: Tensor) -> bool:
    """Return whether FlashAttention computes windows of these queries. Other inputs need a mask of every query and key."""
    return available(q) and q.dtype in SIXTEEN_BITS and q.shape[-1] % 8 == 0 and q.shape[-1] <= 256


def _windowed_flash(q: Tensor, k: Tensor, v: Tensor, window: int) -> Tensor:
    """Compute a causal window by FlashAttention, which reads only the keys of the window."""
    from torch.nn.attention.varlen import varlen_attn

    rows, queries, keys = len(q), q.shape[2], k.shape[2]
    q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (q, k, v))
    row = torch.arange(rows + 1, dtype=torch.int32, device=q.device)
    o: Any = varlen_attn(q, k, v, row * queries, row * keys, queries, keys, window_size=(window - 1, 0))
    return o.unflatten(0, (rows, queries)).transpose(1, 2)
