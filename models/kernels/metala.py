"""MetaLA's kernels: decay and key, epilogue, and the core of a layer, which is decay, key, GLA and epilogue in one node.

    g = logsigmoid(a) / 16      k = 1 - exp(g)      da = (dg - dk exp(g)) sigmoid(-a) / 16

a has 16 bits, g float32. PyTorch's own kernels would read and write intermediate float32 values six times.
GLA and the self-augmentation both read q, k and v, and k and g are functions of a. The kernel of GLA's gradients
(`models/kernels/gla/chunk_output.py`) therefore adds up both gradients of q, k and v, and computes that of a. The gradients of q,
a, v and the output gate are adjacent in memory, so that one matmul can take them.
Both passes of the epilogue read their inputs once. A row is one head of one token; a tile has some heads of some tokens, so that
narrow rows are adjacent in memory. Every program sums the gradient of the augmentation weight over its tokens, and a second
kernel sums over programs in a fixed order. The epilogue of the core can write FP8 rows instead of 16 bits (`attach_rows`).
Reference: `models/operators/metala.py`.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..recompute import recomputable
from .gla.gla import GLACase, backward, case_of, forward
from .launch import Launch, aligned, dtypes, over_elements, tl, triton
from .primitives import attach_rows, fp8_scale, magnitude_bits, sigmoid, sum_parts, unwritten


def metala_core(
    q: Tensor, a: Tensor, v: Tensor, aug_weight: Tensor, gate: Tensor, scale: float, initial_state: Tensor | None,
    cu_seqlens: Tensor | None, eps: float = 1e-5, fp8_output: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return the output and the final states of `models.operators.metala.metala`.

    q, a: [batch, length, heads, head_dim_k]; scale above 0; the other arguments as in that function. Raises ValueError as
    `models.kernels.gla.gla.gla`.
    """
    case = case_of(q, a, v, scale, initial_state, cu_seqlens, aug_weight.dtype)
    initial_state = None if initial_state is None else initial_state.float()
    return _MetaLACore.apply(q, a, v, aug_weight, gate, initial_state, cu_seqlens, case, eps, fp8_output)


class _MetaLACore(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, a: Tensor, v: Tensor, aug_weight: Tensor, gate: Tensor, initial: Tensor | None,
        cu_seqlens: Tensor | None, case: GLACase, eps: float, fp8_output: bool,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        q, a, v, gate, aug_weight = *(aligned(x) for x in (q, a, v, gate)), aug_weight.contiguous()
        g, k = decay_and_key(a)
        recomputable((g, k), decay_and_key, a)
        o, final, saved = forward(case, q, k, v, g, initial, cu_seqlens)
        if fp8_output:
            y = epilogue_rows(o, q, k, v, aug_weight, gate, eps)
        else:
            y = epilogue_forward(o, q, k, v, aug_weight, gate, eps)
            recomputable(y, epilogue_forward, o, q, k, v, aug_weight, gate, eps)
        ctx.save_for_backward(o, aug_weight, gate, q, k, v, g, initial, *saved)
        ctx.case, ctx.eps = case, eps
        ctx.set_materialize_grads(False)
        return y, final

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor | None, d_final: Tensor | None) -> tuple[Tensor | None, ...]:
        o, aug_weight, gate, *saved = ctx.saved_tensors
        q, k, v, g = saved[:4]
        dy = torch.zeros_like(gate) if dy is None else aligned(dy)
        key_dim, value_dim = q.shape[2] * q.shape[3], gate.shape[2]
        gradients = q.new_empty(*q.shape[:2], 2 * (key_dim + value_dim))
        dq, da, dv, d_gate = gradients.split([key_dim, key_dim, value_dim, value_dim], dim=-1)
        do, d_strength, d_weight = epilogue_backward(dy, o, q, k, v, aug_weight, gate, ctx.eps, dv, d_gate)
        dg = torch.empty_like(g)  # scratch for chunks of the exact form
        d_initial = backward(ctx.case, do, d_final, dq, da, dv, dg, (d_strength, aug_weight), *saved)
        heads = q.shape[2]
        dq, da, dv = (x.unflatten(-1, (heads, -1)) for x in (dq, da, dv))
        return dq, da, dv, d_weight, d_gate, d_initial, None, None, None, None


