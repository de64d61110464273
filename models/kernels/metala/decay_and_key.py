"""MetaLA's log decay and key from its gate projection, one kernel forward and one backward.

    g = logsigmoid(a) / 16      k = 1 - exp(g)      da = (dg - dk exp(g)) sigmoid(-a) / 16
Reference: `models.mixers.metala.decay_and_key`. a has 16 bits, g float32: formed by PyTorch's kernels the float32 values in
between are read and written six times.
"""

# Kernels take pointers and scalars that have no Python type.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..launch import aligned, over_elements

try:
    import triton
    import triton.language as tl
except ImportError as error:
    raise ImportError("MetaLA's kernels need Triton: pip install triton") from error


def decay_and_key(a: Tensor) -> tuple[Tensor, Tensor]:
    """log decay in float32 and key in a's dtype, both of a's shape."""
    return _DecayAndKey.apply(a)


class _DecayAndKey(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a: Tensor) -> tuple[Tensor, Tensor]:
        a = aligned(a)
        log_decay, key = torch.empty_like(a, dtype=torch.float32), torch.empty_like(a)
        if a.numel():
            _launches(a.device, a.dtype, a.numel())[0](a, log_decay, key)
        ctx.save_for_backward(a)
        return log_decay, key

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_log_decay: Tensor, d_key: Tensor) -> Tensor:
        (a,) = ctx.saved_tensors
        da = torch.empty_like(a)
        if a.numel():
            _launches(a.device, a.dtype, a.numel())[1](aligned(d_log_decay), aligned(d_key), a, da)
        return da


@triton.jit
def _log_decay(a):
    z = tl.exp2(tl.abs(a) * -1.4426950408889634)
    # log(1 + z) as 2 artanh(z / (2 + z)), to full relative precision: z is at most 1, the series' next term under 2e-8.
    x = z / (2.0 + z)
    y = x * x
    series = 1.0 + y * (1.0 / 3 + y * (0.2 + y * (1.0 / 7 + y * (1.0 / 9 + y * (1.0 / 11 + y * (1.0 / 13))))))
    return (tl.minimum(a, 0.0) - 2.0 * x * series) * 0.0625


@triton.jit
def _decay_and_key_forward(a, log_decay, key, N, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    g = _log_decay(tl.load(a + i, mask=i < N, other=0.0).to(tl.float32))
    tl.store(log_decay + i, g, mask=i < N)
    # 1 - exp(g) loses its digits where g is small; the series ends where the next term is under 1e-8 of the sum.
    series = -g * (1.0 + g * (0.5 + g * (1.0 / 6 + g * (1.0 / 24 + g * (1.0 / 120 + g * (1.0 / 720))))))
    k = tl.where(g > -0.125, series, 1.0 - tl.exp2(g * 1.4426950408889634))
    tl.store(key + i, k.to(key.dtype.element_ty), mask=i < N)


@triton.jit
def _decay_and_key_backward(d_log_decay, d_key, a, da, N, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(a + i, mask=i < N, other=0.0).to(tl.float32)
    dg = tl.load(d_log_decay + i, mask=i < N, other=0.0)
    dk = tl.load(d_key + i, mask=i < N, other=0.0).to(tl.float32)
    d = (dg - dk * tl.exp(_log_decay(x))) * tl.sigmoid(-x) * 0.0625
    tl.store(da + i, d.to(da.dtype.element_ty), mask=i < N)


_launches = over_elements(_decay_and_key_forward, _decay_and_key_backward, block=1024)
