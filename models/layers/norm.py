"""LayerNorm and RMSNorm with float32 statistics."""

from __future__ import annotations

from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..backend import is_supported
from ..options import ModelShape
from ..precision import to_accumulation_dtype
from ..recompute import recomputable

# The most channels per row that one program of the kernel can hold.
_LARGEST = 16384


class Norm(nn.Module):
    """Normalize the last axis, with statistics in float32 (float64 for float64).

    LayerNorm: Ba, Kiros and Hinton 2016. RMSNorm: Zhang and Sennrich 2019.
    """

    tensor_parallel_plan: ClassVar[dict[str, str]] = {"weight": "replicated", "bias": "replicated"}
    parameter_kinds: ClassVar[dict[str, str]] = {"weight": "norm", "bias": "norm"}

    def __init__(self, config: ModelShape) -> None:
        super().__init__()
        size = config.hidden_size
        self.centred = config.norm == "layernorm"
        self.eps = config.norm_eps
        self.weight = nn.Parameter(torch.ones(size)) if config.norm_affine else None
        self.bias = nn.Parameter(torch.zeros(size)) if config.norm_affine and self.centred else None
        # A trainer sets these. fp8_output: only FP8 linears read the output. fp8_gradient: one reads the gradient of x and delta.
        self.fp8_output = self.fp8_gradient = False

    def forward(
        self, x: Tensor, delta: Tensor | None = None, return_sum: bool = False
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Return the norm of h = x + delta (delta None: h = x), and h with return_sum: [..., hidden_size] in x's dtype.

        If the residual stream reuses `h`, the kernel also accumulates its gradient.
        """
        settings = self.weight, self.bias, self.eps, self.centred
        if is_supported(x) and x.shape[-1] <= _LARGEST:
            from ..kernels.add_norm import add_norm

            h, y = add_norm(x, delta, *settings, self.fp8_output, self.fp8_gradient)
            if not self.fp8_output:  # else no reader saves y
                recomputable(y, lambda *inputs: add_norm(*inputs)[1], h, None, *settings)
        else:
            h = x if delta is None else x + delta
            y = _normalized(h, *settings)
            recomputable(y, _normalized, h, *settings)
        return (y, h) if return_sum else y


def _normalized(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, centred: bool) -> Tensor:
    if centred:
        return F.layer_norm(x, x.shape[-1:], weight, bias, eps)
    accumulated = to_accumulation_dtype(x)
    y = accumulated * torch.rsqrt(accumulated.square().mean(-1, keepdim=True) + eps)
    if weight is not None:
        y = y * weight
    return y.to(x.dtype)


class LayerNorm(nn.LayerNorm):
    """Compute `nn.LayerNorm`, by the kernel of `Norm` where it is supported. `model.norm` does not change this norm."""

    tensor_parallel_plan: ClassVar[dict[str, str]] = {"weight": "replicated", "bias": "replicated"}
    parameter_kinds: ClassVar[dict[str, str]] = {"weight": "norm", "bias": "norm"}

    def forward(self, x: Tensor) -> Tensor:
        """Return the norm of x [..., size], in the same shape."""
        if is_supported(x) and x.shape[-1] <= _LARGEST:
            from ..kernels.add_norm import add_norm

            return add_norm(x, None, self.weight, self.bias, self.eps, True)[1]
        return super().forward(x)
