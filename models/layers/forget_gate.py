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
    complement = log_range.exp() * torch.sigmoid(-a)
    # Near f = 1 the two terms of logaddexp cancel, so log f is log(1 - complement) there. Near f = 0 this difference cancels.
    near_one = torch.log1p(-complement.clamp_max(0.5))
    near_zero = torch.logaddexp(log_bound, log_range + F.logsigmoid(a))
    return torch.where(complement < 0.5, near_one, near_zero), complement
