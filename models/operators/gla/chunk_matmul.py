"""The matmul form of gated linear attention in chunks, with its backward pass, for decays that fit it.

Notation of `models.operators.gla.chunk`. m is the value of b in the middle of a chunk, and S the state at its start.

    Q = scale q exp(b - m)    K = k exp(m - b)    P = exp(m) S
    A = tril(Q K^T)    o = A v + Q P    U = K^T v    S' = exp(B) S + exp(B - m) U

    dA = tril(do v^T)  dQ = dA K + do P^T  dP = Q^T do    dU = exp(B - m) dS'    dS = exp(B) dS' + exp(m) dP
    dK = dA^T Q + v dU^T   dv = A^T do + K dU
    db = Q dQ - K dK (m has no derivative: o does not depend on it)   dB = sum_v S' dS'   dg = reverse cumsum of db

A tile has some thousand tokens, so that on a CPU it stays in the cache. Tiles are computed one after the other along the
sequence. The backward pass runs in the reverse order and recomputes Q, K and A from the inputs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ...precision import accumulation_dtype, without_autocast

# Elements of v per tile on a CPU: 2^19 float32 are 2 MiB. Measured; smaller tiles spend more time in calls.
_TILE_ELEMENTS = 1 << 19


@dataclass(frozen=True)
class Span:
    """Hold tokens start to end of batch rows `rows`, whose states are `sequences`."""

    rows: slice
    sequences: slice
    start: int
    end: int


def matmul_form(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, state: Tensor, scale: float, spans: list[Span], chunk: int
) -> tuple[Tensor, Tensor]:
    """Compute `models.operators.gla.gated_linear_attention.gated_linear_attention` with one decay per channel.

    log_decay: [..., head_dim_k]. state: [sequences, heads, head_dim_k, head_dim_v], required.
    The total of log_decay over any chunk of any span must be above about -80 in float32.
    """
    return _MatmulForm.apply(q, k, v, log_decay, state, scale, spans, chunk)


class _MatmulForm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        log_decay: Tensor,
        state: Tensor,
        scale: float,
        spans: list[Span],
        chunk: int,
    ) -> tuple[Tensor, Tensor]:
        o = torch.empty_like(v)
        final = state.clone()
        keep = any(ctx.needs_input_grad)
        starts = []
        for span in spans:
            s = final[span.sequences]
            for tile in _tiles(span, v, chunk):
                x = _Inputs(q[tile], k[tile], v[tile], log_decay[tile], scale, chunk)
                shrunk = torch.matmul(x.k.transpose(-1, -2), x.v).mul_(_column(x.to_end))
                states = shrunk.new_empty(*shrunk.shape[:2], shrunk.shape[2] + 1, *shrunk.shape[3:])
                for n, (decay, update) in enumerate(zip(_column(x.total).unbind(2), shrunk.unbind(2), strict=True)):
                    states[:, :, n] = s
                    s.mul_(decay).add_(update)
                states[:, :, -1] = s
                out = torch.matmul(x.q, states[:, :, :-1] * _column(x.from_start))
                out += torch.matmul(x.scores(), x.v)
                _write_chunks(o[tile], out)
                if keep:
                    starts.append(states)
        ctx.save_for_backward(q, k, v, log_decay, *starts)
        ctx.scale, ctx.spans, ctx.chunk = scale, spans, chunk
        return o, final

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_o: Tensor, d_final: Tensor) -> tuple[Tensor | None, ...]:
        with without_autocast(d_o):
            return _gradients(ctx, d_o, d_final)


def _gradients(ctx: Any, d_o: Tensor, d_final: Tensor) -> tuple[Tensor | None, ...]:
    """Compute the backward pass of `_MatmulForm`."""
    q, k, v, log_decay, *starts = ctx.saved_tensors
    d_q, d_k, d_v, d_g = (torch.empty_like(x) for x in (q, k, v, log_decay))
    d_initial = d_final.clone()
    for span in reversed(ctx.spans):
        d_s = d_initial[span.sequences]
        for tile in reversed(list(_tiles(span, v, ctx.chunk))):
            states = starts.pop()
            x = _Inputs(q[tile], k[tile], v[tile], log_decay[tile], ctx.scale, ctx.chunk)
            d_out = _to_chunks(d_o[tile], ctx.chunk, x.v.dtype)
            from_start, to_end, total = (_column(y) for y in (x.from_start, x.to_end, x.total))

            d_scores = torch.matmul(d_out, x.v.transpose(-1, -2)).tril_()
            d_qs = torch.matmul(d_scores, x.k)
            d_qs += torch.matmul(d_out, (states[:, :, :-1] * from_start).transpose(-1, -2))
            _write_chunks(d_q[tile], d_qs * x.growth * ctx.scale)
            if not any(ctx.needs_input_grad[1:]):  # in the scans of `models.operators.lion.scans`
                continue

            d_p = torch.matmul(x.q.transpose(-1, -2), d_out)
            d_p *= from_start
            d_next = torch.empty_like(d_p)
            for n in reversed(range(d_p.shape[2])):
                d_next[:, :, n] = d_s
                d_s.mul_(total[:, :, n]).add_(d_p[:, :, n])
            d_total = (states[:, :, 1:] * d_next).sum(-1)
            d_u = d_next.mul_(to_end)

            d_ks = torch.matmul(d_scores.transpose(-1, -2), x.q)
            d_ks += torch.matmul(x.v, d_u.transpose(-1, -2))
            d_vs = torch.matmul(x.scores().transpose(-1, -2), d_out)
            d_vs += torch.matmul(x.k, d_u)
            _write_chunks(d_v[tile], d_vs)

            d_b = d_qs.mul_(x.q)
            d_b.addcmul_(d_ks, x.k, value=-1)
            d_b[:, :, :, -1] += d_total
            _write_chunks(d_g[tile], torch.matmul(_ones(d_b).t(), d_b))
            _write_chunks(d_k[tile], d_ks.div_(x.growth))
    return d_q, d_k, d_v, d_g, d_initial, None, None, None


class _Inputs:
    """Hold one tile's Q, K, v [batch, heads, chunks, chunk, dim] and decays [batch, heads, chunks, 1, dim]."""

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, scale: float, chunk: int) -> None:
        accumulation = accumulation_dtype(v)
        b = _to_chunks(log_decay, chunk, accumulation)
        b = torch.matmul(_ones(b), b)
        middle, last = b[:, :, :, chunk // 2, None], b[:, :, :, -1:]
        self.from_start, self.to_end, self.total = middle.exp(), (last - middle).exp(), last.exp()
        self.growth = b.sub_(middle.clone()).exp_()
        self.q = _to_chunks(q, chunk, accumulation).mul_(self.growth).mul_(scale)
        self.k = _to_chunks(k, chunk, accumulation).div_(self.growth)
        self.v = _to_chunks(v, chunk, accumulation)

    def scores(self) -> Tensor:
        return torch.matmul(self.q, self.k.transpose(-1, -2)).tril_()


def _tiles(span: Span, v: Tensor, chunk: int) -> Iterator[tuple[slice, slice]]:
    """Yield pieces of a span along the sequence, each a whole number of chunks except the last."""
    step = span.end - span.start
    if not v.is_cuda:
        rows = len(range(*span.rows.indices(v.shape[0])))
        step = max(1, _TILE_ELEMENTS // (rows * v.shape[2] * v.shape[3] * chunk)) * chunk
    for start in range(span.start, span.end, max(step, 1)):
        yield span.rows, slice(start, min(start + step, span.end))


def spans_of(v: Tensor, bounds: list[int] | None) -> list[Span]:
    """Return batch rows in groups that fill a tile, or the segments of one packed row."""
    if bounds is not None:
        return [Span(slice(0, 1), slice(s, s + 1), *pair) for s, pair in enumerate(pairwise(bounds))]
    batch, length = v.shape[:2]
    rows = batch if v.is_cuda else max(1, _TILE_ELEMENTS // (length * v.shape[2] * v.shape[3]))
    groups = (slice(row, min(row + rows, batch)) for row in range(0, batch, rows))
    return [Span(group, group, 0, length) for group in groups]


def _to_chunks(x: Tensor, chunk: int, dtype: torch.dtype) -> Tensor:
    """Copy x [batch, length, heads, dim] to [batch, heads, chunks, chunk, dim], zero after the last token."""
    batch, length, heads, dim = x.shape
    chunks = -(-length // chunk)
    out = torch.empty(batch, heads, chunks * chunk, dim, dtype=dtype, device=x.device)
    out[:, :, :length] = x.transpose(1, 2)
    if length % chunk:
        out[:, :, length:] = 0
    return out.unflatten(2, (chunks, chunk))


def _write_chunks(target: Tensor, x: Tensor) -> None:
    """Write [batch, heads, chunks, chunk, dim] into `target` [batch, length, heads, dim]."""
    target.copy_(x.flatten(2, 3)[:, :, : target.shape[1]].transpose(1, 2))


def _ones(like: Tensor) -> Tensor:
    """Return the lower triangle of ones [chunk, chunk]: its matmul with x is the cumulative sum along the chunk."""
    chunk = like.shape[-2]
    return torch.ones(chunk, chunk, dtype=like.dtype, device=like.device).tril_()


def _column(x: Tensor) -> Tensor:
    """Return [..., 1, dim] as [..., dim, 1]: one factor per row of the state."""
    return x.transpose(-1, -2)
