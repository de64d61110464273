"""Softmax attention of given queries, keys and values, by the fastest implementation of PyTorch, on one or several ranks."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..backend import SIXTEEN_BITS, replaceable
from .context_parallel import ContextParallelGroup, from_previous_rank

DotProduct = Callable[[Tensor, Tensor, Tensor, Tensor | None, bool, int | None], Tensor]


@replaceable
def dot_product(
    q: Tensor, k: Tensor, v: Tensor, allowed: Tensor | None, is_causal: bool, window: int | None = None
) -> Tensor:
    """Return softmax(q k^T / sqrt(head_dim)) v for q, k, v [batch, heads, length, head_dim].

    allowed: bool, broadcastable to [batch, heads, query length, key length]; None if is_causal or without a mask.
    is_causal: the last query and the last key are the same token; there may be more keys than queries.
    window: with is_causal, a query reads its own key and window - 1 earlier ones; None for all earlier ones.
    """
    queries, keys = q.shape[2], k.shape[2]
    if not is_causal or (window is not None and window >= keys):
        window = None
    if window is not None and supports_flash(q):
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

        # cuDNN makes a plan for every new number of keys, and each decoded token would wait for one.
        with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]):
            return F.scaled_dot_product_attention(q, k, v, attn_mask=allowed, is_causal=is_causal)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=allowed, is_causal=is_causal)


def supports_flash(q: Tensor) -> bool:
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
    """Return attention within packed segments, for q, k, v [tokens, heads, head_dim] that `supports_flash` accepts.

    queries, keys: cu_seqlens [segments + 1] of the segments, and an upper bound of their lengths. is_causal, window: as in
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


