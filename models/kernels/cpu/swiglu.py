"""SiLU(gate) * up in C++, in one pass forward and one backward. Reference: `models.layers.mlp`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .build import is_supported, run, shared_object


def supports_swiglu(gate: Tensor, up: Tensor) -> bool:
    """Return whether `swiglu` supports these: a multiple of 16 channels, and a compiler is installed."""
    return (
        is_supported(gate, up)
        and up.shape[-1] % 16 == 0
        and up.numel() > 0
        and shared_object("swiglu", up.dtype) is not None
    )


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """Return SiLU(gate) * up for gate and up [..., width]. Their gradients are adjacent in one matrix."""
    return _SwiGLU.apply(gate, up)


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        gate, up = gate.contiguous(), up.contiguous()
        ctx.save_for_backward(gate, up)
        y = torch.empty_like(up)
        run(shared_object("swiglu", up.dtype), "forward", gate, up, y, y.numel())
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        width = up.shape[-1]
        d_gate, d_up = up.new_empty(*up.shape[:-1], 2 * width).split(width, -1)
        rows = up.numel() // width
        compiled = shared_object("swiglu", up.dtype)
        run(compiled, "backward", gate, up, dy.contiguous(), d_gate, d_up, rows, width, 2 * width)
        return d_gate, d_up
