"""The causal recurrence together with the sum of each row of its attention map, for mixers that divide by it.

Values get a column of ones: [num_t, den_t] = q_t S_t with S_t = exp(g_t) S_{t-1} + k_t [v_t, 1].
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ...precision import to_accumulation_dtype
from .gated_linear_attention import recurrence

# In float16, whose largest number is 65504, rows are computed 2^-4 / weight as large: a million tokens have room.
_ROOM = 4


def recurrence_with_row_sum(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    *,
    weight: int = 1,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Arguments as in `models.operators.gla.gated_linear_attention.recurrence`; initial_state: [batch, heads,
    head_dim_k, head_dim_v + 1].
    weight: what q_t k_j of one pair of tokens is, about.

    Returns num [batch, length, heads, head_dim_v] and den [batch, length, heads, 1] in float32 (float64 for float64),
    and the final state, of the shape of initial_state with a row for every segment.
    """
    dim = v.shape[-1]
    # The kernels want rows of 16 bytes; an odd width is refused by some.
    extra = 7 if v.is_cuda else 0
    if initial_state is not None:
        initial_state = F.pad(initial_state, (0, extra))
    values = F.pad(F.pad(v, (0, 1), value=1.0), (0, extra))
    scale = 2.0 ** -(_ROOM + (weight - 1).bit_length()) if v.dtype == torch.float16 else 1.0
    o, state = recurrence(q, k, values, log_decay, scale=scale, initial_state=initial_state, cu_seqlens=cu_seqlens)
    num, den = to_accumulation_dtype(o[..., :dim]), to_accumulation_dtype(o[..., dim : dim + 1])
    if scale != 1.0:
        # Before anything is added to den or compared with it.
        num, den = num / scale, den / scale
    return num, den, state[..., : dim + 1]
