"""Normalized attention (arXiv 2405.15731): linear attention whose normalizer is a function of the token."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import log
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..layers.projections import linear
from ..operators.gla.gated_linear_attention import flops_per_head, gated_linear_attention, no_decay
from ..operators.gla.normalized import float16_scale
from ..operators.varlen import without_padding
from ..options import ModelShape, option
from ..precision import to_accumulation_dtype

# 1 / eta with eta at least 1e-6, because a quotient by 0 would overflow.
_INVERSE: dict[str, Callable[[Tensor], Tensor]] = {
    "exp": lambda a: torch.exp(-a.clamp_min(log(1e-6))),
    "softplus": lambda a: 1 / (F.softplus(a) + 1e-6),
    "sigmoid": lambda a: 1 / (torch.sigmoid(a) + 1e-6),
}


@dataclass(frozen=True)
class NormalisedAttentionOptions:
    """Hold the settings of the normalized attention mixer."""

    normaliser: Literal["exp", "softplus", "sigmoid"] = option(
        "exp", "Function eta of a learned projection of the token; outputs are divided by it."
    )


class NormalisedAttention(nn.Module):
    """Compute the layer of Sieber et al. 2024: a learned function of the token replaces the softmax's normalizer.

    S_t = S_{t-1} + k_t v_t, o_t = q_t S_t / (sqrt(head_dim) eta(w x_t)), with one w per head; y = W_O o.
    """

    Options = NormalisedAttentionOptions
    state_size: ClassVar[str] = "d^2 / heads float32"
    supports_context_parallel: ClassVar[bool] = True
    fp8_projections: ClassVar[tuple[str, ...]] = ("q_proj", "k_proj", "v_proj", "out_proj")
    tensor_parallel_plan: ClassVar[dict[str, str]] = {
        "q_proj": "column",
        "k_proj": "column",
        "v_proj": "column",
        "eta_proj": "column",
        "out_proj": "row",
    }
    parameter_kinds: ClassVar[dict[str, str]] = {}

    def __init__(self, config: ModelShape, layer_index: int, options: NormalisedAttentionOptions) -> None:
        super().__init__()
        size = config.hidden_size
        self.options = options
        self.head_dim = size // config.num_heads
        self.q_proj = linear(config, size, size)
        self.k_proj = linear(config, size, size)
        self.v_proj = linear(config, size, size)
        self.eta_proj = linear(config, size, config.num_heads)
        self.out_proj = linear(config, size, size, output=True)
        self._size = size

    def forward(
        self,
        x: Tensor,
        mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        state: dict[str, Tensor] | None = None,
        return_state: bool = False,
    ) -> Tensor | tuple[Tensor, dict[str, Tensor]]:
        """Compute the layer. The state is "recurrent" [batch, heads, head_dim, head_dim] in float32."""
        q, k, v = (proj(x).unflatten(-1, (-1, self.head_dim)) for proj in (self.q_proj, self.k_proj, self.v_proj))
        (k,) = without_padding(mask, k)
        shrink = float16_scale(v.dtype, self.head_dim)
        o, recurrent = gated_linear_attention(
            q,
            k,
            v,
            no_decay(q),
            scale=self.head_dim**-0.5 * shrink,
            initial_state=(state or {}).get("recurrent"),
            cu_seqlens=cu_seqlens,
        )
        inverse = _INVERSE[self.options.normaliser](to_accumulation_dtype(self.eta_proj(x)))
        o = to_accumulation_dtype(o) * (inverse / shrink).unsqueeze(-1)
        y = self.out_proj(o.flatten(-2).to(v.dtype))
        return (y, {"recurrent": recurrent}) if return_state else y

    def flops_per_token(self, length: int) -> int:
        """Return forward FLOPs per token, two per multiply-add, with the recurrence in chunks of 64 tokens."""
        heads = self._size // self.head_dim
        return 8 * self._size**2 + heads * (2 * self._size + flops_per_head(length, self.head_dim, self.head_dim))
