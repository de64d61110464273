"""The causal recurrence together with the sum of each row of its attention map, for mixers that divide by it.

Values get a column of ones: [num_t, den_t] = q_t S_t with S_t = exp(g_t) S_{t-1} + k_t [v_t, 1].
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from .precision import wide
from .recurrence import recurrence


def recurrence_with_row_sum(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    *,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Arguments as in `models.recurrence.recurrence`; initial_state: [batch, heads, head_dim_k, head_dim_v + 1].

    Returns num [batch, length, heads, head_dim_v] and den [batch, length, heads, 1] in float32 (float64 for float64),
    and the final state, of the shape of initial_state with a row for every segment.
    """
    dim = v.shape[-1]
    # The kernels want rows of 16 bytes; an odd width is refused by some.
    extra = 7 if v.is_cuda else 0
    if initial_state is not None:
        initial_state = F.pad(initial_state, (0, extra))
    values = F.pad(F.pad(v, (0, 1), value=1.0), (0, extra))
    o, state = recurrence(q, k, values, log_decay, initial_state=initial_state, cu_seqlens=cu_seqlens)
    return wide(o[..., :dim]), wide(o[..., dim : dim + 1]), state[..., : dim + 1]
