"""Both directions of linear attention with per-channel decays in one autograd node: `models/operators/lion/scans.py` on kernels.

The backward direction is the causal operator on the flipped sequence, with key, value and decay of the next token:

    q'_i = q_i    k'_i = exp(g_(i+1)) k_(i+1)    v'_i = v_(i+1)    g'_i = g_(i+1)    0 after the last token of a sequence

One kernel writes key, value and decay in flipped order, others add the outputs and the gradients. PyTorch's own shifts, flips and
sums would read and write every tensor three times. The backward pass computes the flipped tensors again.

With one mask per channel of values, y_ic = sum_(j <= i) (q_i . k_j) exp(b_ic - b_jc) v_jc. This is the gradient of the query of
gated linear attention whose keys are v, values k and output gradient q. The kernels of its backward pass therefore compute y.
Those of its forward pass compute the gradient of q, with the gradient of y in the place of the query. In `_BothDirections` "key"
is the tensor with the decays and "value" the other one.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..launch import Launch, aligned, tl, triton
from .gla import GLACase, backward, case_of, chunk_launches, exact_launches, forward, triangle

# Elements per program.
_BLOCK = 2048


def both_directions(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, scale: float, cu_seqlens: Tensor | None, of_values: bool = False
) -> Tensor:
    """Compute `models.operators.lion.scans.two_scans` for q, k and v of one dtype. Raises ValueError as `gla`."""
    key, value = (v, k) if of_values else (k, v)
    case = case_of(key, key, value, scale, None, cu_seqlens)
    last = flipped = None
    if cu_seqlens is not None:
        last = torch.zeros(q.shape[1] + 1, dtype=torch.int8, device=q.device).index_fill(0, cu_seqlens.long(), 1)[1:]
        flipped = q.shape[1] - cu_seqlens.flip(0)
    return _BothDirections.apply(q, key, value, log_decay.float(), last, cu_seqlens, flipped, case, of_values)


class _BothDirections(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        key: Tensor,
        value: Tensor,
        g: Tensor,
        last: Tensor | None,
        cu_seqlens: Tensor | None,
        flipped: Tensor | None,
        case: GLACase,
        of_values: bool,
    ) -> Tensor:
        q, key, value, g = (aligned(x) for x in (q, key, value, g))
        last = None if last is None else aligned(last)
        one_direction = _values_forward if of_values else _keys_forward
        o, saved = one_direction(case, q, key, value, g, cu_seqlens)
        o_back, saved_back = one_direction(case, q.flip(1), *_flipped(case, key, value, g, last), flipped)
        _add_flipped(case, o, o_back)
        ctx.save_for_backward(q, key, value, g, last, cu_seqlens, flipped, *saved, *saved_back)
        ctx.case, ctx.of_values = case, of_values
        return o

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do: Tensor) -> tuple[Tensor | None, ...]:
        q, key, value, g, last, cu_seqlens, flipped, *saved = ctx.saved_tensors
        case, do = ctx.case, aligned(do)
        one_direction = _values_backward if ctx.of_values else _keys_backward
        half = len(saved) // 2
        dq, *rest = one_direction(case, do, q, key, value, g, cu_seqlens, saved[:half])
        inputs = _flipped(case, key, value, g, last)
        dq_back, *rest_back = one_direction(case, do.flip(1), q.flip(1), *inputs, flipped, saved[half:])
        _add_flipped(case, dq, dq_back)
        _launches(case, last is not None)[1](key, g, last, *rest, *rest_back)
        return (dq, *rest, None, None, None, None, None)


def _keys_forward(
    case: GLACase, q: Tensor, key: Tensor, value: Tensor, g: Tensor, cu_seqlens: Tensor | None
) -> tuple[Tensor, tuple[Tensor | None, ...]]:
    """Return the outputs of one direction and what `_keys_backward` needs."""
    o, _, saved = forward(case, q, key, value, g, None, cu_seqlens)
    return o, saved


def _keys_backward(
    case: GLACase, do: Tensor, q: Tensor, key: Tensor, value: Tensor, g: Tensor, cu_seqlens: Tensor | None, saved: Any
) -> tuple[Tensor, ...]:
    """Return the gradients of q, key, value and g."""
    dq, dk, dv, dg = (torch.empty_like(x) for x in (q, key, value, g))
    backward(case, do, None, dq, dk, dv, dg, (None, None), q, key, value, g, None, *saved)
    return dq, dk, dv, dg


def _values_forward(
    case: GLACase, q: Tensor, key: Tensor, value: Tensor, g: Tensor, cu_seqlens: Tensor | None
) -> tuple[Tensor, tuple[Tensor | None, ...]]:
    """Compute `_keys_forward` for one mask per channel of values: by the kernels of the gradient of the query."""
    # The gradient of the query depends on neither the query nor the gradients of states: others take their places.
    _, _, saved = forward(case, key, key, value, g, None, cu_seqlens)
    states, needs_exact, table = saved
    y, dk, dv, dg = (torch.empty_like(x) for x in (key, key, value, g))
    inputs, outputs = (q, key, key, value, g, table), (y, dk, dv, dg, None, None)
    chunk_launches(case)[1](*inputs, triangle(q.device), needs_exact, states, states, *outputs)
    exact_launches(case)[1](needs_exact, *inputs, *outputs)
    return y, saved


def _values_backward(
    case: GLACase, do: Tensor, q: Tensor, key: Tensor, value: Tensor, g: Tensor, cu_seqlens: Tensor | None, saved: Any
) -> tuple[Tensor, ...]:
    states, needs_exact, table = saved
    dq = torch.empty_like(value)
    chunk_launches(case)[0](do, key, value, g, table, triangle(q.device), states, dq, needs_exact)
    exact_launches(case)[0](needs_exact, do, key, value, g, table, dq)
    return (dq, *_keys_backward(case, q, do, key, value, g, cu_seqlens, saved)[1:])


def _flipped(
    case: GLACase, key: Tensor, value: Tensor, g: Tensor, last: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return key, value and log decay of the backward direction, in flipped order."""
    flipped = torch.empty_like(key), torch.empty_like(value), torch.empty_like(g)
    _launches(case, last is not None)[0](key, value, g, last, *flipped)
    return flipped


