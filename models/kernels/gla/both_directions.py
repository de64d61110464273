"""Both directions of gated linear attention in one autograd node: `models/operators/lion/scans.py` on the kernels of `gla.py`.

The backward direction is the causal operator on the flipped sequence, with key, value and decay of the next token:

    q'_i = q_i    k'_i = exp(g_(i+1)) k_(i+1)    v'_i = v_(i+1)    g'_i = g_(i+1)    0 after the last token of a sequence

One kernel writes these tensors in flipped order, a second one adds the outputs, a third one adds the gradients. PyTorch's own
shifts, flips and sums would read and write every tensor three times. The backward pass computes the flipped tensors again.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..launch import Launch, aligned, tl, triton
from .gla import GLACase, backward, case_of, forward

# Elements per program.
_BLOCK = 2048


def both_directions(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, scale: float, cu_seqlens: Tensor | None
) -> Tensor:
    """Compute `models.operators.lion.scans.two_scans` for q, k and v of one dtype. Raises ValueError as `gla`."""
    case = case_of(q, k, v, scale, None, cu_seqlens)
    last = flipped = None
    if cu_seqlens is not None:
        last = torch.zeros(q.shape[1] + 1, dtype=torch.int8, device=q.device).index_fill(0, cu_seqlens.long(), 1)[1:]
        flipped = q.shape[1] - cu_seqlens.flip(0)
    return _BothDirections.apply(q, k, v, log_decay.float(), last, cu_seqlens, flipped, case)


class _BothDirections(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor,
        last: Tensor | None,
        cu_seqlens: Tensor | None,
        flipped: Tensor | None,
        case: GLACase,
    ) -> Tensor:
        q, k, v, g = (aligned(x) for x in (q, k, v, g))
        last = None if last is None else aligned(last)
        o, _, saved = forward(case, q, k, v, g, None, cu_seqlens)
        o_back, _, saved_back = forward(case, *_flipped(case, q, k, v, g, last), None, flipped)
        _launches(case, last is not None)[1](o, o_back)
        ctx.save_for_backward(q, k, v, g, last, *saved, *saved_back)
        ctx.case = case
        return o

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, g, last, *saved = ctx.saved_tensors
        case, inputs, do = ctx.case, (q, k, v, g), aligned(do)
        gradients = [torch.empty_like(x) for x in inputs]
        backward(case, do, None, *gradients, (None, None), *inputs, None, *saved[:3])
        of_flipped = [torch.empty_like(x) for x in inputs]
        flipped = _flipped(case, q, k, v, g, last)
        backward(case, do.flip(1), None, *of_flipped, (None, None), *flipped, None, *saved[3:])
        _launches(case, last is not None)[2](k, g, last, *gradients, *of_flipped)
        return (*gradients, None, None, None, None)


def _flipped(case: GLACase, q: Tensor, k: Tensor, v: Tensor, g: Tensor, last: Tensor | None) -> tuple[Tensor, ...]:
    """Return the inputs of the backward direction, in flipped order."""
    flipped = tuple(torch.empty_like(x) for x in (q, k, v, g))
    _launches(case, last is not None)[0](q, k, v, g, last, *flipped)
    return flipped


@lru_cache(4096)
def _launches(case: GLACase, packed: bool) -> tuple[Launch, Launch, Launch]:
    """Return the launches of `_flip_inputs`, `_add_outputs` and `_add_gradients`."""
    keys, values = case.heads * case.dim_k, case.heads * case.dim_v
    rows = case.batch * case.length

    def launch(kernel: Any, widest: int, *sizes: int) -> Launch:
        block = min(_BLOCK, triton.next_power_of_2(widest))
        tile = _BLOCK // block
        grid = triton.cdiv(rows, tile), triton.cdiv(widest, block)
        return Launch(kernel, grid, rows, case.length, *sizes, block, tile, num_warps=4)

    widest = max(keys, values)
    return (
        launch(_flip_inputs, widest, keys, values),
        launch(_add_outputs, values, values),
        launch(_add_gradients, widest, keys, values),
    )


@triton.jit
def _tile(rows, length, BLOCK: tl.constexpr, TILE: tl.constexpr):
    """Return the program's rows [TILE, 1], the rows at the mirrored places, their tokens, channels [1, BLOCK] and a mask."""
    row = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    token = row % length
    return (
        row[:, None],
        (row + length - 1 - 2 * token)[:, None],
        token[:, None],
        channel[None, :],
        (row < rows)[:, None],
    )


