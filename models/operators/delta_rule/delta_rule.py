"""The delta rule, the operator of DeltaNet, Gated DeltaNet, KDA, GDN-2 and RWKV-7: a state that forgets what a key held.

    S_t = (I - k_t (erase_t * k_t)^T) Diag(exp(log_decay_t)) S_{t-1} + k_t (write_t * v_t)^T        o_t = scale S_t^T q_t

arXiv 2406.06484, 2412.06464, 2510.26692. `select_kernel.py` says which kernel computes it; all agree with `naive.py`.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ...backend import disable_compile
from ..context_parallel import affine_over_ranks, context_parallel_group
from ..varlen import without_padding
from .chunked import affine_form, chunked_form
from .naive import recurrent_form
from .select_kernel import Kernel, check_arguments, initial, operands, select_kernel
from .softplus_decay import SoftplusDecay


def delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | SoftplusDecay | None,
    erase: Tensor,
    write: Tensor | None = None,
    *,
    removal_key: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Compute the delta rule: decay first, then the update reads the decayed state.

    q, k: [batch, length, heads, head_dim_k]; v: [batch, length, heads, head_dim_v].
    log_decay: at most 0, [batch, length, heads] for one decay per head, [..., head_dim_k] for one per channel, None for no
    decay; -inf clears the state. A `SoftplusDecay` is computed here. erase: [batch, length, heads] or [..., head_dim_k].
    write: [batch, length, heads] or [..., head_dim_v]; None for one gate for both, erase [batch, length, heads], which the
    CUDA kernels need.
    removal_key: [batch, length, heads, head_dim_k], RWKV-7's kappa (arXiv 2503.14456), which reads the state before its decay:
    S_t = Diag(exp(log_decay_t)) S_{t-1} - (erase_t * kappa_t) (kappa_t^T S_{t-1}) + k_t (write_t * v_t)^T.
    scale: 1 / sqrt(head_dim_k) if None.
    initial_state: [batch, heads, head_dim_k, head_dim_v], zero if None. cu_seqlens: [segments + 1] int with batch 1: tokens
    cu_seqlens[s] to cu_seqlens[s + 1] are one sequence; empty ones are legal; states are then [segments, ...].

    A token with log_decay, erase and write 0 leaves the state unchanged: padding. The update is stable for |k| <= 1 and erase
    in [0, 2].

    Returns o in v's shape and dtype, and the final state in float32 (float64 for float64), None without output_final_state.
    Raises ValueError for shapes that do not agree.

    Under `models.operators.context_parallel.context_parallel` the arguments are the local shard of the sequence, but cu_seqlens
    is that of the whole. There is no initial state then. The final states are those of the shard's segments at its end.
    """
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    group = context_parallel_group()
    if isinstance(log_decay, SoftplusDecay):
        in_kernel = group is None and log_decay.per_channel and log_decay.logits.dtype == q.dtype
        if in_kernel and select_kernel(q, k, v, erase, write, removal_key, cu_seqlens) is Kernel.TRITON:
            check_arguments(q, k, v, log_decay.logits, erase, write, removal_key, initial_state, cu_seqlens)
            o, final = triton_form(q, k, v, log_decay, erase, scale, initial_state, cu_seqlens)
            return o, final if output_final_state else None
        log_decay = log_decay.value()

    def local(cu_seqlens: Tensor | None, initial_state: Tensor | None) -> tuple[Tensor, Tensor]:
        check_arguments(q, k, v, log_decay, erase, write, removal_key, initial_state, cu_seqlens)
        kernel = select_kernel(q, k, v, erase, write, removal_key, cu_seqlens)
        if kernel is Kernel.TRITON:
            return triton_form(q, k, v, log_decay, erase, scale, initial_state, cu_seqlens)
        x = operands(q, k, v, log_decay, erase, write, removal_key, scale)
        form = recurrent_form if kernel is Kernel.RECURRENT else chunked_form
        o, final = form(x, initial(x, initial_state, cu_seqlens), cu_seqlens)
        return o.to(v.dtype), final

    def shard_map(tokens: Tensor | None) -> tuple[Tensor, Tensor]:
        check_arguments(q, k, v, log_decay, erase, write, removal_key, None, None)
        mask = None if tokens is None else tokens.unsqueeze(0)
        decay = None if log_decay is None else without_padding(mask, log_decay)[0]
        erased = without_padding(mask, erase)[0]
        if select_kernel(q, k, v, erase, write, removal_key, None) is Kernel.TRITON:
            # The first columns of the state start as the identity, and their values are 0.
            dim = k.shape[-1]
            identity = torch.eye(dim, v.shape[-1] + dim, device=k.device).expand(k.shape[0], k.shape[2], -1, -1)
            _, final = triton_form(q, k, F.pad(v, (dim, 0)), decay, erased, scale, identity, None)
            return final[..., :dim], final[..., dim:]
        written = None if write is None else without_padding(mask, write)[0]
        return affine_form(operands(q, k, v, decay, erased, written, removal_key, scale))

    if group is None:
        o, final = local(cu_seqlens, initial_state)
    else:
        o, final = affine_over_ranks(group, q.shape[1], cu_seqlens, initial_state, shard_map=shard_map, local=local)
    return o, final if output_final_state else None


@disable_compile
def triton_form(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | SoftplusDecay | None,
    beta: Tensor,
    scale: float,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Return outputs and final states by `models.kernels.delta_rule`."""
    from ...kernels.delta_rule.delta_rule import delta_rule as kernel

    if isinstance(log_decay, SoftplusDecay):
        logits, a_log, dt_bias = log_decay
        return kernel(q, k, v, logits, beta, scale, initial_state, cu_seqlens, (a_log, dt_bias))
    decay = beta.new_zeros(beta.shape) if log_decay is None else log_decay
    return kernel(q, k, v, decay, beta, scale, initial_state, cu_seqlens)
