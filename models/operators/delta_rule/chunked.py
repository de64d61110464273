"""The chunked form of the delta rule (WY form): linear in length, matmuls inside a chunk, one state from chunk to chunk.

Notation of `select_kernel.Operands`, for a chunk that begins in state S. b_i is the sum of log decays from the start of the
chunk (inclusive), B its total, c_i = b_i (for `read_before_decay` c_i = b_{i-1}):

    <x, y>_ij = sum_d x_id y_jd exp(b_id - b_jd);
    A_ij = sum_d read_id removal_jd exp(c_id - b_jd) for j < i;
    (I + A) [W, U] = [read exp(c), written];                      N = U - W S;
    o = (q exp(b)) S + tril(<q, k>) N;                            S' = exp(B) S + (k exp(B - b))^T N.

With a removal direction of its own, N = -(read^T R) instead: U solves (I + A) U = -<read, k> written, `removal` takes the
place of k, and k adds tril(<q, k>) written to o and (k exp(B - b))^T written to S'.
Yang et al. 2024 (arXiv 2406.06484), section 3; for decays 2412.06464, section 3.3, and 2510.26692.

The matmul form replaces exp(b_i - b_j) by exp(b_i - m) exp(m - b_j), m = b in the middle of the chunk. Decays that do not
fit it (`models.operators.gla.select_kernel.plan_chunks`) use sums of log decays over each pair of a shorter chunk.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from ...backend import disable_compile
from ...precision import without_autocast
from ...recompute import recomputed
from ..chunks import chunks_of_sequences, from_chunks, place_segments, to_chunks
from ..context_parallel import ShardMaps
from ..cumulative_decay import pairwise_decay, sum_after
from ..gla.select_kernel import plan_chunks
from .select_kernel import Operands

Runs = list[tuple[int, int]] | None


@disable_compile
def chunked_form(
    x: Operands, state: Tensor, cu_seqlens: Tensor | None, shards: ShardMaps | None = None
) -> tuple[Tensor, Tensor]:
    """Return outputs and final states of the operator. state: [sequences, heads, head_dim_k, head_dim_v].

    shards: the first sequence begins in the incoming state of the local shard instead.
    """
    length = x.q.shape[1]
    if length == 0:
        return x.written, state
    with without_autocast(x.q):
        chunk, fits = plan_chunks(x.log_decay)
        bounds = None if cu_seqlens is None else [int(edge) for edge in cu_seqlens.tolist()]
        index, runs = place_segments(bounds, chunk, x.q.device)
        x = _to_chunks(x, chunk, index)
        wy = _wy(x, fits)
        if shards is not None:
            incoming, _ = shards.incoming_state(*_affine_map(wy, runs))
            state = incoming if shards.segments is None else state.index_copy(0, shards.segments.first, incoming)
        states, updates, final = _scan(wy, state, runs)
        o = (x.q * x.log_decay.cumsum(3).exp()) @ states + _scores(x.q, x.removal, x.log_decay, fits) @ updates
        if x.removal is not x.k:
            o = o + _scores(x.q, x.k, x.log_decay, fits) @ x.written
        return from_chunks(o, length, index), final


@dataclass(frozen=True)
class _Chunks:
    """Hold the inputs of the scan over chunks, [batch, heads, chunks, chunk, dim].

    N = u - w S; S' = total S + tail^T N + added. total: [batch, heads, chunks, head_dim_k or 1, 1]; added: None for nothing.
    """

    w: Tensor
    u: Tensor
    tail: Tensor
    total: Tensor
    added: Tensor | None


def _to_chunks(x: Operands, chunk: int, index: Tensor | None) -> Operands:
    parts = {name: to_chunks(tensor, chunk, index) for name, tensor in x.tensors().items()}
    if x.removal is x.k:
        parts["removal"] = parts["k"]
    return Operands(**parts, read_before_decay=x.read_before_decay)


def _wy(x: Operands, fits: bool) -> _Chunks:
    to_end = sum_after(x.log_decay, 3).exp()
    total = x.log_decay.sum(3).exp().unsqueeze(-1)
    from_start = x.log_decay.cumsum(3)
    if x.read_before_decay:
        from_start = F.pad(from_start[..., :-1, :], (0, 0, 1, 0))
    system = _read_scores(x, x.removal, fits)
    added, values = None, x.written
    if x.removal is not x.k:
        added = (x.k * to_end).transpose(-1, -2) @ x.written
        values = -_read_scores(x, x.k, fits) @ x.written
    right = torch.cat([x.read * from_start.exp(), values], -1)
    # Reads the entries below the diagonal only.
    solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    w, u = solved.split([x.read.shape[-1], values.shape[-1]], -1)
    return _Chunks(w, u, x.removal * to_end, total, added)


def _scan(c: _Chunks, state: Tensor, runs: Runs) -> tuple[Tensor, Tensor, Tensor]:
    """Return the state at the start of every chunk, N of every chunk, and the final state of every sequence."""
    states, updates, finals = [], [], []
    for sequence, chunks in chunks_of_sequences(c.w.shape[2], runs):
        s = state[sequence]
        for n in chunks:
            states.append(s)
            updates.append(c.u[:, :, n] - c.w[:, :, n] @ s)
            s = c.total[:, :, n] * s + c.tail[:, :, n].transpose(-1, -2) @ updates[-1]
            if c.added is not None:
                s = s + c.added[:, :, n]
        finals.append(s)
    return torch.stack(states, 2), torch.stack(updates, 2), torch.cat(finals)


def _affine_map(c: _Chunks, runs: Runs) -> tuple[Tensor, Tensor]:
    """Return (M, B) with final state = M (initial state) + B, of the last sequence that has a token.

    M: [batch, heads, head_dim_k, head_dim_k]; B: [batch, heads, head_dim_k, head_dim_v].
    """
    dim = c.w.shape[-1]
    # The first columns of the state begin as the identity, and their values are 0.
    state = torch.eye(dim, dim + c.u.shape[-1], dtype=c.u.dtype, device=c.u.device).expand(*c.u.shape[:2], -1, -1)
    c = replace(c, u=F.pad(c.u, (dim, 0)), added=None if c.added is None else F.pad(c.added, (dim, 0)))
    _, _, final = _scan(c, state, None if runs is None else [run for run in runs if run[0] < run[1]][-1:])
    return final[..., :dim], final[..., dim:]


def _read_scores(x: Operands, y: Tensor, fits: bool) -> Tensor:
    """Return sum_d read_id y_jd exp(c_id - b_jd) below the diagonal, [..., chunk, chunk]."""
    if not x.read_before_decay:
        return _scores(x.read, y, x.log_decay, fits).tril(-1)
    # Row i reads with the decays up to token i - 1.
    following = F.pad(x.read[..., 1:, :], (0, 0, 0, 1))
    return F.pad(_scores(following, y, x.log_decay, fits)[..., :-1, :], (0, 0, 1, 0))


def _scores(x: Tensor, y: Tensor, log_decay: Tensor, fits: bool) -> Tensor:
    """Return <x, y>, the lower triangle with the diagonal, [..., chunk, chunk]."""
    if log_decay.shape[-1] == 1:
        return (x @ y.transpose(-1, -2)) * pairwise_decay(log_decay, 3).squeeze(-1)
    if not fits:
        return recomputed(_exact_scores, x, y, log_decay)
    b = log_decay.cumsum(3)
    # The scores do not depend on the reference.
    growth = (b - b[..., b.shape[3] // 2, None, :].detach()).exp()
    return ((x * growth) @ (y / growth).transpose(-1, -2)).tril()


def _exact_scores(x: Tensor, y: Tensor, log_decay: Tensor) -> Tensor:
    return torch.einsum("...id,...ijd,...jd->...ij", x, pairwise_decay(log_decay, 3), y)
