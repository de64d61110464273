"""Causal linear attention with its normalizer, for mixers that divide by it, and the quadratic kernel for short sequences."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ...backend import on_cuda
from ...precision import to_accumulation_dtype
from .gated_linear_attention import gated_linear_attention
from .select_kernel import supports_quadratic

# The largest float16 is 65504. Sums are scaled by 2^-4 / weight, so that those of a million tokens fit.
_FLOAT16_SHIFT = 4


def linear_attention_with_normalizer(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    *,
    weight: int = 1,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    fits_matmul_form: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return numerator, normalizer and final state of causal linear attention, from one call of the operator.

    Values get a column of ones: [num_t, den_t] = q_t S_t with S_t = exp(g_t) S_{t-1} + k_t [v_t, 1].
    Arguments as in `models.operators.gla.gated_linear_attention.gated_linear_attention`, but initial_state [batch, heads,
    head_dim_k, head_dim_v + 1]. weight: the expected size of q_t k_j of one pair of tokens.

    num: [batch, length, heads, head_dim_v]; den: [batch, length, heads, 1]; both in float32 (float64 for float64). The final
    state has the shape of initial_state, with one row per segment.
    """
    dim = v.shape[-1]
    # The kernels are fastest with rows of 16 bytes; some refuse an odd width.
    extra = 7 if on_cuda(v) else 0
    if initial_state is not None:
        initial_state = F.pad(initial_state, (0, extra))
    v = F.pad(F.pad(v, (0, 1), value=1.0), (0, extra))
    scale = float16_scale(v.dtype, weight)
    o, state = gated_linear_attention(
        q, k, v, log_decay, scale=scale, initial_state=initial_state, cu_seqlens=cu_seqlens,
        fits_matmul_form=fits_matmul_form,
    )  # fmt: skip
    num, den = to_accumulation_dtype(o[..., :dim]), to_accumulation_dtype(o[..., dim : dim + 1])
    if scale != 1.0:
        # Before anything is added to den or compared with it.
        num, den = num / scale, den / scale
    return num, den, state[..., : dim + 1]


def float16_scale(dtype: torch.dtype, weight: int) -> float:
    """Return the factor of sums of numbers of size `weight` that keeps them inside float16; 1 for other dtypes."""
    return 2.0 ** -(_FLOAT16_SHIFT + (weight - 1).bit_length()) if dtype == torch.float16 else 1.0


def short_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    *,
    scale: float = 1.0,
    taylor: bool = False,
    normalized: bool,
    cu_seqlens: Tensor | None,
    initial_state: Tensor | None,
    return_state: bool,
) -> Tensor | None:
    """Return the result of the quadratic kernel where `supports_quadratic`, else None: the caller then uses the operator.

    Arguments as in `models.kernels.quadratic_attention.quadratic_attention`; log_decay: [batch, length, heads] or with a
    last axis of 1.
    """
    if not supports_quadratic(q, k, v, initial_state, cu_seqlens, return_state):
        return None
    from ...kernels.quadratic_attention import quadratic_attention

    log_decay = None if log_decay is None else log_decay.reshape(q.shape[:3])
    return quadratic_attention(q, k, v, log_decay, scale=scale, taylor=taylor, normalized=normalized)