def decay_and_key(a: Tensor) -> tuple[Tensor, Tensor]:
    """Return the log decay in float32 and the key in a's dtype, both of a's shape."""
    return _DecayAndKey.apply(a)


class _DecayAndKey(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a: Tensor) -> tuple[Tensor, Tensor]:
        a = aligned(a)
        log_decay, key = torch.empty_like(a, dtype=torch.float32), torch.empty_like(a)
        if a.numel():
            _gate_launches(a.device, a.dtype, a.numel())[0](a, log_decay, key)
        ctx.save_for_backward(a)
        return log_decay, key

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_log_decay: Tensor, d_key: Tensor) -> Tensor:
        (a,) = ctx.saved_tensors
        da = torch.empty_like(a)
        if a.numel():
            _gate_launches(a.device, a.dtype, a.numel())[1](aligned(d_log_decay), aligned(d_key), a, da)
        return da


@triton.jit
def _log_decay(a):
    z = tl.exp2(tl.abs(a) * -1.4426950408889634)
    # log(1 + z) = 2 artanh(z / (2 + z)), to full relative precision: z is at most 1, the next term below 2e-8.
    x = z / (2.0 + z)
    y = x * x
    series = 1.0 + y * (1.0 / 3 + y * (0.2 + y * (1.0 / 7 + y * (1.0 / 9 + y * (1.0 / 11 + y * (1.0 / 13))))))
    return (tl.minimum(a, 0.0) - 2.0 * x * series) * 0.0625


