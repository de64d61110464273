"""The one operator of causal linear attention: S_t = diag(exp(log_decay_t)) S_{t-1} + k_t v_t^T, o_t = scale q_t S_t.

MetaLA (arXiv 2411.10741), Eq. 13-15. Three forms that agree: `recurrent` token by token, `parallel` quadratic in
length, `chunked` linear in length. The first two are the reference that the third is measured against.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any, Literal

import torch
from torch import Tensor

from ...backend import vector_decay_takes
from ...precision import to_accumulation_dtype
from ...recompute import recomputed
from ..context_parallel import causal_over_ranks, context_parallel_group
from ..cumulative_decay import decay_from_start, pairwise_decay, sum_after
from ..varlen import check_packed
from .chunk import chunked_recurrence

Form = Literal["auto", "recurrent", "parallel", "chunked"]


def recurrence(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    *,
    scale: float = 1.0,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    mild_decay: bool = False,
    form: Form = "auto",
) -> tuple[Tensor, Tensor]:
    """Decayed linear attention, causal.

    q, k: [batch, length, heads, head_dim_k]; v: [batch, length, heads, head_dim_v]; log_decay: [batch, length, heads,
    head_dim_k] or [..., 1] for one decay a head, at most 0, -inf allowed (the state is forgotten there).
    initial_state: [batch, heads, head_dim_k, head_dim_v], zero if None. cu_seqlens: [segments + 1] int with batch 1:
    tokens cu_seqlens[s] to cu_seqlens[s + 1] are one sequence; empty ones are legal; states are then [segments, ...].

    mild_decay: no channel is expected to lose more than exp(-80) over 64 tokens. Any decay is computed rightly; with those
    the project's kernels on CUDA are faster than flash-linear-attention's, with strong ones slower.

    Returns o in v's shape and dtype and the final state in float32 (float64 for float64 inputs).
    `auto` is Triton kernels on CUDA in 16 bits (the project's or flash-linear-attention's), one step of the recurrence for
    one token, else chunked.
    Raises ValueError for shapes that do not fit and for a form that does not exist.

    Under `models.operators.context_parallel.context_parallel` the arguments are the local shard of the sequence, but cu_seqlens
    is that of the whole. There is no initial state then. The final states are those of the shard's segments at its end.
    """
    group = context_parallel_group()
    if group is None:
        return local_recurrence(
            q, k, v, log_decay, scale=scale, initial_state=initial_state, cu_seqlens=cu_seqlens, mild_decay=mild_decay,
            form=form,
        )  # fmt: skip
    dtype = torch.float64 if v.dtype == torch.float64 else torch.float32

    def local(cu_seqlens: Tensor | None) -> tuple[Tensor, Tensor]:
        return local_recurrence(
            q, k, v, log_decay, scale=scale, cu_seqlens=cu_seqlens, mild_decay=mild_decay, form=form
        )

    def total_decay(tokens: Tensor | None) -> Tensor:
        of_tokens = log_decay if tokens is None else log_decay.masked_fill(~tokens[None, :, None, None], 0.0)
        return of_tokens.sum(1, dtype=torch.float64).exp().to(dtype).unsqueeze(-1)

    def correction(state: Tensor, tokens: Tensor | None) -> Tensor:
        return recomputed(_from_state, q, log_decay, state, scale, tokens)

    return causal_over_ranks(
        group, q.shape[1], cu_seqlens, initial_state, local=local, total_decay=total_decay, correction=correction
    )


def local_recurrence(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    *,
    scale: float = 1.0,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    mild_decay: bool = False,
    form: Form = "auto",
) -> tuple[Tensor, Tensor]:
    """Compute `recurrence` of these tokens alone, also where they are a local shard."""
    check(q, k, v, log_decay, initial_state, cu_seqlens)
    if form == "auto":
        if q.is_cuda and q.numel() and q.dtype in (torch.bfloat16, torch.float16):
            decay = _decay_for_own_kernels(q, k, v, log_decay, initial_state, mild_decay)
            if decay is not None:
                return by_kernels(q, k, v, decay, scale, initial_state, cu_seqlens)
            from .fla import fla_recurrence

            return fla_recurrence(q, k, v, log_decay, scale, initial_state, cu_seqlens)
        form = "recurrent" if q.shape[1] == 1 and cu_seqlens is None else "chunked"
    if form == "chunked":
        return chunked_recurrence(q, k, v, log_decay, scale, initial_state, cu_seqlens)
    if form not in ("recurrent", "parallel"):
        raise ValueError(f"form = {form!r}: allowed are auto, recurrent, parallel, chunked")
    wide = torch.float64 if v.dtype == torch.float64 else torch.float32
    dtype = v.dtype
    q, k, v, log_decay = q.to(wide) * scale, k.to(wide), v.to(wide), log_decay.to(wide)
    segments = 1 if cu_seqlens is None else len(cu_seqlens) - 1
    batch, _, heads, dim_k = q.shape
    if initial_state is None:
        initial_state = q.new_zeros(batch * segments, heads, dim_k, v.shape[-1])
    one_sequence = _recurrent if form == "recurrent" else _parallel
    if cu_seqlens is None:
        o, final_state = one_sequence(q, k, v, log_decay, initial_state.to(wide))
        return o.to(dtype), final_state
    bounds = cu_seqlens.tolist()
    outputs, finals = [], []
    for s, (start, end) in enumerate(pairwise(bounds)):
        q_s, k_s, v_s, g_s = (x[:, start:end] for x in (q, k, v, log_decay))
        o, final_state = one_sequence(q_s, k_s, v_s, g_s, initial_state[s : s + 1].to(wide))
        outputs.append(o)
        finals.append(final_state)
    return torch.cat(outputs, 1).to(dtype), torch.cat(finals)


def _decay_for_own_kernels(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, initial_state: Tensor | None, mild_decay: bool
) -> Tensor | None:
    """The decay as the project's kernels take it, where it is mild or flash-linear-attention's cannot differentiate it; None
    where those are the ones to compute it."""
    if mild_decay and vector_decay_takes(q, k, v, log_decay):
        return log_decay
    from .fla import a_channel, gradient_is_refused

    if gradient_is_refused(q, k, v, log_decay, initial_state):
        log_decay = a_channel(log_decay, q)
        if vector_decay_takes(q, k, v, log_decay, mild=False):
            return log_decay
    return None


def by_kernels(*inputs: Any) -> tuple[Tensor, Tensor]:
    """`models.kernels.gla.gla.vector_decay`, imported where it is used; `vector_decay_takes` says whether it may be."""
    from ...kernels.gla.gla import vector_decay

    return vector_decay(*inputs)


def leave_out_of_graphs() -> None:
    """Have torch.compile call the chunked form and the kernels as they are: traced, its loops over chunks compile for
    minutes, and the kernels' launches cannot be."""
    global chunked_recurrence, by_kernels
    if not getattr(chunked_recurrence, "_torchdynamo_disable", False):
        chunked_recurrence = torch.compiler.disable(chunked_recurrence)
        by_kernels = torch.compiler.disable(by_kernels)