def fixed_length_attention(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> Tensor:
    """Return `dot_product` without a mask and a window, for lengths that stay the same from step to step.

    cuDNN is faster than FlashAttention 2 on Hopper. It makes one plan per shape, and its causal mask needs as many queries as
    keys. The last queries of a causal sequence therefore read two blocks of keys: all earlier ones, without a mask, and their
    own.
    """
    queries, keys = q.shape[2], k.shape[2]
    earlier = keys - queries if is_causal else keys
    blocks = [(start, stop, stop > earlier) for start, stop in ((0, earlier), (earlier, keys)) if start < stop]
    if all(prefers_cudnn(q, k[:, :, a:b], v[:, :, a:b], masked) for a, b, masked in blocks):
        o: Tensor = _KeyBlocks.apply(q, k, v, blocks)
        return o
    return dot_product(q, k, v, None, is_causal)


def prefers_cudnn(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> bool:
    """Return whether `scaled_dot_product_attention` would select cuDNN for these tensors, as on Hopper in 16 bits."""
    if not q.is_cuda or q.dtype not in SIXTEEN_BITS or torch.compiler.is_compiling():
        return False
    from torch.nn.attention import SDPBackend

    return bool(torch._fused_sdp_choice(q, k, v, None, 0.0, is_causal) == SDPBackend.CUDNN_ATTENTION.value)


class _KeyBlocks(torch.autograd.Function):
    """Compute attention to blocks of keys one by one, and merge the outputs by their logsumexp.

    The backward pass of a block takes the merged output and logsumexp, so its probabilities are those of the whole softmax. Ring
    attention (arXiv 2310.01889) merges blocks in this way. blocks: (first key, last key + 1, is_causal).
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, blocks: list[tuple[int, int, bool]]) -> Tensor:
        (o, lse), *others = (cudnn_forward(q, k[:, :, a:b], v[:, :, a:b], masked) for a, b, masked in blocks)
        for other, other_lse in others:
            # The logsumexp has a last dimension of 1 in some versions of PyTorch, and the backward pass needs its shape.
            weight = torch.sigmoid(other_lse - lse).view(*o.shape[:3], 1)
            o = o.to(lse.dtype).lerp(other.to(lse.dtype), weight).to(o.dtype)
            lse = torch.logaddexp(lse, other_lse)
        ctx.save_for_backward(q, k, v, o, lse)
        ctx.blocks = blocks
        return o

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        q, k, v, o, lse = ctx.saved_tensors
        if do.stride() != o.stride():
            # PyTorch looks up cuDNN's plans by the strides of q, k and v only, so do must always have the same strides.
            do = torch.empty_like(o).copy_(do)
        dq, dk, dv = torch.zeros_like(q), torch.empty_like(k), torch.empty_like(v)
        for a, b, masked in ctx.blocks:
            part, dk[:, :, a:b], dv[:, :, a:b] = cudnn_backward(do, q, k[:, :, a:b], v[:, :, a:b], o, lse, masked)
            dq += part
        return dq, dk, dv, None


def cudnn_forward(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> tuple[Tensor, Tensor]:
    """Return cuDNN's output and its logsumexp in float32, [batch, heads, queries] with or without a last dimension of 1."""
    o, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, is_causal, False)
    return o, lse


def cudnn_backward(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, is_causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return cuDNN's gradients of q, k and v. o, lse: output and logsumexp of all keys; k and v may be a block of them."""
    # Without dropout the random state is not read, but it must exist.
    random_state = torch.empty((), dtype=torch.int64, device=q.device)
    no_bias = no_cu_seqlens = None
    dq, dk, dv = torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
        do,
        q,
        k,
        v,
        o,
        lse,
        random_state,
        random_state,
        no_bias,
        no_cu_seqlens,
        no_cu_seqlens,
        q.shape[2],
        k.shape[2],
        0.0,
        is_causal,
    )
    return dq, dk, dv


def attention_over_ranks(
    group: ContextParallelGroup,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    cu_seqlens: Tensor | None,
    *,
    causal: bool,
    window: int | None,
    implementation: DotProduct,
) -> Tensor:
    """Return the attention of the local shard's queries to the keys of the whole sequence, in q's shape.

    A causal query reads all earlier keys, so contiguous shards would give the last rank most of the work. Each rank therefore
    computes two pieces of half a shard: one from the start of the sequence and its mirror image from the end. The outputs are
    then gathered. The all-gathers cost little beside attention, whose work grows with the square of the length.
    Llama 3 (arXiv 2407.21783, section 3.3.2) balances causal work and gathers keys and values in this way. A window that
    ends in the previous shard needs only the last window - 1 keys and values of that shard.

    q: [batch, length, heads, head_dim]; k, v: [batch, length, kv_heads, head_dim], local shards. mask: [batch, length * count]
    bool of the whole sequence, False for padding, or None. cu_seqlens: [segments + 1] of the whole sequence, or None; a query
    then reads its own segment only. window: with causal, a query reads its own key and window - 1 earlier real ones; None for
    all. implementation: `dot_product`, or a function with its arguments.
    """
    length, count, rank = q.shape[1], group.count, group.index
    bounds = [0, length * count] if cu_seqlens is None else cu_seqlens.tolist()
    # A window counts real tokens, so with padding it may reach further than the previous shard.
    reach = window - 1 if window is not None and causal and mask is None and window <= length + 1 else None
    first_query = first_key = 0  # index in the whole sequence of the first token of q, and of k and v
    if reach is not None:
        first_query, first_key = rank * length, rank * length - reach
        if reach:
            sent = torch.cat([k, v], -1)[:, length - reach :]
            received = from_previous_rank(group, sent.contiguous()).chunk(2, -1)
            k, v = (torch.cat([previous, x], 1) for previous, x in zip(received, (k, v), strict=True))
    else:
        q, k, v = (gather_sequence(group, x) for x in (q, k, v))
    # After the exchange, which sends the keys and values of the groups only.
    k, v = for_each_query_head(k, q), for_each_query_head(v, q)
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))

    # The number of real keys up to each token, from which windows are measured.
    counted = None if mask is None or window is None else mask.cumsum(1)
    fixed_lengths = mask is None and cu_seqlens is None and window is None and implementation is dot_product

    def attend(first: int, last: int) -> Tensor:
        parts = []
        for start, end in pairwise(bounds):
            begin, stop = max(start, first), min(end, last)
            if begin >= stop:
                continue
            if window is not None and mask is None:
                start = max(start, begin - window + 1)
            read = slice(start, stop if causal else end)
            allowed = None
            if mask is not None:
                query, key = (torch.arange(*span, device=q.device) for span in ((begin, stop), (read.start, read.stop)))
                seen = mask[:, None, read] & (key <= query[:, None]) if causal else mask[:, None, read]
                if counted is not None and window is not None:
                    seen = seen & (counted[:, begin:stop, None] - counted[:, None, read] < window)
                # A padded query attends to itself, as on one rank.
                allowed = (seen | (key == query[:, None]))[:, None]
            queries = q[:, :, begin - first_query : stop - first_query]
            keys, values = (x[:, :, read.start - first_key : read.stop - first_key] for x in (k, v))
            if fixed_lengths:
                parts.append(fixed_length_attention(queries, keys, values, causal))
            else:
                parts.append(implementation(queries, keys, values, allowed, causal and mask is None, window))
        return torch.cat(parts, 2)

    if reach is not None or not causal or length % 2:
        return attend(rank * length, (rank + 1) * length).transpose(1, 2)
    half, pieces = length // 2, 2 * count
    computed = [attend(piece * half, (piece + 1) * half) for piece in (rank, pieces - 1 - rank)]
    gathered = group.gather(torch.cat(computed, 2).transpose(1, 2).contiguous())

    def piece_of(number: int) -> Tensor:
        return gathered[number][:, :half] if number < count else gathered[pieces - 1 - number][:, half:]

    return torch.cat([piece_of(2 * rank), piece_of(2 * rank + 1)], 1)


def for_each_query_head(x: Tensor, q: Tensor) -> Tensor:
    """Return keys or values [batch, length, kv_heads, head_dim] once per query head of their group."""
    groups = q.shape[2] // x.shape[2]
    return x.repeat_interleave(groups, 2) if groups > 1 else x


def gather_sequence(group: ContextParallelGroup, x: Tensor) -> Tensor:
    """Return x [batch, length, ...] of all ranks as [batch, count * length, ...]."""
    return group.gather(x.contiguous()).movedim(0, 1).flatten(1, 2)
