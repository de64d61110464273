"""The recurrence with a decay a channel on Triton kernels, with its gradients.

    S_t = diag(exp(g_t)) S_(t-1) + k_t v_t^T      o_t = scale q_t S_t
One pass forms the states between chunks (`chunk_state.py`), a second one the outputs or the gradients of every
chunk (`chunk_output.py`), a third one what passes inside chunks of strong decay (`strong_decay.py`). The
backward pass keeps inputs and states, or forms these again where they are forgotten. `models/operators/gla/chunk.py`
is the reference.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ...recompute import recomputable
from ..launch import Launch, aligned
from .chunk_output import chunk_launches
from .chunk_state import scan
from .common import CHUNK, Case, find_chunks, triangle
from .strong_decay import strong_launches

try:
    import triton
except ImportError as error:
    raise ImportError("the recurrence's kernels need Triton: pip install triton") from error

# Not float32 on CUDA: as Triton 3.6 compiles it for an H200, a product of the backward pass (the second of dv) reads beyond its
# shared memory for keys of 128 and values of 16 channels; compute-sanitizer finds nothing in the other shapes, nor in 16 bits.
# float32 has the plain form, and Triton's interpreter runs the kernels in it.
_DTYPES = (torch.float16, torch.bfloat16)
LARGEST_KEY, LARGEST_VALUE = 128, 256


def gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    scale: float,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """As `models.operators.gla.gated_linear_attention.recurrence`, for q, k, v of one dtype and a decay a channel,
    taken as -80 where below.

    Raises ValueError for more channels than the kernels take, for other dtypes (float32 is for Triton's interpreter) and
    where there is no token.
    """
    if not scale > 0:
        q, scale = q * scale, 1.0
    case = case_of(q, k, v, scale, initial_state, cu_seqlens)
    initial_state = None if initial_state is None else initial_state.float()
    return _GLA.apply(q, k, v, log_decay.float(), initial_state, cu_seqlens, case)


def case_of(
    q: Tensor, k: Tensor, v: Tensor, scale: float, initial_state: Tensor | None, cu_seqlens: Tensor | None,
    layer: bool = False,
) -> Case:  # fmt: skip
    """Raises ValueError as `gla`."""
    batch, length, heads, dim_k = q.shape
    dim_v = v.shape[-1]
    if dim_k > LARGEST_KEY or dim_v > LARGEST_VALUE:
        raise ValueError(
            f"head_dim_k {dim_k}, head_dim_v {dim_v}: the kernels take {LARGEST_KEY} and {LARGEST_VALUE} at most; use "
            "form='chunked'"
        )
    taken = _DTYPES if v.is_cuda else (*_DTYPES, torch.float32)
    if v.dtype not in taken or q.dtype != v.dtype or k.dtype != v.dtype:
        raise ValueError(f"q {q.dtype}, k {k.dtype}, v {v.dtype}: the kernels take one dtype of {taken}")
    segments = 0 if cu_seqlens is None else len(cu_seqlens) - 1
    if length == 0 or v.numel() == 0:
        raise ValueError("no tokens: use form='chunked'")
    return Case(
        q.get_device(), batch, length, heads, dim_k, dim_v, v.dtype, float(scale), segments, initial_state is not None,
        layer,
    )  # fmt: skip


class _GLA(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor,
        initial: Tensor | None,
        cu_seqlens: Tensor | None,
        case: Case,
    ) -> tuple[Tensor, Tensor]:
        q, k, v, g = (aligned(x) for x in (q, k, v, g))
        o, final, kept = forward(case, q, k, v, g, initial, cu_seqlens)
        ctx.save_for_backward(q, k, v, g, initial, *kept)
        ctx.case = case
        ctx.set_materialize_grads(False)
        return o, final

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do: Tensor | None, d_final: Tensor | None) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors
        do = torch.zeros_like(saved[2]) if do is None else aligned(do)
        dq, dk, dv, dg = (torch.empty_like(x) for x in saved[:4])
        return dq, dk, dv, dg, backward(ctx.case, do, d_final, dq, dk, dv, dg, (None, None), *saved), None, None


# What `backward` takes from `forward`: the states before every chunk, which chunks are strong, the chunks of packed
# sequences.
Kept = tuple[Tensor, Tensor, Tensor | None]


def forward(
    case: Case, q: Tensor, k: Tensor, v: Tensor, g: Tensor, initial: Tensor | None, cu_seqlens: Tensor | None
) -> tuple[Tensor, Tensor, Kept]:
    """o and the final states."""
    initial = None if initial is None else aligned(initial)
    table = None if cu_seqlens is None else _table(case, cu_seqlens)
    final = _states(case, initial, v)
    states = scan(case, False, k, v, g, initial, table, final)
    recomputable(states, scan, case, False, k, v, g, initial, table, None)
    o = torch.empty_like(v)
    strong = torch.empty(case.rows, case.chunks, dtype=torch.int32, device=v.device)
    if table is not None:
        strong.zero_()
    chunk_launches(case)[0](q, k, v, g, table, triangle(v.device), states, o, strong)
    strong_launches(case)[0](strong, q, k, v, g, table, o)
    return o, final, (states, strong, table)


def backward(
    case: Case,
    do: Tensor,
    d_final: Tensor | None,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    dg: Tensor,
    augmentation: tuple[Tensor | None, Tensor | None],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    initial: Tensor | None,
    states: Tensor,
    strong: Tensor,
    table: Tensor | None,
) -> Tensor | None:
    """Writes the gradients of q, k, v and g, and returns that of the initial states.

    Of a layer, the gradient of a is written in place of k's, g's is scratch, and dv holds what v has from the augmentation;
    augmentation: ds, float32 [batch, length, heads], and the weight of `metala_epilogue_triton.backward_apart`.
    """
    initial = None if initial is None else aligned(initial)
    d_final = None if d_final is None else aligned(d_final)
    d_initial = None if initial is None else _states(case, d_final, initial)
    d_strength, weight = augmentation
    d_states = scan(case, True, q, do, g, d_final, table, d_initial)
    chunk_launches(case)[1](
        do, q, k, v, g, table, triangle(q.device), strong, states, d_states, dq, dk, dv, dg, d_strength, weight
    )
    strong_launches(case)[1](strong, do, q, k, v, g, table, dq, dk, dv, dg, d_strength, weight)
    return d_initial


def _states(case: Case, of_empty: Tensor | None, like: Tensor) -> Tensor:
    """Room for a state a sequence. The kernels write those that have a token; what the others hold is `of_empty`, or 0."""
    shape = case.sequences, case.heads, case.dim_k, case.dim_v
    if not case.segments:
        return torch.empty(shape, dtype=torch.float32, device=like.device)
    if of_empty is not None:
        return of_empty.clone()
    return torch.zeros(shape, dtype=torch.float32, device=like.device)


def _table(case: Case, cu_seqlens: Tensor) -> Tensor:
    table = torch.empty(case.chunks + 1, 4, dtype=torch.int32, device=cu_seqlens.device)
    _find(case.device, case.segments, case.chunks, cu_seqlens.dtype)(aligned(cu_seqlens), table)
    return table


@lru_cache(4096)
def _find(device: int, segments: int, chunks: int, dtype: torch.dtype) -> Launch:
    entries = triton.next_power_of_2(segments)
    rows = max(1, 8192 // entries)
    return Launch(find_chunks, (-(-chunks // rows),), chunks, segments, CHUNK, entries, rows, num_warps=4)
