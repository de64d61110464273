"""MetaLA's epilogue as one kernel forward and one backward, each reading its inputs once.

Reference and definition: `models/operators/metala.py`. The backward pass forms everything again from the inputs; the gradient
of the augmentation weight is summed by every program over its own tokens, and over programs afterwards, so that it
does not depend on their order.
"""

# Kernels take pointers and scalars that have no Python type.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..launch import Launch, aligned
from ..primitives import sigmoid, sum_parts

try:
    import triton
    import triton.language as tl
except ImportError as error:
    raise ImportError(
        "MetaLA's epilogue kernels need Triton (pip install triton); form='reference' does not"
    ) from error


def epilogue(o: Tensor, q: Tensor, k: Tensor, v: Tensor, aug_weight: Tensor | None, gate: Tensor, eps: float) -> Tensor:
    """Arguments and result as `metala_epilogue`."""
    return _Epilogue.apply(o, q, k, v, aug_weight, gate, eps)


class _Epilogue(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, o: Tensor, q: Tensor, k: Tensor, v: Tensor, aug_weight: Tensor | None, gate: Tensor, eps: float
    ) -> Tensor:
        o, q, k, v, gate = (aligned(x) for x in (o, q, k, v, gate))
        y = torch.empty(gate.shape, dtype=o.dtype, device=o.device)
        case = o.device, o.dtype, None if aug_weight is None else aug_weight.dtype, o.shape, q.shape[-1], eps
        if o.numel():
            _launches(*case)[0](o, q, k, v, aug_weight, gate, y)
        ctx.save_for_backward(o, q, k, v, aug_weight, gate)
        ctx.case = case
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        o, q, k, v, aug_weight, gate = ctx.saved_tensors
        do, dgate = torch.empty_like(o), torch.empty_like(gate)
        dq = dk = dv = partial = None
        if aug_weight is not None:
            dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
            programs = _programs(o.shape, *_BACKWARD[:2])[1]
            partial = torch.empty(programs, aug_weight.numel(), dtype=torch.float32, device=o.device)
        if o.numel():
            launch = _launches(*ctx.case)[1]
            launch(aligned(dy), o, q, k, v, aug_weight, gate, do, dq, dk, dv, None, partial, dgate)
        d_weight = None if partial is None else sum_parts(partial[None], aug_weight.dtype)[0]
        return do, dq, dk, dv, d_weight, dgate, None


def forward_apart(o: Tensor, q: Tensor, k: Tensor, v: Tensor, aug_weight: Tensor, gate: Tensor, eps: float) -> Tensor:
    """`epilogue` of contiguous tensors, which autograd does not see."""
    y = torch.empty(gate.shape, dtype=o.dtype, device=o.device)
    _launches(o.device, o.dtype, aug_weight.dtype, o.shape, q.shape[-1], eps)[0](o, q, k, v, aug_weight, gate, y)
    return y


