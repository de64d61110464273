"""SiLU(gate) * up as one kernel forward and one backward, computed in float32. Reference: `models.mlp.swiglu`."""

# Kernels take pointers and scalars that have no Python type.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .launch import aligned, over_elements

try:
    import triton
    import triton.language as tl
except ImportError as error:
    raise ImportError("the kernels of SwiGLU need Triton: pip install triton") from error


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """SiLU(gate) * up, of one shape and dtype."""
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
        dgate, dup = torch.empty_like(gate), torch.empty_like(up)
        if up.numel():
            _launches(up.device, up.dtype, up.numel())[1](aligned(dy), gate, up, dgate, dup)
        return dgate, dup


@triton.jit
def _forward(gate, up, y, N, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    a = tl.load(gate + i, mask=i < N, other=0.0).to(tl.float32)
    b = tl.load(up + i, mask=i < N, other=0.0).to(tl.float32)
    tl.store(y + i, (a * tl.sigmoid(a) * b).to(y.dtype.element_ty), mask=i < N)


@triton.jit
def _backward(dy, gate, up, dgate, dup, N, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    d = tl.load(dy + i, mask=i < N, other=0.0).to(tl.float32)
    a = tl.load(gate + i, mask=i < N, other=0.0).to(tl.float32)
    b = tl.load(up + i, mask=i < N, other=0.0).to(tl.float32)
    s = tl.sigmoid(a)
    tl.store(dgate + i, (d * b * s * (1.0 + a * (1.0 - s))).to(dgate.dtype.element_ty), mask=i < N)
    tl.store(dup + i, (d * a * s).to(dup.dtype.element_ty), mask=i < N)


_launches = over_elements(_forward, _backward, block=2048)
