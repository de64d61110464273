"""Bidirectional linear attention in plain PyTorch: the chunked form (parallel is one chunk) and the recurrent form.

Tensors are [batch, heads, length, dim] in the accumulation dtype. Padding is 0 in q and k. Nothing is normalized here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ...precision import accumulation_dtype, to_accumulation_dtype

# A log decay at or below this counts as -inf: e^-100 is below the smallest normal float32.
_CUT = {torch.float32: -100.0, torch.float64: -700.0}


@dataclass(frozen=True)
class Segments:
    """Hold the segment number of each token, ids [1, length], and the number of the last segment."""

    ids: Tensor
    last: int


def chunked(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    forward: Tensor,
    backward: Tensor,
    segments: Segments,
    size: int,
    per_value_channel: bool = False,
) -> Tensor:
    """Return the numerators [batch, heads, length, head_dim_v], by chunks of `size` tokens.

    q, k, v: [batch, heads, length, ...]; forward, backward: log decays [batch, heads, length, 1 or head_dim_k], or with
    `per_value_channel` [..., head_dim_v], one mask per channel of values.
    """
    length = q.shape[2]
    # Without tokens there is one chunk of padding.
    padding = -length % size if length else size
    # In double precision: small differences of long running sums, or of sums over a closed gate, would lose digits.
    q, k, v, forward, backward = (
        F.pad(x, (0, 0, 0, padding)).unflatten(2, (-1, size)) for x in (q, k, v, forward.double(), backward.double())
    )
    ids = F.pad(segments.ids, (0, padding), value=segments.last).unflatten(1, (-1, size))
    bf, bb = forward.cumsum(3), backward.cumsum(3)
    same = (ids[..., :, None] == ids[..., None, :])[:, None]
    inside = _inside_per_value_channel(q, k, v, bf, bb, same) if per_value_channel else _weights(q, k, bf, bb, same) @ v
    first, last = ids[..., 0], ids[..., -1]
    previous_ids = F.pad(last[:, :-1], (1, 0), value=0)
    next_ids = F.pad(first[:, 1:], (0, 1), value=segments.last)

    def equal(one: Tensor, other: Tensor) -> Tensor:
        """Return the equality of two [1, chunks, size or 1] as a factor for [batch, heads, chunks, size, channels]."""
        return (one == other)[:, None, :, :, None].to(q.dtype)

    def exp(x: Tensor) -> Tensor:
        return x.to(q.dtype).exp()

    def state(factor: Tensor) -> Tensor:
        return k.transpose(-1, -2) @ (v * factor) if per_value_channel else (k * factor).transpose(-1, -2) @ v

    def read(factor: Tensor, state: Tensor) -> Tensor:
        return (q @ state) * factor if per_value_channel else (q * factor) @ state

    to_right = state(exp(bf[..., -1:, :] - bf) * equal(ids, last[..., None]))
    to_left = state(exp(bb) * equal(ids, first[..., None]))
    carry_right = exp(bf[..., -1, :]) * (previous_ids == last)[:, None, :, None]
    carry_left = exp(bb[..., -1, :]) * (next_ids == first)[:, None, :, None]
    # Rows of a state are channels of keys, columns are channels of values. The factor is one per row or one per column.
    carry_right, carry_left = (x.unsqueeze(-2 if per_value_channel else -1) for x in (carry_right, carry_left))
    from_left = torch.stack(_states(to_right.unbind(2), carry_right.unbind(2)), 2)
    from_right = torch.stack(_states(to_left.unbind(2)[::-1], carry_left.unbind(2)[::-1])[::-1], 2)
    o = inside + read(exp(bf) * equal(ids, previous_ids[..., None]), from_left)
    o = o + read(exp(bb[..., -1:, :] - bb) * equal(ids, next_ids[..., None]), from_right)
    return o.flatten(2, 3)[:, :, :length]


def _weights(q: Tensor, k: Tensor, bf: Tensor, bb: Tensor, same: Tensor) -> Tensor:
    """Return q_i . k_j M_ij inside chunks, [..., size, size], 0 between segments, for q, k [..., size, head_dim_k]."""
    decay = _pairwise_decay(bf, bb, q.dtype)
    if decay.shape[-1] == 1:
        return (q @ k.transpose(-1, -2)) * decay.squeeze(-1) * same
    return torch.einsum("...ic,...jc,...ijc->...ij", q, k, decay) * same


def _inside_per_value_channel(q: Tensor, k: Tensor, v: Tensor, bf: Tensor, bb: Tensor, same: Tensor) -> Tensor:
    """Return the part of the numerators inside chunks with one mask per channel of values."""
    return torch.einsum("...ij,...ijc,...jc->...ic", (q @ k.mT) * same, _pairwise_decay(bf, bb, q.dtype), v)


def _pairwise_decay(bf: Tensor, bb: Tensor, dtype: torch.dtype) -> Tensor:
    """Return M_ij of each channel inside chunks, [..., size, size, channels], for running sums [..., size, channels]."""
    size = bf.shape[-2]
    below = torch.ones(size, size, dtype=torch.bool, device=bf.device).tril()[:, :, None]
    # Negating before the sums are expanded over pairs needs less memory, in the backward pass too.
    from_left = (bf[..., :, None, :] + -bf[..., None, :, :]).to(dtype)
    from_right = (bb[..., None, :, :] + -bb[..., :, None, :]).to(dtype)
    return torch.where(below, from_left, from_right).exp()


def recurrent(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    forward: Tensor,
    backward: Tensor,
    segments: Segments,
    per_value_channel: bool = False,
) -> Tensor:
    """Compute `chunked` token by token. A step has few operations, because their launches take most of the time on a GPU."""
    ids = segments.ids[0]
    previous_ids = F.pad(ids[:-1], (1, 0), value=0)
    next_ids = F.pad(ids[1:], (0, 1), value=segments.last)
    queries, keys, values = (x.flatten(0, 1).unbind(1) for x in (q.unsqueeze(3), k.unsqueeze(4), v.unsqueeze(3)))
    state = v.new_zeros(v.shape[0] * v.shape[1], k.shape[-1], v.shape[-1])
    o: list[Tensor] = []
    from_past = state
    for query, key, value, keep in zip(
        queries, keys, values, _decay_factors(forward, ids == previous_ids, per_value_channel), strict=True
    ):
        from_past = torch.addcmul(from_past * keep, key, value)
        o.append(torch.bmm(query, from_past))
    # The state from the right decays by the token after this one.
    from_future, passed = (
        state,
        _decay_factors(F.pad(backward[:, :, 1:], (0, 0, 0, 1)), ids == next_ids, per_value_channel),
    )
    for i in reversed(range(q.shape[2])):
        from_future = from_future * passed[i]
        o[i] = torch.baddbmm(o[i], queries[i], from_future)
        from_future = torch.addcmul(from_future, keys[i], values[i])
    return torch.cat(o, 1).unflatten(0, q.shape[:2])


def _decay_factors(decay: Tensor, same: Tensor, per_value_channel: bool) -> tuple[Tensor, ...]:
    """Return the factor of each token on a state; 0 where `same` [length] is False.

    The shape is [batch * heads, 1 or head_dim_k, 1], with `per_value_channel` [batch * heads, 1, head_dim_v].
    """
    return (decay.exp() * same[:, None]).flatten(0, 1).unsqueeze(-2 if per_value_channel else -1).unbind(1)


def _states(additions: Sequence[Tensor], factors: Sequence[Tensor]) -> list[Tensor]:
    """Return the state before each step of state <- factor * state + addition, from zero."""
    state, states = torch.zeros_like(additions[0]), []
    for addition, factor in zip(additions, factors, strict=True):
        states.append(state)
        state = factor * state + addition
    return states


def decays(
    q: Tensor,
    log_decay: Tensor | None,
    decay_logits: Tensor | None,
    mask: Tensor | None,
    cu_seqlens: Tensor | None,
    mask_convention: str,
) -> tuple[Tensor, Tensor, Segments]:
    """Return the log decays of both directions, [batch, heads, length, 1 or head_dim_k], and each token's segment."""
    length, dtype = q.shape[1], accumulation_dtype(q)
    if decay_logits is not None:
        log_decay = F.logsigmoid(to_accumulation_dtype(decay_logits))
    if log_decay is None:
        log_decay = torch.zeros(q.shape[:3], dtype=dtype, device=q.device)
    if log_decay.ndim == 3:
        log_decay = log_decay[..., None]
    decay = log_decay.to(dtype).clamp(min=_CUT[dtype])
    if mask is not None:
        decay = decay.masked_fill(~mask[:, :, None, None], 0.0)
    decay = decay.transpose(1, 2)
    forward = decay if mask_convention == "eq17" else F.pad(decay, (0, 0, 1, 0))[:, :, :length]
    ids, last = torch.zeros(1, length, dtype=torch.long, device=q.device), 0
    if cu_seqlens is not None:
        positions = torch.arange(length, device=q.device)
        ids = torch.searchsorted(cu_seqlens[1:].to(positions), positions, right=True)[None]
        last = len(cu_seqlens) - 2
    return forward, decay, Segments(ids, last)


def chunk_size(length: int, decay: Tensor) -> int:
    """Return the tokens per chunk for decays [..., 1] or [..., head_dim]."""
    # A per-channel decay needs a factor per pair and channel inside a chunk.
    return min(64 if decay.shape[-1] == 1 else 16, length)


def with_ones_column(v: Tensor, normalized: bool) -> Tensor:
    """Return v [batch, length, heads, head_dim_v] as `heads_first`; normalized: append a channel of ones for normalizers."""
    v = heads_first(v)
    return F.pad(v, (0, 1), value=1.0) if normalized else v


def heads_first(x: Tensor) -> Tensor:
    """Return x [batch, length, heads, dim] as [batch, heads, length, dim] in float32 (float64 for float64)."""
    return to_accumulation_dtype(x).transpose(1, 2)
