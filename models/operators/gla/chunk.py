"""The chunked form of gated linear attention: linear in length, matmuls inside a chunk, one state from chunk to chunk.

With b the sum of log decays from the start of a chunk (inclusive) and B its total, a chunk that begins in state S is

    o_i = scale q_i ( exp(b_i) S + sum_{j <= i} exp(b_i - b_j) k_j v_j^T )
    S'  = exp(B) S + sum_j exp(B - b_j) k_j v_j^T

The matmul form (`chunk_matmul.py`) replaces exp(b_i - b_j) by exp(b_i - m) exp(m - b_j), with m = b in the middle of the chunk.
The exact form in this file is for other decays (-60 per step, or -inf). It adds the log decays of each pair, in smaller chunks,
and is slower.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ...backend import disable_compile, replaceable
from ...precision import without_autocast
from ..chunks import chunks_of_sequences, from_chunks, place_segments, to_chunks
from ..cumulative_decay import pairwise_decay, sum_after
from .chunk_matmul import matmul_form, spans_of
from .select_kernel import GLAArguments, initial, plan_chunks


@replaceable
@disable_compile
def chunk_form(x: GLAArguments) -> tuple[Tensor, Tensor]:
    """Compute the operator, whose caller checks the arguments."""
    q, k, v, log_decay = x[:4]
    length, state = q.shape[1], initial(x)
    if length == 0:
        return v, state
    bounds = None if x.cu_seqlens is None else [int(edge) for edge in x.cu_seqlens.tolist()]
    chunk, fits_matmul_form = plan_chunks(log_decay)
    with without_autocast(v):
        if fits_matmul_form:
            return matmul_form(q, k, v, log_decay, state, x.scale, spans_of(v, bounds), chunk)
        index, runs = place_segments(bounds, chunk, v.device)
        q, k, values, log_decay = (to_chunks(tensor.to(state.dtype), chunk, index) for tensor in x[:4])
        o, state = _pairwise(q * x.scale, k, values, log_decay, state, runs)
        return from_chunks(o, length, index).to(v.dtype), state


def _pairwise(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, state: Tensor, runs: list[tuple[int, int]] | None
) -> tuple[Tensor, Tensor]:
    b = log_decay.cumsum(3)
    updates = (k * sum_after(log_decay, 3).exp()).transpose(-1, -2) @ v
    states, final = _StateScan.apply(updates, b[:, :, :, -1:].exp().transpose(-1, -2), state, runs)
    weights = pairwise_decay(log_decay, 3)
    if log_decay.shape[-1] == 1:
        scores = (q @ k.transpose(-1, -2)) * weights.squeeze(-1)
    else:
        scores = (q.unsqueeze(4) * weights * k.unsqueeze(3)).sum(-1)
    return scores @ v + (q * b.exp()) @ states, final


class _StateScan(torch.autograd.Function):
    """Scan S_{n+1} = decay_n S_n + update_n over chunks: updates [batch, heads, chunks, dk, dv], decay [..., dk or 1, 1].

    Returns the state at the start of every chunk and the final state of every sequence (`runs`: chunks of each
    segment, batch 1).
    """

    @staticmethod
    def forward(
        ctx: Any, updates: Tensor, decay: Tensor, initial: Tensor, runs: list[tuple[int, int]] | None
    ) -> tuple[Tensor, Tensor]:
        states = torch.empty_like(updates)
        final = initial.clone()
        for sequence, chunks in chunks_of_sequences(updates.shape[2], runs):
            s = final[sequence]
            for n in chunks:
                states[:, :, n] = s
                s.mul_(decay[:, :, n]).add_(updates[:, :, n])
        ctx.save_for_backward(states, decay)
        ctx.runs = runs
        return states, final

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_states: Tensor, d_final: Tensor) -> tuple[Tensor | None, ...]:
        states, decay = ctx.saved_tensors
        d_updates = torch.empty_like(states)
        d_initial = d_final.clone()
        for sequence, chunks in chunks_of_sequences(states.shape[2], ctx.runs):
            d = d_initial[sequence]
            for n in reversed(chunks):
                d_updates[:, :, n] = d
                d.mul_(decay[:, :, n]).add_(d_states[:, :, n])
        d_decay = (d_updates * states).sum(-1, keepdim=True)
        if decay.shape[-2] == 1:
            d_decay = d_decay.sum(-2, keepdim=True)
        return d_updates, d_decay, d_initial, None
