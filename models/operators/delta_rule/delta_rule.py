"""The delta rule, the operator of DeltaNet, Gated DeltaNet, KDA, GDN-2 and RWKV-7: a state that forgets what a key held.

    S_t = (I - k_t (erase_t * k_t)^T) Diag(exp(log_decay_t)) S_{t-1} + k_t (write_t * v_t)^T        o_t = scale S_t^T q_t

arXiv 2406.06484, 2412.06464, 2510.26692. `select_kernel.py` says which kernel computes it; all agree with `naive.py`.
"""

from __future__ import annotations

from torch import Tensor

from ...backend import disable_compile
from ..context_parallel import ShardMaps, shard_maps
from .chunked import chunked_form
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
    shards, cu_seqlens = shard_maps(q.shape[1], cu_seqlens, initial_state)
    kernel = select_kernel(q, k, v, erase, write, removal_key, cu_seqlens)
    if isinstance(log_decay, SoftplusDecay):
        in_kernel = kernel is Kernel.TRITON and log_decay.per_channel and log_decay.logits.dtype == q.dtype
        log_decay = log_decay if in_kernel else log_decay.value()
    decay = log_decay.logits if isinstance(log_decay, SoftplusDecay) else log_decay
    check_arguments(q, k, v, decay, erase, write, removal_key, initial_state, cu_seqlens)
    if kernel is Kernel.TRITON:
        o, final = triton_form(q, k, v, log_decay, erase, scale, initial_state, cu_seqlens, shards)
    else:
        x = operands(q, k, v, decay, erase, write, removal_key, scale)
        state = initial(x, initial_state, cu_seqlens)
        if kernel is Kernel.RECURRENT and shards is None:
            o, final = recurrent_form(x, state, cu_seqlens)
        else:
            o, final = chunked_form(x, state, cu_seqlens, shards)
    return o.to(v.dtype), final if output_final_state else None


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
    shards: ShardMaps | None,
) -> tuple[Tensor, Tensor]:
    """Return outputs and final states by `models.kernels.delta_rule`."""
    from ...kernels.delta_rule.delta_rule import delta_rule as kernel

    if isinstance(log_decay, SoftplusDecay):
        logits, a_log, dt_bias = log_decay
        return kernel(q, k, v, logits, beta, scale, initial_state, cu_seqlens, (a_log, dt_bias), shards)
    decay = beta.new_zeros(beta.shape) if log_decay is None else log_decay
    return kernel(q, k, v, decay, beta, scale, initial_state, cu_seqlens, shards=shards)
