"""Gated linear attention, the operator of causal linear attention: S_t = diag(exp(log_decay_t)) S_{t-1} + k_t v_t^T,
o_t = scale q_t S_t.

MetaLA (arXiv 2411.10741), Eq. 13-15. `select_kernel.py` says which kernel computes it; all agree with `naive.py`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...backend import disable_compile
from ...precision import accumulation_dtype, to_accumulation_dtype
from ...recompute import recomputed
from ..context_parallel import causal_over_ranks, context_parallel_group
from ..cumulative_decay import decay_from_start
from .chunk import chunk_form
from .naive import quadratic_form, recurrent_form
from .select_kernel import Decay, Form, GLAArguments, Kernel, bounded_decay, check_shapes, select_kernel


def gated_linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    *,
    scale: float = 1.0,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    fits_matmul_form: bool = False,
    form: Form = "auto",
) -> tuple[Tensor, Tensor]:
    """Compute causal linear attention with decay.

    q, k: [batch, length, heads, head_dim_k]; v: [batch, length, heads, head_dim_v]; log_decay: [batch, length, heads,
    head_dim_k], or [..., 1] for one decay per head, at most 0; -inf clears the state.
    initial_state: [batch, heads, head_dim_k, head_dim_v], zero if None. cu_seqlens: [segments + 1] int with batch 1:
    tokens cu_seqlens[s] to cu_seqlens[s + 1] are one sequence; empty ones are legal; states are then [segments, ...].

    fits_matmul_form: the caller expects no channel to decay below exp(-80) over 64 tokens. Any decay is computed
    correctly. With these decays the project's CUDA kernels are faster than flash-linear-attention's, else slower.
    form: "recurrent", "parallel" (quadratic in length) or "chunked" in PyTorch, or "auto": the kernels on CUDA in 16 bits;
    else recurrent for one token and chunked for more.

    Returns o in v's shape and dtype and the final state in float32 (float64 for float64 inputs).
    Raises ValueError for shapes that do not agree and for an unknown form.

    Under `models.operators.context_parallel.context_parallel` the arguments are the local shard of the sequence, but cu_seqlens
    is that of the whole. There is no initial state then. The final states are those of the shard's segments at its end.
    """
    x = GLAArguments(q, k, v, log_decay, scale, initial_state, cu_seqlens)
    group = context_parallel_group()
    if group is None:
        return local_gated_linear_attention(x, fits_matmul_form=fits_matmul_form, form=form)
    dtype = accumulation_dtype(v)

    def local(cu_seqlens: Tensor | None) -> tuple[Tensor, Tensor]:
        shard = GLAArguments(q, k, v, log_decay, scale, None, cu_seqlens)
        return local_gated_linear_attention(shard, fits_matmul_form=fits_matmul_form, form=form)

    def total_decay(tokens: Tensor | None) -> Tensor:
        of_tokens = log_decay if tokens is None else log_decay.masked_fill(~tokens[None, :, None, None], 0.0)
        return of_tokens.sum(1, dtype=torch.float64).exp().to(dtype).unsqueeze(-1)

    def correction(state: Tensor, tokens: Tensor | None) -> Tensor:
        return recomputed(_from_state, q, log_decay, state, scale, tokens)

    return causal_over_ranks(
        group, q.shape[1], cu_seqlens, initial_state, local=local, total_decay=total_decay, correction=correction
    )


def no_decay(q: Tensor) -> Tensor:
    """Return log decays 0 for q [batch, length, heads, head_dim_k], [batch, length, heads, 1], as one number in memory.

    `models.operators.gla.select_kernel.is_fixed` recognises the number, and a faster kernel runs.
    """
    return torch.zeros((), dtype=accumulation_dtype(q), device=q.device).expand(*q.shape[:3], 1)


def flops_per_head(length: int, dim_k: int, dim_v: int) -> int:
    """Return forward FLOPs per token and head, two per multiply-add, in chunks of 64 tokens."""
    return min(64, length) * (dim_k + dim_v) + 4 * dim_k * dim_v


def local_gated_linear_attention(
    x: GLAArguments, *, fits_matmul_form: bool = False, form: Form = "auto"
) -> tuple[Tensor, Tensor]:
    """Compute `gated_linear_attention` of these tokens alone, also if they are a local shard."""
    check_shapes(x)
    selection = select_kernel(x, fits_matmul_form=fits_matmul_form, form=form)
    if selection.kernel is Kernel.RECURRENT:
        return recurrent_form(x)
    if selection.kernel is Kernel.QUADRATIC:
        return quadratic_form(x)
    if selection.kernel is Kernel.CHUNK:
        return chunk_form(x)
    if selection.kernel is Kernel.TRITON:
        if selection.decay is Decay.PER_CHANNEL:
            x = x.with_decay(bounded_decay(x.log_decay).expand(x.q.shape))
        return triton_form(x)
    from .fla import fla_form

    return fla_form(selection, x)


@disable_compile
def triton_form(x: GLAArguments) -> tuple[Tensor, Tensor]:
    """Compute the operator with `models/kernels/gla`, imported on use."""
    from ...kernels.gla.gla import gla

    return gla(*x)


def _from_state(q: Tensor, log_decay: Tensor, state: Tensor, scale: float, tokens: Tensor | None) -> Tensor:
    """Return scale q_t exp(b_t) S for an incoming state S [batch, heads, head_dim_k, head_dim_v], 0 outside `tokens`."""
    factor = decay_from_start(to_accumulation_dtype(log_decay), 1)
    if tokens is not None:
        factor = factor.masked_fill(~tokens[None, :, None, None], 0.0)
    # A sum over a long sequence may exceed float16.
    dtype = q.dtype if q.dtype == torch.bfloat16 else state.dtype
    return torch.einsum("blhk,bhkv->blhv", (to_accumulation_dtype(q) * factor * scale).to(dtype), state.to(dtype))
