"""The decay gate of Gated DeltaNet, KDA and GDN-2 (arXiv 2412.06464, 2510.26692)."""

from __future__ import annotations

from typing import NamedTuple

import torch.nn.functional as F
from torch import Tensor

from ...backend import SIXTEEN_BITS, is_supported
from ...precision import to_accumulation_dtype


class SoftplusDecay(NamedTuple):
    """Hold the log decay -exp(a_log) softplus(logits + dt_bias).

    The Triton kernels of the delta rule compute it from 16-bit logits, if every channel has a decay of its own.
    logits, dt_bias: [..., heads] for one decay per head, or [..., heads, dim] for one per channel. a_log: [heads].
    """

    logits: Tensor
    a_log: Tensor
    dt_bias: Tensor

    @property
    def per_channel(self) -> bool:
        """Return whether every channel has a decay of its own."""
        return self.dt_bias.dim() == 2

    def value(self) -> Tensor:
        """Return the log decay in float32 (float64 for float64)."""
        logits, a_log, dt_bias = self
        if self.per_channel and logits.dim() == 4 and logits.dtype in SIXTEEN_BITS and is_supported(logits):
            from ...kernels.delta_rule.layer import channel_decay

            return channel_decay(logits, a_log, dt_bias)
        dt = F.softplus(to_accumulation_dtype(logits) + to_accumulation_dtype(dt_bias))
        rate = to_accumulation_dtype(a_log).exp()
        return -dt * (rate.unsqueeze(-1) if self.per_channel else rate)
