"""What the rest of a sequence adds to a stretch of it under the bidirectional operator, before rows are divided.

With b the running sum of log decays inside the stretch and B its total, F and G the states that come from the left and
from the right (`models.operators.lion.bidirectional_attention`),

    o_i += e^(b_i) q_i F + e^(B - b_i) q_i G
    F <- e^B F + sum_j e^(B - b_j) k_j v_j        G <- e^B G + sum_j e^(b_j) k_j v_j

over the stretches on the left and on the right. All sums are linear in length; the stretch itself is any form's.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...precision import wide
from ..context_parallel import SequenceShards
from ..cumulative_decay import decay_from_start, decay_to_end
from ..stretches import Packing, carried, exchange, recomputed


def from_both_sides(
    shards: SequenceShards,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    forward: Tensor,
    backward: Tensor,
    packed: Packing | None,
) -> Tensor:
    """q, k: [batch, length, heads, head_dim_k], padding 0 in k; v: [batch, length, heads, head_dim_v].

    forward, backward: log decays of both directions, [batch, length, heads, 1 or head_dim_k], in float32 or float64, the
    dtype of the states. Products are of bfloat16 where v is. Returns [batch, length, heads, head_dim_v].
    """
    totals = [x.sum(1, dtype=torch.float64).exp().to(x.dtype).unsqueeze(-1) for x in (forward, backward)]
    if packed is not None:
        totals = [totals[0] * packed.from_left[-1], totals[1] * packed.from_right[0]]
    to_right, to_left = recomputed(_end_states, k, v, forward, backward, packed)
    rights, lefts, decays, decays_back = zip(*exchange(shards, to_right, to_left, *totals), strict=True)
    left = carried(shards.index, rights, decays)
    right = carried(shards.count - 1 - shards.index, lefts[::-1], decays_back[::-1])
    dtype = v.dtype if v.dtype == torch.bfloat16 else forward.dtype
    return recomputed(_reached, q, forward, backward, left, right, packed, dtype)


def _end_states(
    k: Tensor, v: Tensor, forward: Tensor, backward: Tensor, packed: Packing | None
) -> tuple[Tensor, Tensor]:
    """To the right sum_j e^(B - b_j) k_j v_j, to the left sum_j e^(b_j) k_j v_j: [batch, heads, dim_k, dim_v]."""
    to_right, to_left = decay_to_end(forward, 1), decay_from_start(backward, 1)
    if packed is not None:
        token = torch.arange(k.shape[1], device=k.device)
        segment = torch.searchsorted(packed.cu_seqlens[1:], token, right=True)
        to_right = to_right * (segment == packed.last)[:, None, None]
        to_left = to_left * (segment == packed.first)[:, None, None]
    # A sum over a long sequence may lie outside of float16.
    v = v if v.dtype == torch.bfloat16 else v.to(forward.dtype)
    keys = torch.cat([(wide(k) * weight).to(v.dtype) for weight in (to_right, to_left)], -1)
    states = torch.einsum("blhk,blhv->bhkv", keys, v).to(forward.dtype)
    right, left = states.chunk(2, 2)
    return right, left


def _reached(
    q: Tensor,
    forward: Tensor,
    backward: Tensor,
    left: Tensor,
    right: Tensor,
    packed: Packing | None,
    dtype: torch.dtype,
) -> Tensor:
    from_left, from_right = decay_from_start(forward, 1), decay_to_end(backward, 1)
    if packed is not None:
        from_left = from_left * packed.from_left[:, None, None]
        from_right = from_right * packed.from_right[:, None, None]
    queries = torch.cat([(wide(q) * weight).to(dtype) for weight in (from_left, from_right)], -1)
    return torch.einsum("blhk,bhkv->blhv", queries, torch.cat([left, right], 2).to(dtype))
