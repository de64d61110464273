"""LayerNorm and RMSNorm with float32 statistics."""

from __future__ import annotations

from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .config import ModelConfig


class Norm(nn.Module):
    """Norm over the last axis; statistics in float32 for 16-bit inputs, in float64 for float64.

    LayerNorm: Ba, Kiros and Hinton 2016. RMSNorm: Zhang and Sennrich 2019.
    """

    tensor_parallel_plan: ClassVar[dict[str, str]] = {"weight": "replicated", "bias": "replicated"}
    parameter_kinds: ClassVar[dict[str, str]] = {"weight": "norm", "bias": "norm"}

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        size = config.hidden_size
        self.centred = config.norm == "layernorm"
        self.eps = config.norm_eps
        self.weight = nn.Parameter(torch.ones(size)) if config.norm_affine else None
        self.bias = nn.Parameter(torch.zeros(size)) if config.norm_affine and self.centred else None

    def forward(self, x: Tensor) -> Tensor:
        """x: [..., hidden_size] -> the same shape and dtype."""
        if self.centred:
            return F.layer_norm(x, x.shape[-1:], self.weight, self.bias, self.eps)
        wide = x if x.dtype == torch.float64 else x.float()
        y = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        if self.weight is not None:
            y = y * self.weight
        return y.to(x.dtype)
