"""The selective state space of Mamba: for every channel c and state n
h_t[c, n] = exp(dt_t[c] A[c, n]) h_{t-1}[c, n] + dt_t[c] B_t[n] x_t[c], y_t[c] = sum_n C_t[n] h_t[c, n].

Gu and Dao 2023 (arXiv 2312.00752), Algorithm 2, with the discretisation of its released models. The states of all
tokens would be as many times larger than the input as there are states a channel. They exist for one stretch of
tokens at a time, and again in the backward pass.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from ..context_parallel import SequenceShards, current_shards, refuse_state
from ..cumulative_decay import running_sum
from ..stretches import carried, exchange, packing, recomputed
from .linear_scan import local_scan

_STRETCH = 128


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
    """x, dt: [batch, length, groups, channels]; a: [groups, channels, states], at most 0; b, c: [batch, length, groups,
    states], shared by the channels of a group; all float32 or float64.

    initial_state: [batch, groups, channels, states], zero if None. cu_seqlens: [segments + 1] int with batch 1, every
    segment starts anew; states are then [segments, ...]. compute_dtype: as in `models.operators.scan.linear_scan.scan`.
    Returns y in x's shape and the state after the last token.

    Inside `models.operators.context_parallel.sequence_shards` as `models.operators.scan.linear_scan.scan`.
    """
    shards = current_shards()
    if shards is None:
        return _local(x, dt, a, b, c, initial_state, cu_seqlens, compute_dtype)
    if initial_state is not None:
        refuse_state()
    return _over_shards(shards, x, dt, a, b, c, cu_seqlens, compute_dtype)


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
    for start in range(0, x.shape[1], _STRETCH):
        end = min(start + _STRETCH, x.shape[1])
        bounds = None if cu_seqlens is None else cu_seqlens.clamp(start, end) - start
        stretch = partial(_stretch, bounds=bounds, compute_dtype=compute_dtype)
        tensors = (*(t[:, start:end] for t in (x, dt, b, c)), a, state)
        y, state = recomputed(stretch, *tensors) if x.shape[1] > _STRETCH else stretch(*tensors)
        outputs.append(y)
    return torch.cat(outputs, 1) if outputs else x, state


def _over_shards(
    shards: SequenceShards,
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    cu_seqlens: Tensor | None,
    compute_dtype: torch.dtype | None,
) -> tuple[Tensor, Tensor]:
    """The tokens of this process from a zero state, and what the state from the processes before adds to them."""
    packed = None if cu_seqlens is None else packing(cu_seqlens, x.shape[1], shards)
    inside = None if packed is None else packed.cu_seqlens
    y, final = _local(x, dt, a, b, c, None, inside, compute_dtype)
    elapsed = running_sum(dt, 1)
    end, decay = final, (elapsed[:, -1].unsqueeze(-1) * a).exp()
    if packed is not None:
        end, decay = final.index_select(0, packed.last), decay * packed.from_left[-1]
        c = c * packed.from_left[None, :, None, None]
    ends, decays = zip(*exchange(shards, end, decay), strict=True)
    state = carried(shards.index, ends, decays)
    outputs = []
    for start in range(0, x.shape[1], _STRETCH):
        stretch = slice(start, start + _STRETCH)
        outputs.append(recomputed(_reached, elapsed[:, stretch], a, c[:, stretch], state))
    y = y + torch.cat(outputs, 1)
    if packed is None:
        return y, final + decay * state
    aged = (dt * packed.from_left[None, :, None, None]).sum(1)
    return y, final.index_add(0, packed.first, (aged.unsqueeze(-1) * a).exp() * packed.from_left[0] * state)


def _reached(elapsed: Tensor, a: Tensor, c: Tensor, state: Tensor) -> Tensor:
    """sum_n C_t[n] exp(elapsed_t A[n]) h[n] for the state h from before, [batch, groups, channels, states]."""
    return ((elapsed.unsqueeze(-1) * a).exp() * state.unsqueeze(1) * c.unsqueeze(3)).sum(-1)


def _stretch(
    x: Tensor,
    dt: Tensor,
    b: Tensor,
    c: Tensor,
    a: Tensor,
    state: Tensor,
    bounds: Tensor | None,
    compute_dtype: torch.dtype | None,
) -> tuple[Tensor, Tensor]:
    """Segments that lie elsewhere are empty here, and an empty segment keeps its state."""
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
