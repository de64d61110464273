"""The depthwise causal convolution with its SiLU: one kernel forward, one backward, each reading its inputs once.

Definition and the form in plain PyTorch: `models/convolution.py`. torch's own depthwise convolution wants the channels
before the tokens, which costs two copies each way, and leaves the activation to another kernel. The gradient of the
weight is summed by every program over its own tokens, and over programs afterwards, so that it does not depend on their
order.
"""

# Kernels take pointers and scalars that have no Python type.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

try:
    import triton
    import triton.language as tl
except ImportError as error:
    raise ImportError("the convolution's kernels need Triton: pip install triton") from error

# Tokens and channels of a program. A channel's tokens are read `kernel` times each, from the cache.
_ROWS, _COLUMNS = 16, 256


def causal_convolution(before: Tensor, x: Tensor, weight: Tensor, silu: bool) -> Tensor:
    """y_t = f(sum_j weight[:, j] x_{t - kernel + 1 + j}), computed in float32.

    before: [batch, kernel - 1, channels], the inputs before x: [batch, length, channels]; weight: [channels, kernel];
    f is SiLU or the identity. Returns y in x's shape and dtype.
    """
    return _Convolution.apply(before, x, weight, silu)


class _Convolution(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, before: Tensor, x: Tensor, weight: Tensor, silu: bool) -> Tensor:
        before, x, weight = before.contiguous(), x.contiguous(), weight.contiguous()
        y = torch.empty_like(x)
        batch, length, channels = x.shape
        grid = (triton.cdiv(length, _ROWS), triton.cdiv(channels, _COLUMNS), batch)
        if x.numel():
            _forward[grid](before, x, weight, y, length, channels, weight.shape[1], silu, _ROWS, _COLUMNS, num_warps=4)
        ctx.save_for_backward(before, x, weight)
        ctx.silu = silu
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        before, x, weight = ctx.saved_tensors
        batch, length, channels = x.shape
        kernel = weight.shape[1]
        d_before, dx = torch.empty_like(before), torch.empty_like(x)
        # The tokens before x are rows of the same problem: they take part in the sums and have a gradient.
        rows = triton.cdiv(length + kernel - 1, _ROWS)
        partial = torch.zeros(batch, rows, kernel, channels, dtype=torch.float32, device=x.device)
        grid = (rows, triton.cdiv(channels, _COLUMNS), batch)
        if rows:
            _backward[grid](
                dy.contiguous(), before, x, weight, d_before, dx, partial, length, channels, kernel, ctx.silu, _ROWS,
                _COLUMNS, num_warps=4,
            )  # fmt: skip
        return d_before, dx, partial.sum((0, 1)).t().to(weight.dtype), None


@triton.jit
def _read(before, x, batch, row, column, length, channels, KERNEL: tl.constexpr):
    """Inputs at `row` from -(KERNEL - 1) on, zero outside, float32; column is masked by the caller's bound."""
    inside = ((row >= 0) & (row < length))[:, None] & (column < channels)[None, :]
    earlier = ((row < 0) & (row >= 1 - KERNEL))[:, None] & (column < channels)[None, :]
    at = (batch * length + row).to(tl.int64)[:, None] * channels + column[None, :]
    value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    if KERNEL > 1:
        at = (batch * (KERNEL - 1) + row + KERNEL - 1).to(tl.int64)[:, None] * channels + column[None, :]
        value += tl.load(before + at, mask=earlier, other=0.0).to(tl.float32)
    return value


@triton.jit
def _sum(before, x, weight, batch, row, column, length, channels, KERNEL: tl.constexpr):
    """The convolution at `row`, before the activation."""
    total = tl.zeros((row.shape[0], column.shape[0]), tl.float32)
    for j in tl.static_range(KERNEL):
        tap = tl.load(weight + column * KERNEL + j, mask=column < channels, other=0.0).to(tl.float32)
        total += tap[None, :] * _read(before, x, batch, row + (j + 1 - KERNEL), column, length, channels, KERNEL)
    return total


@triton.jit
def _forward(
    before, x, weight, y, length, channels,
    KERNEL: tl.constexpr, SILU: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    batch = tl.program_id(2)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    total = _sum(before, x, weight, batch, row, column, length, channels, KERNEL)
    if SILU:
        total = total * tl.sigmoid(total)
    at = (batch * length + row).to(tl.int64)[:, None] * channels + column[None, :]
    tl.store(y + at, total.to(y.dtype.element_ty), mask=(row < length)[:, None] & (column < channels)[None, :])


@triton.jit
def _backward(
    dy, before, x, weight, d_before, dx, partial, length, channels,
    KERNEL: tl.constexpr, SILU: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    block, batch = tl.program_id(0), tl.program_id(2)
    row = block * ROWS + tl.arange(0, ROWS) + (1 - KERNEL)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    known = column < channels
    d_input = tl.zeros((ROWS, COLUMNS), tl.float32)
    for i in tl.static_range(KERNEL):
        # The output i tokens on, which reads this row with its tap KERNEL - 1 - i.
        later = row + i
        valid = ((later >= 0) & (later < length))[:, None] & known[None, :]
        at = (batch * length + later).to(tl.int64)[:, None] * channels + column[None, :]
        gradient = tl.load(dy + at, mask=valid, other=0.0).to(tl.float32)
        if SILU:
            total = _sum(before, x, weight, batch, later, column, length, channels, KERNEL)
            gate = tl.sigmoid(total)
            gradient *= gate * (1.0 + total * (1.0 - gate))
        tap = tl.load(weight + column * KERNEL + (KERNEL - 1 - i), mask=known, other=0.0).to(tl.float32)
        d_input += tap[None, :] * gradient
        value = _read(before, x, batch, row, column, length, channels, KERNEL)
        place = ((batch * tl.num_programs(0) + block) * KERNEL + (KERNEL - 1 - i)).to(tl.int64) * channels
        tl.store(partial + place + column, tl.sum(gradient * value, 0), mask=known)
    at = (batch * length + row).to(tl.int64)[:, None] * channels + column[None, :]
    inside = ((row >= 0) & (row < length))[:, None] & known[None, :]
    tl.store(dx + at, d_input.to(dx.dtype.element_ty), mask=inside)
    if KERNEL > 1:
        at = (batch * (KERNEL - 1) + row + KERNEL - 1).to(tl.int64)[:, None] * channels + column[None, :]
        earlier = ((row < 0) & (row >= 1 - KERNEL))[:, None] & known[None, :]
        tl.store(d_before + at, d_input.to(d_before.dtype.element_ty), mask=earlier)
