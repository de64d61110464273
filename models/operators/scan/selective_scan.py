"""The selective state space of Mamba: for every channel c and state n
h_t[c, n] = exp(dt_t[c] A[c, n]) h_{t-1}[c, n] + dt_t[c] B_t[n] x_t[c], y_t[c] = sum_n C_t[n] h_t[c, n].

Gu and Dao 2023 (arXiv 2312.00752), Algorithm 2, with the discretisation of its released models. The states of all
tokens would be larger than the input by the number of states per channel. They exist for one chunk of tokens at a time,
and are recomputed in the backward pass.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from ...recompute import recomputed
from ..context_parallel import causal_over_ranks, context_parallel_group
from ..cumulative_decay import running_sum
from .linear_scan import local_scan

_CHUNK = 128


def selective_scan(
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    *,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    compute_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """Run the selective scan.

    x, dt: [batch, length, groups, channels]; a: [groups, channels, states], at most 0; b, c: [batch, length, groups,
    states], shared by the channels of a group; all float32 or float64.

    initial_state: [batch, groups, channels, states], zero if None. cu_seqlens: [segments + 1] int with batch 1; every
    segment has its own state; states are then [segments, ...]. compute_dtype: as in `models.operators.scan.linear_scan.scan`.
    Returns y in x's shape and the state after the last token.

    Under context parallelism as `models.operators.scan.linear_scan.scan`.
    """
    group = context_parallel_group()
    if group is None:
        return _local(x, dt, a, b, c, initial_state, cu_seqlens, compute_dtype)
    elapsed = running_sum(dt, 1)

    def local(cu_seqlens: Tensor | None) -> tuple[Tensor, Tensor]:
        return _local(x, dt, a, b, c, None, cu_seqlens, compute_dtype)

    def total_decay(tokens: Tensor | None) -> Tensor:
        of_tokens = elapsed[:, -1] if tokens is None else (dt * tokens[None, :, None, None]).sum(1)
        return (of_tokens.unsqueeze(-1) * a).exp()

    def correction(state: Tensor, tokens: Tensor | None) -> Tensor:
        seen = c if tokens is None else c * tokens[None, :, None, None]
        chunks = zip(elapsed.split(_CHUNK, 1), seen.split(_CHUNK, 1), strict=True)
        return torch.cat([recomputed(_from_state, elapsed_, a, c_, state) for elapsed_, c_ in chunks], 1)

    return causal_over_ranks(
        group, x.shape[1], cu_seqlens, initial_state, local=local, total_decay=total_decay, correction=correction
    )


def _local(
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    compute_dtype: torch.dtype | None,
) -> tuple[Tensor, Tensor]:
    sequences = x.shape[0] if cu_seqlens is None else len(cu_seqlens) - 1
    state = x.new_zeros(sequences, *a.shape) if initial_state is None else initial_state.to(x.dtype)
    outputs = []
    for start in range(0, x.shape[1], _CHUNK):
        end = min(start + _CHUNK, x.shape[1])
        bounds = None if cu_seqlens is None else cu_seqlens.clamp(start, end) - start
        chunk = partial(_of_chunk, bounds=bounds, compute_dtype=compute_dtype)
        tensors = (*(t[:, start:end] for t in (x, dt, b, c)), a, state)
        y, state = recomputed(chunk, *tensors) if x.shape[1] > _CHUNK else chunk(*tensors)
        outputs.append(y)
    return torch.cat(outputs, 1) if outputs else x, state


def _from_state(elapsed: Tensor, a: Tensor, c: Tensor, state: Tensor) -> Tensor:
    """Return sum_n C_t[n] exp(elapsed_t A[n]) h[n] for an incoming state h [batch, groups, channels, states]."""
    return ((elapsed.unsqueeze(-1) * a).exp() * state.unsqueeze(1) * c.unsqueeze(3)).sum(-1)


def _of_chunk(
    x: Tensor,
    dt: Tensor,
    b: Tensor,
    c: Tensor,
    a: Tensor,
    state: Tensor,
    bounds: Tensor | None,
    compute_dtype: torch.dtype | None,
) -> tuple[Tensor, Tensor]:
    """Return the outputs of a chunk and the states after it. Segments outside the chunk are empty and keep their state."""
    log_decay = dt.unsqueeze(-1) * a
    update = (dt * x).unsqueeze(-1) * b.unsqueeze(3)
    h, final = local_scan(
        update.flatten(2),
        log_decay.flatten(2),
        initial_state=state.flatten(1),
        cu_seqlens=bounds,
        compute_dtype=compute_dtype,
    )
    y = (h.view_as(update) * c.unsqueeze(3)).sum(-1)
    return y, final.view_as(state)
