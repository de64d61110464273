"""Reference forms of gated linear attention: token by token, and quadratic in length."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import torch
from torch import Tensor

from ...precision import without_autocast
from ..cumulative_decay import pairwise_decay, sum_after
from .select_kernel import GLAArguments, initial


def recurrent_form(x: GLAArguments) -> tuple[Tensor, Tensor]:
    """Compute the operator one token after the other."""
    return _each_sequence(_recurrent, x)


def quadratic_form(x: GLAArguments) -> tuple[Tensor, Tensor]:
    """Compute the operator from the decayed attention matrix.

    Time is quadratic in length, and with one decay per channel memory too: [batch, length, length, heads, head_dim_k].
    """
    return _each_sequence(_quadratic, x)


def _each_sequence(form: Callable[..., tuple[Tensor, Tensor]], x: GLAArguments) -> tuple[Tensor, Tensor]:
    """Run form(q, k, v, log_decay, state) in the accumulation dtype for the batch, or for every packed segment."""
    state = initial(x)
    q, k, v, log_decay = (tensor.to(state.dtype) for tensor in x[:4])
    q = q * x.scale
    with without_autocast(q):
        if x.cu_seqlens is None:
            o, final_state = form(q, k, v, log_decay, state)
            return o.to(x.v.dtype), final_state
        results = [
            form(*(tensor[:, start:end] for tensor in (q, k, v, log_decay)), state[s : s + 1])
            for s, (start, end) in enumerate(pairwise(x.cu_seqlens.tolist()))
        ]
    outputs, finals = zip(*results, strict=True)
    return torch.cat(outputs, 1).to(x.v.dtype), torch.cat(finals)


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
