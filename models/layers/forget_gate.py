"""The forget gate of HGRN and HGRN2, f = beta + (1 - beta) sigmoid(a) with a lower bound beta."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def bounded_forget_gate(a: Tensor, log_bound: Tensor, log_range: Tensor) -> tuple[Tensor, Tensor]:
    """Return log f and 1 - f, in a's shape, both to full relative precision for f near 0 and near 1.

    a: logits in float32 or float64. log_bound, log_range: log beta and log(1 - beta), broadcastable to a; -inf and 0 for no
    bound.
    """
    closed = log_range.exp() * torch.sigmoid(-a)
    # Near f = 1 the terms of logaddexp cancel. Near f = 0 those of 1 - closed do.
    near_one = torch.log1p(-closed.clamp_max(0.5))
    return torch.where(closed < 0.5, near_one, torch.logaddexp(log_bound, log_range + F.logsigmoid(a))), closed