def backward_apart(
    dy: Tensor, o: Tensor, q: Tensor, k: Tensor, v: Tensor, aug_weight: Tensor, gate: Tensor, eps: float, dv: Tensor,
    dgate: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradient of o; of s, float32 [batch, length, heads]; of aug_weight. That of gate, and that of v from the
    augmentation, are written to dgate and dv, [batch, length, heads * head_dim_v] with one stride from token to token.

    With ds, q and k have dq_tc = ds_t w_c k_tc and dk_tc = ds_t w_c q_tc, which are added where more of them is at hand.
    """
    do = torch.empty_like(o)
    d_strength = torch.empty(o.shape[:3], dtype=torch.float32, device=o.device)
    programs = _programs(o.shape, *_BACKWARD[:2])[1]
    partial = torch.empty(programs, aug_weight.numel(), dtype=torch.float32, device=o.device)
    case = o.device, o.dtype, aug_weight.dtype, o.shape, q.shape[-1], eps, dgate.stride(1)
    _launches(*case)[1](dy, o, q, k, v, aug_weight, gate, do, None, None, dv, d_strength, partial, dgate)
    return do, d_strength, sum_parts(partial[None], aug_weight.dtype)[0]


@lru_cache(4096)
def _launches(
    device: torch.device,
    dtype: torch.dtype,
    weight: torch.dtype | None,
    shape: torch.Size,
    dim_k: int,
    eps: float,
    apart: int = 0,
) -> tuple[Launch, Launch]:
    """Forward and backward for o of this shape; apart: the stride of dgate for `backward_apart`, or 0."""
    batch, length, heads, dim_v = shape
    sizes = batch * length, heads, eps, dim_k, dim_v, triton.next_power_of_2(dim_k), triton.next_power_of_2(dim_v)

    def launch(kernel: Any, elements: int, programs: int, warps: int, *constants: Any) -> Launch:
        rows, grid = _programs(shape, elements, programs)
        values = *sizes, rows, weight is not None, *constants
        return Launch(kernel, (grid, heads), *values, num_warps=warps, num_stages=1)

    return launch(_epilogue_forward, *_FORWARD), launch(
        _epilogue_backward, *_BACKWARD, apart or heads * dim_v, apart > 0
    )


# Elements of a tile, programs in all, warps: measured on an H200. The backward pass keeps so much of a token that one warp
# with one of them is the fastest (165 us; 183 with two, 245 with eight in four warps).
_FORWARD = 512, 4096, 1
_BACKWARD = 128, 16384, 1


def _programs(shape: torch.Size, elements: int, programs: int) -> tuple[int, int]:
    """Rows of a tile and programs a head; these stay while there are tokens for all."""
    batch, length, heads, dim_v = shape
    rows = max(1, elements // triton.next_power_of_2(dim_v))
    return rows, min(triton.cdiv(batch * length, rows), max(1, programs // heads))


@triton.jit
def _tile(x, t, d, h, T, H, D: tl.constexpr, BD: tl.constexpr):
    """Addresses and mask of [tokens, channels] of head h in x: [tokens, heads, D]."""
    mask = (t < T)[:, None]
    if D % BD != 0:
        mask = mask & (d < D)[None, :]
    return x + (t[:, None].to(tl.int64) * H + h) * D + d[None, :], mask


@triton.jit
def _load(x, t, d, h, T, H, D: tl.constexpr, BD: tl.constexpr):
    address, mask = _tile(x, t, d, h, T, H, D, BD)
    return tl.load(address, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _store(x, value, t, d, h, T, H, D: tl.constexpr, BD: tl.constexpr):
    address, mask = _tile(x, t, d, h, T, H, D, BD)
    tl.store(address, value.to(x.dtype.element_ty), mask=mask)


@triton.jit
def _half_tanh(x):
    """sigmoid(x) - 1/2, to full relative precision near 0 too."""
    near = x * (0.25 + x * x * (-1.0 / 48.0 + x * x * (1.0 / 480.0 - x * x * (17.0 / 80640.0))))
    return tl.where(tl.abs(x) < 0.25, near, sigmoid(x) - 0.5)


@triton.jit
def _normalise(x, d, eps, V: tl.constexpr, BV: tl.constexpr):
    """(x - mean) / std a row, 0 beyond V; and 1 / std."""
    x = x - (tl.sum(x, 1) / V)[:, None]
    if V != BV:
        x = tl.where((d < V)[None, :], x, 0.0)
    inverse = 1.0 / tl.sqrt(tl.sum(x * x, 1) / V + eps)
    return x * inverse[:, None], inverse


@triton.jit
def _epilogue_forward(
    o, q, k, v, aug_weight, gate, y, T, H, eps,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, BT: tl.constexpr, AUGMENT: tl.constexpr,
):  # fmt: skip
    h = tl.program_id(1)
    ck, cv = tl.arange(0, BK), tl.arange(0, BV)
    if AUGMENT:
        weight = tl.load(aug_weight + h * K + ck, mask=ck < K, other=0.0).to(tl.float32)
    for start in range(tl.program_id(0) * BT, T, tl.num_programs(0) * BT):
        t = start + tl.arange(0, BT)
        x = _load(o, t, cv, h, T, H, V, BV)
        u = _load(gate, t, cv, h, T, H, V, BV)
        if AUGMENT:
            qk = _load(q, t, ck, h, T, H, K, BK) * _load(k, t, ck, h, T, H, K, BK)
            strength = tl.sum(qk * weight[None, :], 1)
            x += _half_tanh(strength[:, None] * _load(v, t, cv, h, T, H, V, BV))
        normal, _ = _normalise(x, cv, eps, V, BV)
        _store(y, normal * u * sigmoid(u), t, cv, h, T, H, V, BV)


@triton.jit
def _epilogue_backward(
    dy, o, q, k, v, aug_weight, gate, do, dq, dk, dv, d_strengths, partial, dgate, T, H, eps,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, BT: tl.constexpr, AUGMENT: tl.constexpr,
    STRIDE: tl.constexpr, APART: tl.constexpr,
):  # fmt: skip
    h = tl.program_id(1)
    ck, cv = tl.arange(0, BK), tl.arange(0, BV)
    if AUGMENT:
        weight = tl.load(aug_weight + h * K + ck, mask=ck < K, other=0.0).to(tl.float32)
        d_weight = tl.zeros([BK], tl.float32)
    for start in range(tl.program_id(0) * BT, T, tl.num_programs(0) * BT):
        t = start + tl.arange(0, BT)
        x = _load(o, t, cv, h, T, H, V, BV)
        u = _load(gate, t, cv, h, T, H, V, BV)
        grad = _load(dy, t, cv, h, T, H, V, BV)
        if AUGMENT:
            query, key = _load(q, t, ck, h, T, H, K, BK), _load(k, t, ck, h, T, H, K, BK)
            value = _load(v, t, cv, h, T, H, V, BV)
            strength = tl.sum(query * key * weight[None, :], 1)
            augmentation = _half_tanh(strength[:, None] * value)
            x += augmentation
        normal, inverse = _normalise(x, cv, eps, V, BV)
        s = sigmoid(u)
        d_gate = grad * normal * s * (1.0 + u * (1.0 - s))
        at = t[:, None].to(tl.int64) * STRIDE + h * V + cv[None, :]
        inside = (t < T)[:, None] & (cv < V)[None, :]
        tl.store(dgate + at, d_gate.to(dgate.dtype.element_ty), mask=inside)
        d_normal = grad * u * s
        d_normal -= (tl.sum(d_normal, 1) / V)[:, None] + normal * (tl.sum(d_normal * normal, 1) / V)[:, None]
        d_x = d_normal * inverse[:, None]
        _store(do, d_x, t, cv, h, T, H, V, BV)
        if AUGMENT:
            d_product = d_x * (0.25 - augmentation * augmentation)
            d_strength = tl.sum(d_product * value, 1)
            tl.store(dv + at, (d_product * strength[:, None]).to(dv.dtype.element_ty), mask=inside)
            if APART:
                tl.store(d_strengths + t.to(tl.int64) * H + h, d_strength, mask=t < T)
            else:
                _store(dq, d_strength[:, None] * weight[None, :] * key, t, ck, h, T, H, K, BK)
                _store(dk, d_strength[:, None] * weight[None, :] * query, t, ck, h, T, H, K, BK)
            d_strength = d_strength[:, None]
            d_weight += tl.sum(d_strength * query * key, 0)
    if AUGMENT:
        tl.store(partial + (tl.program_id(0) * H + h) * K + ck, d_weight, mask=ck < K)
