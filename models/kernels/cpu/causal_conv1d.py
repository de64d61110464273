"""The causal convolution with its activation in C++, in one pass forward and one backward.

Reference: `models.layers.short_convolution`.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .build import is_supported, run, shared_object


def supports_convolution(x: Tensor, weight: Tensor) -> bool:
    """Return whether `causal_convolution` supports these: a multiple of 16 channels, a kernel of at most 8, a compiler."""
    fits = is_supported(x, weight) and x.shape[-1] % 16 == 0 and weight.shape[1] <= 8 and x.numel() > 0
    return fits and _shared_object(x, weight, True) is not None


def causal_convolution(previous: Tensor | None, x: Tensor, weight: Tensor, silu: bool) -> Tensor:
    """Return the convolution in x's shape [batch, length, channels].

    previous: [batch, kernel - 1, channels], the inputs before x, or None for zeros. weight: [channels, kernel].
    """
    if previous is None:
        previous = x.new_zeros(x.shape[0], weight.shape[1] - 1, x.shape[2])
    return _Convolution.apply(previous, x, weight, silu)


def _shared_object(x: Tensor, weight: Tensor, silu: bool) -> ctypes.CDLL | None:
    columns = next(width for width in (64, 32, 16) if x.shape[-1] % width == 0)
    return shared_object("causal_conv1d", x.dtype, TAPS=weight.shape[1], SILU=int(silu), COLUMNS=columns)


class _Convolution(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, previous: Tensor, x: Tensor, weight: Tensor, silu: bool) -> Tensor:
        previous, x, taps = previous.contiguous(), x.contiguous(), weight.float().t().contiguous()
        ctx.save_for_backward(previous, x, weight)
        ctx.silu = silu
        y = torch.empty_like(x)
        run(_shared_object(x, weight, silu), "forward", previous, x, taps, y, *x.shape)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        previous, x, weight = ctx.saved_tensors
        taps = weight.float().t().contiguous()
        d_previous, dx, d_taps = (
            torch.empty_like(previous),
            torch.empty_like(x),
            taps.new_empty(x.shape[0], *taps.shape),
        )
        compiled = _shared_object(x, weight, ctx.silu)
        run(compiled, "backward", previous, x, taps, dy.contiguous(), d_previous, dx, d_taps, *x.shape)
        return d_previous, dx, d_taps.sum(0).t().to(weight.dtype), None
