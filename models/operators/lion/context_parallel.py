"""Context parallelism of the bidirectional operator: the contribution of the other ranks' tokens, before normalization.

With b the running sum of log decays inside the local shard and B its total, F and G the incoming states from the left and
from the right (`models.operators.lion.bidirectional_attention`),

    o_i += e^(b_i) q_i F + e^(B - b_i) q_i G
    F <- e^B F + sum_j e^(B - b_j) k_j v_j        G <- e^B G + sum_j e^(b_j) k_j v_j

over the ranks on the left and on the right. Time and memory are linear in length. Any form computes the local result.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...precision import to_accumulation_dtype
from ...recompute import recomputed
from ..context_parallel import ContextParallelGroup, ShardSegments, incoming_states
from ..cumulative_decay import decay_from_start, decay_to_end


def from_other_ranks(
    group: ContextParallelGroup,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    forward: Tensor,
    backward: Tensor,
    segments: ShardSegments | None,
    per_value_channel: bool = False,
) -> Tensor:
    """Return the contribution of all other ranks to the outputs, [batch, length, heads, head_dim_v].

    q, k: [batch, length, heads, head_dim_k], padding 0 in k; v: [batch, length, heads, head_dim_v].
    forward, backward: log decays of both directions, [batch, length, heads, 1 or head_dim_k], in float32 or float64, the
    dtype of the states; with per_value_channel [..., head_dim_v]. Matmuls run in bfloat16 if v is bfloat16.
    """
    axis = -2 if per_value_channel else -1
    totals = [x.sum(1, dtype=torch.float64).exp().to(x.dtype).unsqueeze(axis) for x in (forward, backward)]
    if segments is not None:
        totals = [totals[0] * segments.from_left[-1], totals[1] * segments.from_right[0]]
    to_right, to_left = recomputed(_end_states, k, v, forward, backward, segments, per_value_channel)
    left, right = incoming_states(group, (to_right, totals[0]), (to_left, totals[1]))
    dtype = v.dtype if v.dtype == torch.bfloat16 else forward.dtype
    return recomputed(_from_states, q, forward, backward, left, right, segments, dtype, per_value_channel)


def _end_states(
    k: Tensor, v: Tensor, forward: Tensor, backward: Tensor, segments: ShardSegments | None, per_value_channel: bool
) -> tuple[Tensor, Tensor]:
    """Return sum_j e^(B - b_j) k_j v_j for the right and sum_j e^(b_j) k_j v_j for the left: [batch, heads, dim_k, dim_v]."""
    to_right, to_left = decay_to_end(forward, 1), decay_from_start(backward, 1)
    if segments is not None:
        token = torch.arange(k.shape[1], device=k.device)
        segment = torch.searchsorted(segments.cu_seqlens[1:], token, right=True)
        to_right = to_right * (segment == segments.last)[:, None, None]
        to_left = to_left * (segment == segments.first)[:, None, None]
    # A sum over a long sequence may exceed float16.
    v = v if v.dtype == torch.bfloat16 else v.to(forward.dtype)
    decayed = v if per_value_channel else k
    decayed = torch.cat([(to_accumulation_dtype(decayed) * weight).to(v.dtype) for weight in (to_right, to_left)], -1)
    keys, values = (k.to(v.dtype), decayed) if per_value_channel else (decayed, v)
    states = torch.einsum("blhk,blhv->bhkv", keys, values).to(forward.dtype)
    right, left = states.chunk(2, 3 if per_value_channel else 2)
    return right, left


def _from_states(
    q: Tensor,
    forward: Tensor,
    backward: Tensor,
    left: Tensor,
    right: Tensor,
    segments: ShardSegments | None,
    dtype: torch.dtype,
    per_value_channel: bool,
) -> Tensor:
    from_left, from_right = decay_from_start(forward, 1), decay_to_end(backward, 1)
    if segments is not None:
        from_left = from_left * segments.from_left[:, None, None]
        from_right = from_right * segments.from_right[:, None, None]
    if per_value_channel:
        outputs = torch.einsum("blhk,bhkv->blhv", q.to(dtype), torch.cat([left, right], 3).to(dtype))
        of_left, of_right = to_accumulation_dtype(outputs).chunk(2, -1)
        return (of_left * from_left + of_right * from_right).to(dtype)
    queries = torch.cat([(to_accumulation_dtype(q) * weight).to(dtype) for weight in (from_left, from_right)], -1)
    return torch.einsum("blhk,bhkv->blhv", queries, torch.cat([left, right], 2).to(dtype))
