"""The depthwise causal convolution with its SiLU: one kernel forward, one backward, each reads its inputs once.

Reference: `models/layers/short_convolution.py`. PyTorch's depthwise convolution needs the channels before the tokens, which
costs two copies per pass, and a separate kernel for the activation. Every program sums the gradient of the weight over its
tokens. A second kernel sums over programs in a fixed order.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .launch import Launch, aligned, dtypes, tl, triton
from .primitives import sigmoid, sum_parts

# Tokens and channels per program, forward and backward, and tokens per tile forward. Backward a program also reads the three
# tokens after its own; together they are a multiple of the four that it loads at once.
_FORWARD, _BACKWARD = (64, 128), (61, 256)
_TILE = 8


def causal_convolution(previous: Tensor | None, x: Tensor, weight: Tensor, silu: bool) -> Tensor:
    """Return y_t = f(sum_j weight[:, j] x_{t - kernel + 1 + j}) in x's shape and dtype, computed in float32.

    x: [batch, length, channels]. previous: [batch, kernel - 1, channels], the inputs before x, None for zeros. weight:
    [channels, kernel] with kernel at most 4. f is SiLU or the identity.
    """
    return _Convolution.apply(previous, x, weight, silu)


class _Convolution(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, previous: Tensor | None, x: Tensor, weight: Tensor, silu: bool) -> Tensor:
        previous = None if previous is None else aligned(previous)
        x, weight = aligned(x), aligned(weight)
        y = torch.empty_like(x)
        if x.numel():
            forward, _ = _launches(x.device, dtypes(previous, x, weight), x.shape, weight.shape[1], silu)
            forward(x, previous, weight, y)
        ctx.save_for_backward(previous, x, weight)
        ctx.silu = silu
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        previous, x, weight = ctx.saved_tensors
        batch, _, channels = x.shape
        kernel = weight.shape[1]
        dx = torch.empty_like(x)
        d_previous = None if previous is None else torch.empty_like(previous)
        programs = _programs(x.shape, kernel, previous is not None)
        partial = torch.empty(batch, programs, kernel, channels, dtype=torch.float32, device=x.device)
        if partial.numel():
            _, backward = _launches(x.device, dtypes(previous, x, weight), x.shape, kernel, ctx.silu)
            backward(aligned(dy), previous, x, weight, d_previous, dx, partial)
        d_weight = sum_parts(partial.view(1, batch * programs, kernel * channels), weight.dtype).view(kernel, channels)
        return d_previous, dx, d_weight.t(), None


@lru_cache(4096)
def _launches(
    device: torch.device, key: tuple[torch.dtype | None, ...], shape: torch.Size, kernel: int, silu: bool
) -> tuple[Launch, Launch]:
    """Return the forward and the backward launch for x of this shape. key: `dtypes` of previous, x and weight."""
    batch, length, channels = shape
    history = key[0] is not None
    values = length, channels, kernel, silu, history
    tokens, columns = _FORWARD
    grid = triton.cdiv(length, tokens), triton.cdiv(channels, columns), batch
    forward = Launch(_convolution_forward, grid, *values, tokens, _TILE, columns, num_warps=4)
    tokens, columns = _BACKWARD
    grid = _programs(shape, kernel, history), triton.cdiv(channels, columns), batch
    # With a few more registers per thread, a multiprocessor holds seven programs instead of eight.
    registers = None if history else 128
    return forward, Launch(_convolution_backward, grid, *values, tokens, columns, num_warps=2, maxnreg=registers)


def _programs(shape: torch.Size, kernel: int, history: bool) -> int:
    """Return the programs of the backward pass along the sequence. The tokens before x have a gradient too."""
    return triton.cdiv(shape[1] + (kernel - 1 if history else 0), _BACKWARD[0])


@triton.jit
def _token(x, previous, t, column, length, channels, KERNEL: tl.constexpr, HISTORY: tl.constexpr):
    """Return input t of a sequence in float32, for t from -(KERNEL - 1) on; zero outside."""
    known = column < channels
    place = tl.cast(t, tl.int64) * channels
    value = tl.load(x + place + column, mask=known & (t >= 0) & (t < length), other=0.0).to(tl.float32)
    if HISTORY:
        place = (t + (KERNEL - 1)) * channels
        value += tl.load(previous + place + column, mask=known & (t < 0) & (t >= 1 - KERNEL), other=0.0).to(tl.float32)
    return value


@triton.jit
def _both(x, dy, previous, t, column, length, channels, KERNEL: tl.constexpr, HISTORY: tl.constexpr):
    """Return input t and the gradient of output t."""
    value = _token(x, previous, t, column, length, channels, KERNEL, HISTORY)
    return value, _token(dy, previous, t, column, length, channels, KERNEL, False)


@triton.jit
def _tap(weight, column, channels, J: tl.constexpr, KERNEL: tl.constexpr):
    """Return the weight of the input J tokens earlier."""
    if J < KERNEL:
        return tl.load(weight + column * KERNEL + (KERNEL - 1 - J), mask=column < channels, other=0.0).to(tl.float32)
    return tl.zeros((column.shape[0],), tl.float32)


@triton.jit(do_not_specialize=["length"])
def _convolution_forward(
    x, previous, weight, y, length, channels,
    KERNEL: tl.constexpr, SILU: tl.constexpr, HISTORY: tl.constexpr, TOKENS: tl.constexpr, TILE: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    batch, row = tl.program_id(2).to(tl.int64), tl.arange(0, TILE)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    known = (column < channels)[None, :]
    if HISTORY:
        previous += batch * (KERNEL - 1) * channels
    w0, w1 = _tap(weight, column, channels, 0, KERNEL), _tap(weight, column, channels, 1, KERNEL)
    w2, w3 = _tap(weight, column, channels, 2, KERNEL), _tap(weight, column, channels, 3, KERNEL)
    for tile in range(TOKENS // TILE):
        first = tl.program_id(0) * TOKENS + tile * TILE
        place = (batch * length + first) * channels
        total = tl.zeros((TILE, COLUMNS), tl.float32)
        for j in tl.static_range(KERNEL):
            t = first + (row - j)
            at = (row - j)[:, None] * channels + column[None, :]
            value = tl.load(x + place + at, mask=((t >= 0) & (t < length))[:, None] & known, other=0.0).to(tl.float32)
            if HISTORY:
                at = (t + (KERNEL - 1))[:, None] * channels + column[None, :]
                value += tl.load(previous + at, mask=(t < 0)[:, None] & known, other=0.0).to(tl.float32)
            total += (w0 if j == 0 else w1 if j == 1 else w2 if j == 2 else w3)[None, :] * value
        if SILU:
            total = total * sigmoid(total)
        inside = (first + row < length)[:, None] & known
        tl.store(y + place + (row[:, None] * channels + column[None, :]), total.to(y.dtype.element_ty), mask=inside)


@triton.jit
def _convolution_backward(
    dy, previous, x, weight, d_previous, dx, partial, length, channels,
    KERNEL: tl.constexpr, SILU: tl.constexpr, HISTORY: tl.constexpr, TOKENS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Compute all gradients token by token, with the last three inputs and output gradients in registers."""
    batch = tl.program_id(2).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    known = column < channels
    x, dy, dx = x + batch * length * channels, dy + batch * length * channels, dx + batch * length * channels
    first = tl.program_id(0) * TOKENS
    if HISTORY:
        previous += batch * (KERNEL - 1) * channels
        d_previous += batch * (KERNEL - 1) * channels
        first += 1 - KERNEL
    w0, w1 = _tap(weight, column, channels, 0, KERNEL), _tap(weight, column, channels, 1, KERNEL)
    w2, w3 = _tap(weight, column, channels, 2, KERNEL), _tap(weight, column, channels, 3, KERNEL)
    x3 = _token(x, previous, first - 3, column, length, channels, KERNEL, HISTORY)
    x2 = _token(x, previous, first - 2, column, length, channels, KERNEL, HISTORY)
    x1 = _token(x, previous, first - 1, column, length, channels, KERNEL, HISTORY)
    d1, d2, d3 = tl.zeros_like(x1), tl.zeros_like(x1), tl.zeros_like(x1)
    of_w0, of_w1, of_w2, of_w3 = tl.zeros_like(x1), tl.zeros_like(x1), tl.zeros_like(x1), tl.zeros_like(x1)
    xa, da = _both(x, dy, previous, first, column, length, channels, KERNEL, HISTORY)
    xb, db = _both(x, dy, previous, first + 1, column, length, channels, KERNEL, HISTORY)
    xc, dc = _both(x, dy, previous, first + 2, column, length, channels, KERNEL, HISTORY)
    xd, dd = _both(x, dy, previous, first + 3, column, length, channels, KERNEL, HISTORY)
    for n in range(0, TOKENS + 3, 4):
        t = first + n
        # Prefetch for the next iteration.
        next_xa, next_da = _both(x, dy, previous, t + 4, column, length, channels, KERNEL, HISTORY)
        next_xb, next_db = _both(x, dy, previous, t + 5, column, length, channels, KERNEL, HISTORY)
        next_xc, next_dc = _both(x, dy, previous, t + 6, column, length, channels, KERNEL, HISTORY)
        next_xd, next_dd = _both(x, dy, previous, t + 7, column, length, channels, KERNEL, HISTORY)
        for step in tl.static_range(4):
            x0 = xa if step == 0 else xb if step == 1 else xc if step == 2 else xd
            d0 = da if step == 0 else db if step == 1 else dc if step == 2 else dd
            if SILU:
                total = w0 * x0 + w1 * x1 + w2 * x2 + w3 * x3
                gate = sigmoid(total)
                d0 *= gate * (1.0 + total * (1.0 - gate))
            # The next program counts the three tokens after this program's own.
            counted = d0 * tl.where(n + step < TOKENS, 1.0, 0.0)
            of_w0 += counted * x0
            of_w1 += counted * x1
            of_w2 += counted * x2
            of_w3 += counted * x3
            # All outputs that depend on the input three tokens earlier are complete.
            back = t + step - 3
            d_input = w0 * d3 + w1 * d2 + w2 * d1 + w3 * d0
            place = tl.cast(back, tl.int64) * channels
            inside = known & (n + step >= 3) & (back >= 0) & (back < length)
            tl.store(dx + place + column, d_input.to(dx.dtype.element_ty), mask=inside)
            if HISTORY:
                place = (back + (KERNEL - 1)) * channels
                earlier = known & (n + step >= 3) & (back < 0)
                tl.store(d_previous + place + column, d_input.to(d_previous.dtype.element_ty), mask=earlier)
            x3, x2, x1 = x2, x1, x0
            d3, d2, d1 = d2, d1, d0
        xa, xb, xc, xd = next_xa, next_xb, next_xc, next_xd
        da, db, dc, dd = next_da, next_db, next_dc, next_dd
    place = partial + (batch * tl.num_programs(0) + tl.program_id(0)) * KERNEL * channels + column
    tl.store(place + (KERNEL - 1) * channels, of_w0, mask=known)
    if KERNEL > 1:
        tl.store(place + (KERNEL - 2) * channels, of_w1, mask=known)
    if KERNEL > 2:
        tl.store(place + (KERNEL - 3) * channels, of_w2, mask=known)
    if KERNEL > 3:
        tl.store(place + (KERNEL - 4) * channels, of_w3, mask=known)