@triton.jit
def _flip_inputs(
    q, k, v, g, last, q_back, k_back, v_back, g_back, rows, length, K: tl.constexpr, V: tl.constexpr, BLOCK: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    """Write the inputs of token i of the backward direction to its mirrored place."""
    row, mirrored, token, c, mask = _tile(rows, length, BLOCK, TILE)
    keys, values = mask & (c < K), mask & (c < V)
    tl.store(q_back + mirrored * K + c, tl.load(q + row * K + c, mask=keys, other=0.0), mask=keys)
    follows = token + 1 < length
    if last is not None:
        follows = follows & (tl.load(last + token, mask=mask, other=1) == 0)
    of_key, of_value = (row + 1) * K + c, (row + 1) * V + c
    decay = tl.load(g + of_key, mask=keys & follows, other=0.0)
    key = tl.load(k + of_key, mask=keys & follows, other=0.0).to(tl.float32) * tl.exp(decay)
    tl.store(k_back + mirrored * K + c, key.to(k_back.dtype.element_ty), mask=keys)
    tl.store(g_back + mirrored * K + c, decay, mask=keys)
    tl.store(v_back + mirrored * V + c, tl.load(v + of_value, mask=values & follows, other=0.0), mask=values)


@triton.jit
def _add_outputs(o, o_back, rows, length, V: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr):
    row, mirrored, _, c, mask = _tile(rows, length, BLOCK, TILE)
    mask = mask & (c < V)
    x = tl.load(o + row * V + c, mask=mask).to(tl.float32)
    x += tl.load(o_back + mirrored * V + c, mask=mask).to(tl.float32)
    tl.store(o + row * V + c, x.to(o.dtype.element_ty), mask=mask)


@triton.jit
def _add_gradients(
    k, g, last, dq, dk, dv, dg, dq_back, dk_back, dv_back, dg_back, rows, length, K: tl.constexpr, V: tl.constexpr,
    BLOCK: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Add to the gradients those of the flipped inputs: of the token's query, and of the previous token's key, value, decay."""
    row, mirrored, token, c, mask = _tile(rows, length, BLOCK, TILE)
    keys, values = mask & (c < K), mask & (c < V)
    at = row * K + c
    x = tl.load(dq + at, mask=keys).to(tl.float32)
    x += tl.load(dq_back + mirrored * K + c, mask=keys).to(tl.float32)
    tl.store(dq + at, x.to(dq.dtype.element_ty), mask=keys)
    follows = token > 0
    if last is not None:
        follows = follows & (tl.load(last + token - 1, mask=mask & (token > 0), other=1) == 0)
    keys, values = keys & follows, values & follows
    of_key, of_value = (mirrored + 1) * K + c, (mirrored + 1) * V + c
    x = tl.load(dv + row * V + c, mask=values).to(tl.float32)
    x += tl.load(dv_back + of_value, mask=values).to(tl.float32)
    tl.store(dv + row * V + c, x.to(dv.dtype.element_ty), mask=values)
    # Of k' = exp(g) k.
    d_key = tl.load(dk_back + of_key, mask=keys).to(tl.float32) * tl.exp(tl.load(g + at, mask=keys))
    d_decay = tl.load(dg_back + of_key, mask=keys) + d_key * tl.load(k + at, mask=keys).to(tl.float32)
    x = tl.load(dk + at, mask=keys).to(tl.float32) + d_key
    tl.store(dk + at, x.to(dk.dtype.element_ty), mask=keys)
    tl.store(dg + at, tl.load(dg + at, mask=keys) + d_decay, mask=keys)
