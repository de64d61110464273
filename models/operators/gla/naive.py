"""Reference forms of gated linear attention: token by token, and quadratic in length."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import torch
from torch import Tensor

from ...precision import accumulation_dtype
from ..cumulative_decay import pairwise_decay, sum_after


def recurrent_form(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    scale: float,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Compute `models.operators.gla.gated_linear_attention.gated_linear_attention` one token after the other."""
    return _each_sequence(_recurrent, q, k, v, log_decay, scale, initial_state, cu_seqlens)


def quadratic_form(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    scale: float,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Compute the same from the decayed attention matrix.

    Time is quadratic in length, and with one decay per channel memory too: [batch, length, length, heads, head_dim_k].
    """
    return _each_sequence(_quadratic, q, k, v, log_decay, scale, initial_state, cu_seqlens)


def _each_sequence(
    form: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    scale: float,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, Tensor]:
    accumulation, dtype = accumulation_dtype(v), v.dtype
    q, k, v, log_decay = q.to(accumulation) * scale, k.to(accumulation), v.to(accumulation), log_decay.to(accumulation)
    sequences = q.shape[0] if cu_seqlens is None else len(cu_seqlens) - 1
    if initial_state is None:
        initial_state = q.new_zeros(sequences, *q.shape[2:], v.shape[-1])
    if cu_seqlens is None:
        o, final_state = form(q, k, v, log_decay, initial_state.to(accumulation))
        return o.to(dtype), final_state
    outputs, finals = [], []
    for s, (start, end) in enumerate(pairwise(cu_seqlens.tolist())):
        q_s, k_s, v_s, g_s = (x[:, start:end] for x in (q, k, v, log_decay))
        o, final_state = form(q_s, k_s, v_s, g_s, initial_state[s : s + 1].to(accumulation))
        outputs.append(o)
        finals.append(final_state)
    return torch.cat(outputs, 1).to(dtype), torch.cat(finals)


def _recurrent(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    decay = log_decay.exp().unsqueeze(-1)
    outputs = []
    for t in range(q.shape[1]):
        state = decay[:, t] * state + k[:, t].unsqueeze(-1) * v[:, t].unsqueeze(-2)
        outputs.append((q[:, t].unsqueeze(-2) @ state).squeeze(-2))
    return (torch.stack(outputs, 1) if outputs else torch.zeros_like(v)), state


def _quadratic(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    from_start = log_decay.cumsum(1)
    to_end = sum_after(log_decay, 1)
    weights = pairwise_decay(log_decay, 1)
    if log_decay.shape[-1] == 1:
        scores = torch.einsum("bihd,bjhd->bijh", q, k) * weights.squeeze(-1)
    else:
        scores = torch.einsum("bihd,bijhd,bjhd->bijh", q, weights, k)
    o = torch.einsum("bijh,bjhe->bihe", scores, v) + torch.einsum("bihd,bhde->bihe", q * from_start.exp(), state)
    if q.shape[1]:
        state = from_start[:, -1].exp().unsqueeze(-1) * state
        state = state + torch.einsum("bjhd,bjhe->bhde", k * to_end.exp(), v)
    return o, state
