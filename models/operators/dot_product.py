"""Softmax attention of given queries, keys and values: which implementation of PyTorch computes it."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..backend import SIXTEEN_BITS, replaceable


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
    if not is_causal or (window is not None and window >= keys):
        window = None
    if window is not None and takes_flash(q):
        row = torch.arange(len(q) + 1, dtype=torch.int32, device=q.device)
        q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (q, k, v))
        bounds = (row * queries, queries), (row * keys, keys)
        o = packed_flash_attention(q, k, v, *bounds, is_causal=True, window=window)
        return o.unflatten(0, (-1, queries)).transpose(1, 2)
    if is_causal and window is None and queries != keys and q.is_cuda:
        # Imported here, because it imports the compiler, which takes as long as importing torch.
        from torch.nn.attention.bias import causal_lower_right

        allowed, is_causal = causal_lower_right(queries, keys), False
    elif is_causal and (window is not None or queries != keys):
        key = torch.arange(keys, device=q.device)
        distance = torch.arange(keys - queries, keys, device=q.device)[:, None] - key
        allowed, is_causal = distance >= 0, False
        if window is not None:
            allowed &= distance < window
    if q.is_cuda and keys != queries:
        from torch.nn.attention import SDPBackend, sdpa_kernel

        # cuDNN plans every new number of keys, so that each decoded token would wait for a plan.
        with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]):
            return F.scaled_dot_product_attention(q, k, v, attn_mask=allowed, is_causal=is_causal)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=allowed, is_causal=is_causal)


def takes_flash(q: Tensor) -> bool:
    """Return whether FlashAttention computes windows and packed segments. Other inputs need masks or padded rows."""
    if not q.is_cuda or q.dtype not in SIXTEEN_BITS or q.shape[-1] % 8 or q.shape[-1] > 256:
        return False
    return torch.cuda.get_device_capability(q.device) >= (8, 0)


def packed_flash_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    queries: tuple[Tensor, int],
    keys: tuple[Tensor, int],
    *,
    is_causal: bool,
    window: int | None,
) -> Tensor:
    """Return attention within packed segments, for q, k, v [tokens, heads, head_dim] that `takes_flash` accepts.

    queries, keys: the bounds of the segments [segments + 1], and an upper bound of their lengths. is_causal, window: as in
    `dot_product`. The kernel reads only the keys of the window.
    """
    from torch.nn.attention.varlen import varlen_attn

    left = -1 if window is None or not is_causal else window - 1
    (cu_queries, most_queries), (cu_keys, most_keys) = queries, keys
    o: Any = varlen_attn(
        q,
        k,
        v,
        cu_queries.int(),
        cu_keys.int(),
        most_queries,
        most_keys,
        window_size=(left, 0 if is_causal else -1),
    )
    return o