def _from_state(q: Tensor, log_decay: Tensor, state: Tensor, scale: float, tokens: Tensor | None) -> Tensor:
    """Return scale q_t exp(b_t) S for an incoming state S [batch, heads, head_dim_k, head_dim_v], 0 outside `tokens`."""
    factor = decay_from_start(to_accumulation_dtype(log_decay), 1)
    if tokens is not None:
        factor = factor.masked_fill(~tokens[None, :, None, None], 0.0)
    # A sum over a long sequence may exceed float16.
    dtype = q.dtype if q.dtype == torch.bfloat16 else state.dtype
    return torch.einsum("blhk,bhkv->blhv", (to_accumulation_dtype(q) * factor * scale).to(dtype), state.to(dtype))


def _recurrent(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    decay = log_decay.exp().unsqueeze(-1)
    outputs = []
    for t in range(q.shape[1]):
        state = decay[:, t] * state + k[:, t].unsqueeze(-1) * v[:, t].unsqueeze(-2)
        outputs.append((q[:, t].unsqueeze(-2) @ state).squeeze(-2))
    return (torch.stack(outputs, 1) if outputs else torch.zeros_like(v)), state


def _parallel(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """Quadratic in time, and with a decay a channel also in memory: [batch, length, length, heads, head_dim_k]."""
    from_start = log_decay.cumsum(1)
    to_end = sum_after(log_decay, 1)
    weights = pairwise_decay(log_decay, 1)
    if log_decay.shape[-1] == 1:
        scores = torch.einsum("bihd,bjhd->bijh", q, k) * weights.squeeze(-1)
    else:
        scores = torch.einsum("bihd,bijhd,bjhd->bijh", q, weights, k)
    o = torch.einsum("bijh,bjhe->bihe", scores, v) + torch.einsum("bihd,bhde->bihe", q * from_start.exp(), state)
    if q.shape[1]:
        state = from_start[:, -1].exp().unsqueeze(-1) * state
        state = state + torch.einsum("bjhd,bjhe->bhde", k * to_end.exp(), v)
    return o, state


def check(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, initial_state: Tensor | None, cu_seqlens: Tensor | None
) -> None:
    """ValueError for arguments of `recurrence` that do not fit one another."""
    if q.dim() != 4 or k.shape != q.shape or v.shape[:3] != q.shape[:3] or v.dim() != 4:
        raise ValueError(
            f"q {_shape(q)}, k {_shape(k)}, v {_shape(v)}: expected [batch, length, heads, head_dim] with q and k alike "
            "and v equal to them but for its last axis"
        )
    if log_decay.shape[:-1] != q.shape[:-1] or log_decay.shape[-1] not in (1, q.shape[-1]):
        raise ValueError(f"log_decay {_shape(log_decay)}: expected {_shape(q)} or a last axis of 1")
    sequences = q.shape[0]
    if cu_seqlens is not None:
        check_packed(q, cu_seqlens)
        sequences = len(cu_seqlens) - 1
    expected = (sequences, q.shape[2], q.shape[3], v.shape[3])
    if initial_state is not None and tuple(initial_state.shape) != expected:
        raise ValueError(f"initial_state {_shape(initial_state)}: expected {list(expected)}")


def _shape(x: Tensor) -> list[int]:
    return list(x.shape)
