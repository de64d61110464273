"""SiLU(gate) * up as one kernel forward and one backward, computed in float32. Reference: `models.layers.mlp.swiglu`.

The gradients of gate and up are adjacent in memory, so that one matmul can take both
(`megatron_lite/parallel/fused_projections.py`).
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .launch import Launch, aligned, over_elements, tl, triton
from .primitives import sigmoid


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """Return SiLU(gate) * up for gate and up of one shape and dtype."""
    return _SwiGLU.apply(gate, up)


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        gate, up = aligned(gate), aligned(up)
        y = torch.empty_like(up)
        if y.numel():
            _launches(up.device, up.dtype, up.numel())[0](gate, up, y)
        ctx.save_for_backward(gate, up)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        width = gate.shape[-1]
        gradients = gate.new_empty(*gate.shape[:-1], 2 * width)
        if up.numel():
            _backward_launch(up.device, up.dtype, up.numel(), width)(aligned(dy), gate, up, gradients)
        dgate, dup = gradients.split(width, dim=-1)
        return dgate, dup


@lru_cache(4096)
def _backward_launch(device: torch.device, dtype: torch.dtype, numel: int, width: int) -> Launch:
    return Launch(
        _swiglu_backward, (-(-numel // _BLOCK),), numel, width, 8 if width % 8 == 0 else 1, _BLOCK, num_warps=4
    )


_BLOCK = 2048


@triton.jit
def _swiglu_forward(gate, up, y, N, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    a = tl.load(gate + i, mask=i < N, other=0.0).to(tl.float32)
    b = tl.load(up + i, mask=i < N, other=0.0).to(tl.float32)
    tl.store(y + i, (a * sigmoid(a) * b).to(y.dtype.element_ty), mask=i < N)


@triton.jit
def _swiglu_backward(dy, gate, up, side_by_side, N, WIDTH: tl.constexpr, VECTOR: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    d = tl.load(dy + i, mask=i < N, other=0.0).to(tl.float32)
    a = tl.load(gate + i, mask=i < N, other=0.0).to(tl.float32)
    b = tl.load(up + i, mask=i < N, other=0.0).to(tl.float32)
    s = sigmoid(a)
    # A row never ends inside a vector; the compiler needs this hint.
    at = tl.max_contiguous(tl.multiple_of(i + i // WIDTH * WIDTH, VECTOR), VECTOR)
    dgate, dup = d * b * s * (1.0 + a * (1.0 - s)), d * a * s
    tl.store(side_by_side + at, dgate.to(side_by_side.dtype.element_ty), mask=i < N)
    tl.store(side_by_side + (at + WIDTH), dup.to(side_by_side.dtype.element_ty), mask=i < N)


_launches = over_elements(_swiglu_forward, block=_BLOCK)