@triton.jit
def _decay_and_key_forward(a, log_decay, key, N, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    g = _log_decay(tl.load(a + i, mask=i < N, other=0.0).to(tl.float32))
    tl.store(log_decay + i, g, mask=i < N)
    # 1 - exp(g) cancels for small g. The next term of the series is below 1e-8 of the sum.
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


_gate_launches = over_elements(_decay_and_key_forward, _decay_and_key_backward, block=1024)


def epilogue(o: Tensor, q: Tensor, k: Tensor, v: Tensor, aug_weight: Tensor | None, gate: Tensor, eps: float) -> Tensor:
    """Compute `models.operators.metala.metala_epilogue`."""
    return _Epilogue.apply(o, q, k, v, aug_weight, gate, eps)


class _Epilogue(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, o: Tensor, q: Tensor, k: Tensor, v: Tensor, aug_weight: Tensor | None, gate: Tensor, eps: float
    ) -> Tensor:
        o, q, k, v, gate = (aligned(x) for x in (o, q, k, v, gate))
        aug_weight = None if aug_weight is None else aug_weight.contiguous()
        ctx.save_for_backward(o, q, k, v, aug_weight, gate)
        ctx.case = _case(eps, o, q, k, v, aug_weight, gate)
        return epilogue_forward(o, q, k, v, aug_weight, gate, eps)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        o, q, k, v, aug_weight, gate = ctx.saved_tensors
        do, dgate = torch.empty_like(o), torch.empty_like(gate)
        dq = dk = dv = partial = None
        if aug_weight is not None:
            dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
            partial = o.new_empty(_grid(o.shape, *_BACKWARD[:2])[2], aug_weight.numel(), dtype=torch.float32)
        if o.numel():
            _launches(*ctx.case)[1](aligned(dy), o, q, k, v, aug_weight, gate, do, dq, dk, dv, None, partial, dgate)
        d_weight = None if partial is None else sum_parts(partial[None], aug_weight.dtype)[0]
        return do, dq, dk, dv, d_weight, dgate, None


def epilogue_forward(
    o: Tensor, q: Tensor, k: Tensor, v: Tensor, aug_weight: Tensor | None, gate: Tensor, eps: float
) -> Tensor:
    """Compute `epilogue` of contiguous tensors, without autograd."""
    y = torch.empty(gate.shape, dtype=o.dtype, device=o.device)
    if o.numel():
        _launches(*_case(eps, o, q, k, v, aug_weight, gate))[0](o, q, k, v, aug_weight, gate, y)
    return y


def epilogue_rows(o: Tensor, q: Tensor, k: Tensor, v: Tensor, aug_weight: Tensor, gate: Tensor, eps: float) -> Tensor:
    """Compute `epilogue_forward` with FP8 rows alone: one scale per token. The result's 16-bit numbers read as NaN."""
    y = unwritten(gate)
    rows = attach_rows(y)
    if o.numel():
        _rows_launch(*_case(eps, o, q, k, v, aug_weight, gate))(o, q, k, v, aug_weight, gate, y, *rows)
    return y


def _case(eps: float, o: Tensor, q: Tensor, *others: Tensor | None) -> tuple[Any, ...]:
    return o.device, dtypes(o, q, *others), o.shape, q.shape[-1], eps


def epilogue_backward(
    dy: Tensor, o: Tensor, q: Tensor, k: Tensor, v: Tensor, aug_weight: Tensor, gate: Tensor, eps: float, dv: Tensor,
    dgate: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the gradients of o, of s (float32 [batch, length, heads]) and of aug_weight.

    The gradient of gate, and that of v from the augmentation, are written to dgate and dv. Both are [batch, length, heads *
    head_dim_v] with one stride between tokens. The caller adds dq_tc = ds_t w_c k_tc and dk_tc = ds_t w_c q_tc.
    """
    do = torch.empty_like(o)
    d_strength = torch.empty(o.shape[:3], dtype=torch.float32, device=o.device)
    partial = o.new_empty(_grid(o.shape, *_BACKWARD[:2])[2], aug_weight.numel(), dtype=torch.float32)
    _launches(*_case(eps, o, q, k, v, aug_weight, gate), dgate.stride(1))[1](
        dy, o, q, k, v, aug_weight, gate, do, None, None, dv, d_strength, partial, dgate
    )
    return do, d_strength, sum_parts(partial[None], aug_weight.dtype)[0]


@lru_cache(4096)
def _launches(
    device: torch.device, key: tuple[torch.dtype | None, ...], shape: torch.Size, dim_k: int, eps: float,
    gradient_stride: int = 0,
) -> tuple[Launch, Launch]:  # fmt: skip
    """Return the forward and the backward launch for o of this shape. key: `dtypes` of o, q, k, v, aug_weight and gate.

    gradient_stride: elements from one token of dgate to the next in `epilogue_backward`, else 0.
    """
    batch, length, heads, dim_v = shape
    sizes = batch * length, heads, eps, dim_k, dim_v, triton.next_power_of_2(dim_k), triton.next_power_of_2(dim_v)

    def launch(kernel: Any, elements: int, programs: int, warps: int, *constants: Any) -> Launch:
        tile_tokens, tile_heads, grid = _grid(shape, elements, programs)
        values = *sizes, tile_tokens, tile_heads, key[4] is not None, *constants
        return Launch(kernel, (grid, heads // tile_heads), *values, num_warps=warps, num_stages=1)

    return launch(_epilogue_forward, *_FORWARD), launch(
        _epilogue_backward, *_BACKWARD, gradient_stride or heads * dim_v, gradient_stride > 0
    )


@lru_cache(4096)
def _rows_launch(
    device: torch.device, key: tuple[torch.dtype | None, ...], shape: torch.Size, dim_k: int, eps: float
) -> Launch:
    """Return the launch of `_epilogue_rows`. A program computes whole tokens, with as many numbers per warp as `_FORWARD`."""
    tokens, heads, dim_v = shape[0] * shape[1], *shape[2:]
    blocks = tuple(triton.next_power_of_2(x) for x in (dim_k, dim_v, heads))
    warps = min(16, max(1, blocks[1] * blocks[2] // _FORWARD[0]))
    values = tokens, heads, eps, dim_k, dim_v, *blocks
    return Launch(_epilogue_rows, (min(tokens, _FORWARD[1] // warps),), *values, num_warps=warps, num_stages=1)


# Elements per tile, programs, warps: the fastest measured on an H200. The backward pass needs so many registers per token that
# one warp with one token is the fastest.
_FORWARD = 512, 4096, 1
_BACKWARD = 128, 16384, 1


def _grid(shape: torch.Size, elements: int, programs: int) -> tuple[int, int, int]:
    """Return tokens and heads per tile, and programs per tile of heads. With enough tokens these do not depend on the tokens."""
    batch, length, heads, dim_v = shape
    rows = max(1, elements // triton.next_power_of_2(dim_v))
    tile_heads = min(rows, heads & -heads)  # a power of two that divides the heads
    grid = min(triton.cdiv(batch * length, rows // tile_heads), max(1, programs * tile_heads // heads))
    return rows // tile_heads, tile_heads, grid


@triton.jit
def _tile(x, r, d, R, D: tl.constexpr, BD: tl.constexpr):
    """Return addresses and mask of channels d of rows r in x: [R, D]."""
    mask = (r < R)[:, None]
    if D % BD != 0:
        mask = mask & (d < D)[None, :]
    return x + r[:, None] * D + d[None, :], mask


@triton.jit
def _load(x, r, d, R, D: tl.constexpr, BD: tl.constexpr):
    address, mask = _tile(x, r, d, R, D, BD)
    return tl.load(address, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _store(x, value, r, d, R, D: tl.constexpr, BD: tl.constexpr):
    address, mask = _tile(x, r, d, R, D, BD)
    tl.store(address, value.to(x.dtype.element_ty), mask=mask)


@triton.jit
def _half_tanh(x):
    """Return sigmoid(x) - 1/2, to full relative precision near 0 too."""
    series = x * (0.25 + x * x * (-1.0 / 48.0 + x * x * (1.0 / 480.0 - x * x * (17.0 / 80640.0))))
    return tl.where(tl.abs(x) < 0.25, series, sigmoid(x) - 0.5)


@triton.jit
def _normalize(x, d, eps, V: tl.constexpr, BV: tl.constexpr):
    """Return (x - mean) / std per row, 0 beyond V, and 1 / std."""
    x = x - (tl.sum(x, 1) / V)[:, None]
    if V != BV:
        x = tl.where((d < V)[None, :], x, 0.0)
    inverse = 1.0 / tl.sqrt(tl.sum(x * x, 1) / V + eps)
    return x * inverse[:, None], inverse


@triton.jit
def _output(
    o, q, k, v, weight, gate, r, R, eps,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, AUGMENT: tl.constexpr,
):  # fmt: skip
    """Return the output of rows r, [rows, BV] in float32; weight: [rows, BK]."""
    ck, cv = tl.arange(0, BK), tl.arange(0, BV)
    x = _load(o, r, cv, R, V, BV)
    u = _load(gate, r, cv, R, V, BV)
    if AUGMENT:
        strength = tl.sum(_load(q, r, ck, R, K, BK) * _load(k, r, ck, R, K, BK) * weight, 1)
        x += _half_tanh(strength[:, None] * _load(v, r, cv, R, V, BV))
    normal, _ = _normalize(x, cv, eps, V, BV)
    return normal * u * sigmoid(u)


@triton.jit
def _epilogue_forward(
    o, q, k, v, aug_weight, gate, y, T, H, eps,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, BT: tl.constexpr, BH: tl.constexpr,
    AUGMENT: tl.constexpr,
):  # fmt: skip
    ck, cv, row = tl.arange(0, BK), tl.arange(0, BV), tl.arange(0, BT * BH)
    h = tl.program_id(1) * BH + row % BH
    R = tl.cast(T, tl.int64) * H
    weight = 0.0
    if AUGMENT:
        weight = _load(aug_weight, h, ck, H, K, BK)
    for start in range(tl.program_id(0) * BT, T, tl.num_programs(0) * BT):
        r = (start + row // BH).to(tl.int64) * H + h
        out = _output(o, q, k, v, weight, gate, r, R, eps, K, V, BK, BV, AUGMENT)
        _store(y, out, r, cv, R, V, BV)


@triton.jit
def _epilogue_rows(
    o, q, k, v, aug_weight, gate, y, data, scale, T, H, eps,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, BH: tl.constexpr,
):  # fmt: skip
    h, cv = tl.arange(0, BH), tl.arange(0, BV)
    weight = _load(aug_weight, h, tl.arange(0, BK), H, K, BK)
    inside = (h < H)[:, None] & (cv < V)[None, :]
    for t in range(tl.program_id(0), T, tl.num_programs(0)):
        row = tl.cast(t, tl.int64) * H
        out = _output(
            o + row * V, q + row * K, k + row * K, v + row * V, weight, gate + row * V, h, H, eps, K, V, BK, BV, True
        )
        rounded = out.to(y.dtype.element_ty).to(tl.float32)
        of_row, reciprocal = fp8_scale(tl.max(tl.max(magnitude_bits(rounded, inside), 1), 0))
        tl.store(scale + t, of_row)
        _store(data + row * V, rounded * reciprocal, h, cv, H, V, BV)
    tl.store(y, float("nan"), mask=tl.program_id(0) == 0)


@triton.jit
def _epilogue_backward(
    dy, o, q, k, v, aug_weight, gate, do, dq, dk, dv, d_strengths, partial, dgate, T, H, eps,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, BT: tl.constexpr, BH: tl.constexpr,
    AUGMENT: tl.constexpr, STRIDE: tl.constexpr, STRIDED: tl.constexpr,
):  # fmt: skip
    ck, cv, row = tl.arange(0, BK), tl.arange(0, BV), tl.arange(0, BT * BH)
    h = tl.program_id(1) * BH + row % BH
    R = tl.cast(T, tl.int64) * H
    if AUGMENT:
        weight = _load(aug_weight, h, ck, H, K, BK)
        d_weight = tl.zeros([BT * BH, BK], tl.float32)
    for start in range(tl.program_id(0) * BT, T, tl.num_programs(0) * BT):
        t = (start + row // BH).to(tl.int64)
        r = t * H + h
        x = _load(o, r, cv, R, V, BV)
        u = _load(gate, r, cv, R, V, BV)
        grad = _load(dy, r, cv, R, V, BV)
        if AUGMENT:
            query, key = _load(q, r, ck, R, K, BK), _load(k, r, ck, R, K, BK)
            value = _load(v, r, cv, R, V, BV)
            strength = tl.sum(query * key * weight, 1)
            augmentation = _half_tanh(strength[:, None] * value)
            x += augmentation
        normal, inverse = _normalize(x, cv, eps, V, BV)
        s = sigmoid(u)
        d_gate = grad * normal * s * (1.0 + u * (1.0 - s))
        at = (t * STRIDE + h * V)[:, None] + cv[None, :]
        inside = (t < T)[:, None] & (cv < V)[None, :]
        tl.store(dgate + at, d_gate.to(dgate.dtype.element_ty), mask=inside)
        d_normal = grad * u * s
        d_normal -= (tl.sum(d_normal, 1) / V)[:, None] + normal * (tl.sum(d_normal * normal, 1) / V)[:, None]
        d_x = d_normal * inverse[:, None]
        _store(do, d_x, r, cv, R, V, BV)
        if AUGMENT:
            d_product = d_x * (0.25 - augmentation * augmentation)
            d_strength = tl.sum(d_product * value, 1)
            tl.store(dv + at, (d_product * strength[:, None]).to(dv.dtype.element_ty), mask=inside)
            if STRIDED:
                tl.store(d_strengths + r, d_strength, mask=t < T)
            else:
                _store(dq, d_strength[:, None] * weight * key, r, ck, R, K, BK)
                _store(dk, d_strength[:, None] * weight * query, r, ck, R, K, BK)
            d_weight += d_strength[:, None] * query * key
    if AUGMENT:
        head = tl.program_id(1) * BH + tl.arange(0, BH)
        of_head = tl.sum(tl.reshape(d_weight, [BT, BH, BK]), 0)
        _store(partial + tl.program_id(0) * H * K, of_head, head, ck, H, K, BK)