def _add_flipped(case: GLACase, x: Tensor, y: Tensor) -> None:
    """Add y in flipped order to x, both [batch, length, heads, channels]."""
    _add_launch(case, x.shape[2] * x.shape[3])(x, y)


@lru_cache(4096)
def _launches(case: GLACase, packed: bool) -> tuple[Launch, Launch]:
    """Return the launches of `_flip_inputs` and `_add_gradients`. packed: whether their pointer `last` is given."""
    sizes = case.heads * case.dim_k, case.heads * case.dim_v
    return _launch(_flip_inputs, case, *sizes), _launch(_add_gradients, case, *sizes)


@lru_cache(4096)
def _add_launch(case: GLACase, size: int) -> Launch:
    return _launch(_add_flipped_kernel, case, size)


def _launch(kernel: Any, case: GLACase, *sizes: int) -> Launch:
    rows, widest = case.batch * case.length, max(sizes)
    block = min(_BLOCK, triton.next_power_of_2(widest))
    tile = _BLOCK // block
    grid = triton.cdiv(rows, tile), triton.cdiv(widest, block)
    return Launch(kernel, grid, rows, case.length, *sizes, block, tile, num_warps=4)


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
    key, value, g, last, key_back, value_back, g_back, rows, length, K: tl.constexpr, V: tl.constexpr, BLOCK: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    """Write the inputs of token i of the backward direction to its mirrored place."""
    row, mirrored, token, c, mask = _tile(rows, length, BLOCK, TILE)
    keys, values = mask & (c < K), mask & (c < V)
    follows = token + 1 < length
    if last is not None:
        follows = follows & (tl.load(last + token, mask=mask, other=1) == 0)
    of_key, of_value = (row + 1) * K + c, (row + 1) * V + c
    decay = tl.load(g + of_key, mask=keys & follows, other=0.0)
    x = tl.load(key + of_key, mask=keys & follows, other=0.0).to(tl.float32) * tl.exp(decay)
    tl.store(key_back + mirrored * K + c, x.to(key_back.dtype.element_ty), mask=keys)
    tl.store(g_back + mirrored * K + c, decay, mask=keys)
    tl.store(value_back + mirrored * V + c, tl.load(value + of_value, mask=values & follows, other=0.0), mask=values)


@triton.jit
def _add_flipped_kernel(x, y, rows, length, SIZE: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr):
    row, mirrored, _, c, mask = _tile(rows, length, BLOCK, TILE)
    mask = mask & (c < SIZE)
    total = tl.load(x + row * SIZE + c, mask=mask).to(tl.float32)
    total += tl.load(y + mirrored * SIZE + c, mask=mask).to(tl.float32)
    tl.store(x + row * SIZE + c, total.to(x.dtype.element_ty), mask=mask)


@triton.jit
def _add_gradients(
    key, g, last, dk, dv, dg, dk_back, dv_back, dg_back, rows, length, K: tl.constexpr, V: tl.constexpr, BLOCK: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    """Add to the gradients of key, value and log decay those of the next token's flipped inputs."""
    row, mirrored, token, c, mask = _tile(rows, length, BLOCK, TILE)
    follows = mask & (token > 0)
    if last is not None:
        follows = follows & (tl.load(last + token - 1, mask=follows, other=1) == 0)
    keys, values = follows & (c < K), follows & (c < V)
    at, of_key, of_value = row * K + c, (mirrored + 1) * K + c, (mirrored + 1) * V + c
    x = tl.load(dv + row * V + c, mask=values).to(tl.float32)
    x += tl.load(dv_back + of_value, mask=values).to(tl.float32)
    tl.store(dv + row * V + c, x.to(dv.dtype.element_ty), mask=values)
    # Of k' = exp(g) k.
    d_key = tl.load(dk_back + of_key, mask=keys).to(tl.float32) * tl.exp(tl.load(g + at, mask=keys))
    d_decay = tl.load(dg_back + of_key, mask=keys) + d_key * tl.load(key + at, mask=keys).to(tl.float32)
    x = tl.load(dk + at, mask=keys).to(tl.float32) + d_key
    tl.store(dk + at, x.to(dk.dtype.element_ty), mask=keys)
    tl.store(dg + at, tl.load(dg + at, mask=keys) + d_decay, mask=keys)
