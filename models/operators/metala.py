"""The core of a MetaLA layer between its projections: decay and key, gated linear attention, epilogue (arXiv 2411.10741).

    g_t = logsigmoid(a_t) / 16     k_t = 1 - exp(g_t)     o_t = gated_linear_attention(q, k, v, g)     (Eq. 13-15)
    s_t = sum_c q_tc w_c k_tc      x_t = o_t + sigmoid(s_t v_t) - 1/2     y_t = SiLU(u_t) * LayerNorm(x_t)     per head

(Eq. 15, 22, A35). The LayerNorm removes the 1/2; without it small outputs would lose digits. The PyTorch references are
here. The kernels are `models/kernels/metala.py` (CUDA) and `models/kernels/cpu/metala.py`, imported on use.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from ..backend import cpu_kernel, is_supported
from ..precision import to_accumulation_dtype
from ..recompute import recomputable
from .context_parallel import context_parallel_group
from .gla.gated_linear_attention import gated_linear_attention
from .gla.select_kernel import GLAArguments, check_shapes, supports_triton
from .varlen import without_padding


def metala(
    q: Tensor,
    a: Tensor,
    v: Tensor,
    aug_weight: Tensor | None,
    gate: Tensor,
    *,
    k: Tensor | None = None,
    mask: Tensor | None = None,
    scale: float = 1.0,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    fp8_output: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return the output before its projection, [batch, length, heads * head_dim_v] in v's dtype, and the final state.

    q, a: [batch, length, heads, head_dim_k]; k: the same, or None for 1 - exp(g). aug_weight, gate and their errors as in
    `metala_epilogue`; the other arguments and errors as in
    `models.operators.gla.gated_linear_attention.gated_linear_attention`.
    mask: [batch, length] bool, True for real tokens. One fused kernel computes all three steps where it is supported.
    fp8_output: that kernel writes only FP8 rows of the output, one per token. Its 16-bit numbers read as NaN.
    """
    # The fused kernel computes whole sequences without padding.
    if k is None and mask is None and aug_weight is not None and context_parallel_group() is None:
        check_shapes(GLAArguments(q, a, v, a, scale, initial_state, cu_seqlens))
        _check_epilogue(q, v, aug_weight, gate)
        core = _select_core(q, a, v, aug_weight, gate, fp8_output)
        if core is not None:
            return core(q, a, v, aug_weight, gate, scale, initial_state, cu_seqlens)
    log_decay, key = decay_and_key(a)
    log_decay, k = without_padding(mask, log_decay, key if k is None else k)
    o, final_state = gated_linear_attention(
        q, k, v, log_decay, scale=scale, initial_state=initial_state, cu_seqlens=cu_seqlens, fits_matmul_form=True
    )
    return metala_epilogue(o, q, k, v, aug_weight, gate), final_state


def _select_core(
    q: Tensor, a: Tensor, v: Tensor, aug_weight: Tensor, gate: Tensor, fp8_output: bool = False
) -> Callable[..., tuple[Tensor, Tensor]] | None:
    """Return the kernel that computes the three steps at once, or None."""
    if is_supported(q) and supports_triton(q, a, v, a, fits_matmul_form=True):
        from ..kernels.metala import metala_core

        return partial(metala_core, fp8_output=fp8_output)
    cpu = cpu_kernel("metala")
    return cpu.metala_core if cpu is not None and cpu.supports_metala_core(q, a, v, aug_weight, gate) else None


def decay_and_key(a: Tensor) -> tuple[Tensor, Tensor]:
    """Return log alpha with alpha = sigmoid(a)^(1/16), in float32 (float64 for float64), and k = 1 - alpha in a's dtype."""
    if is_supported(a):
        from ..kernels.metala import decay_and_key as compute
    else:
        compute = decay_and_key_reference
    results = compute(a)
    recomputable(results, compute, a)
    return results


def decay_and_key_reference(a: Tensor) -> tuple[Tensor, Tensor]:
    """Compute `decay_and_key` in PyTorch."""
    log_decay = F.logsigmoid(to_accumulation_dtype(a)) / 16
    # Rounded only now: 1 - exp(g) in bfloat16 would be wrong by 3 % and more.
    return log_decay, (-torch.expm1(log_decay)).to(a.dtype)


def metala_epilogue(
    o: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    aug_weight: Tensor | None,
    gate: Tensor,
    eps: float = 1e-5,
    *,
    form: str = "auto",
) -> Tensor:
    """Return SiLU(gate) * LayerNorm_head(o + self-augmentation), computed in float32 (float64 for float64).

    o, v: [batch, length, heads, head_dim_v]; q, k: [batch, length, heads, head_dim_k]; aug_weight: [heads * head_dim_k]
    or None for no self-augmentation; gate: [batch, length, heads * head_dim_v] before its activation.
    form: "reference", "triton", or "auto": the kernels on CUDA where Triton is installed, and PyTorch under torch.compile.
    Returns [batch, length, heads * head_dim_v] in o's dtype. Raises ValueError for an unknown form, and for an aug_weight or a
    gate of another shape.
    """
    _check_epilogue(q, v, aug_weight, gate)
    if form not in ("auto", "reference", "triton"):
        raise ValueError(f"form {form!r}: allowed are auto, reference, triton")
    if form == "auto":
        form = "triton" if is_supported(o) else "reference"
    compute: Callable[..., Tensor] = epilogue_reference
    if form == "triton":
        from ..kernels.metala import epilogue as compute
    y = compute(o, q, k, v, aug_weight, gate, eps)
    recomputable(y, compute, o, q, k, v, aug_weight, gate, eps)
    return y


def _check_epilogue(q: Tensor, v: Tensor, aug_weight: Tensor | None, gate: Tensor) -> None:
    # The kernels do not check: they would read other memory where PyTorch repeats a smaller tensor.
    batch, length, heads, head_dim_v = v.shape
    if gate.shape != (batch, length, heads * head_dim_v):
        raise ValueError(
            f"gate {list(gate.shape)}: expected [batch, length, heads * head_dim_v] = {[batch, length, heads * head_dim_v]}"
        )
    if aug_weight is not None and aug_weight.shape != (heads * q.shape[-1],):
        raise ValueError(
            f"aug_weight {list(aug_weight.shape)}: expected [heads * head_dim_k] = {[heads * q.shape[-1]]}, or None for no "
            "self-augmentation"
        )


def epilogue_reference(
    o: Tensor, q: Tensor, k: Tensor, v: Tensor, aug_weight: Tensor | None, gate: Tensor, eps: float = 1e-5
) -> Tensor:
    """Compute `metala_epilogue` in PyTorch."""
    x = to_accumulation_dtype(o)
    if aug_weight is not None:
        weight = to_accumulation_dtype(aug_weight).unflatten(-1, (-1, q.shape[-1]))
        strength = (to_accumulation_dtype(q) * weight * to_accumulation_dtype(k)).sum(-1, keepdim=True)
        x = x + 0.5 * torch.tanh(0.5 * strength * to_accumulation_dtype(v))
    x = F.layer_norm(x, x.shape[-1:], eps=eps).flatten(-2)
    return (F.silu(to_accumulation_dtype(gate)) * x).to(o.dtype)
