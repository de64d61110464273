"""The end of a MetaLA mixer: self-augmentation, LayerNorm a head, output gate (arXiv 2411.10741, Eq. 15, 22, A35).

    s_t = sum_c q_tc w_c k_tc a head     x_t = o_t + sigmoid(s_t v_t) - 1/2     y_t = SiLU(u_t) * LayerNorm(x_t)

The 1/2 changes nothing, the LayerNorm takes it off; without it small outputs keep their digits.
The plain PyTorch reference stands here, its Triton kernels in `models/kernels/metala/epilogue.py`, imported on use.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from ..backend import available
from ..precision import to_accumulation_dtype
from ..recompute import recomputable


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
    """SiLU(gate) * LayerNorm_head(o + self-augmentation), computed in float32 (float64 for float64).

    o, v: [batch, length, heads, head_dim_v]; q, k: [batch, length, heads, head_dim_k]; aug_weight: [heads * head_dim_k]
    or None for no self-augmentation; gate: [batch, length, heads * head_dim_v] before its activation.
    form: "reference", "triton", or "auto": the kernels on CUDA where Triton is installed.
    Returns [batch, length, heads * head_dim_v] in o's dtype. Raises ValueError for an unknown form.
    """
    if form not in ("auto", "reference", "triton"):
        raise ValueError(f"form {form!r}: allowed are auto, reference, triton")
    if form == "auto":
        form = "triton" if available(o) else "reference"
    compute: Callable[..., Tensor] = reference
    if form == "triton":
        from ..kernels.metala.epilogue import epilogue as compute
    y = compute(o, q, k, v, aug_weight, gate, eps)
    recomputable(y, compute, o, q, k, v, aug_weight, gate, eps)
    return y


def reference(
    o: Tensor, q: Tensor, k: Tensor, v: Tensor, aug_weight: Tensor | None, gate: Tensor, eps: float = 1e-5
) -> Tensor:
    """The same in plain PyTorch."""
    x = to_accumulation_dtype(o)
    if aug_weight is not None:
        weight = to_accumulation_dtype(aug_weight).unflatten(-1, (-1, q.shape[-1]))
        strength = (to_accumulation_dtype(q) * weight * to_accumulation_dtype(k)).sum(-1, keepdim=True)
        x = x + 0.5 * torch.tanh(0.5 * strength * to_accumulation_dtype(v))
    x = F.layer_norm(x, x.shape[-1:], eps=eps).flatten(-2)
    return (F.silu(to_accumulation_dtype(gate)) * x).to(o.dtype)
