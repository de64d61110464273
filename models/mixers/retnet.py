"""Retention (arXiv 2307.08621): linear attention with rotated queries and keys and one fixed decay per head."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from ..layers.embedding import token_positions
from ..layers.gated_norm import gated_head_norm
from ..layers.projections import head_indices, linear
from ..operators.gla.gated_linear_attention import flops_per_head, gated_linear_attention
from ..operators.rotary import rotary, rotate
from ..operators.varlen import without_padding
from ..options import HEAD_NORM, HEAD_NORM_EPS, ModelShape, option, require_at_least, require_divisor, require_positive
from ..precision import accumulation_dtype


@dataclass(frozen=True)
class RetNetOptions:
    """Hold the settings of the RetNet mixer."""

    expand_v: int = option(2, "value_dim / hidden_size: the width of values and gate. The paper has 2.")
    rotary_base: float = option(10000.0, "Base of the rotary wavelengths.")
    norm: Literal["layernorm", "rmsnorm"] = option("layernorm", HEAD_NORM)
    norm_eps: float = option(1e-5, HEAD_NORM_EPS)

    def __post_init__(self) -> None:
        require_at_least("retnet", self, 1, "expand_v")
        require_positive("retnet", self, "rotary_base", "norm_eps")


class RetNet(nn.Module):
    """Compute gated multi-scale retention, Sun et al. 2023, Eq. 5-8.

    q_t and k_t are rotated by t theta, theta_c = base^(-2c / head_dim). For head h:
    S_t = (1 - 2^(-5-h)) S_{t-1} + k_t v_t; o_t = q_t S_t / sqrt(head_dim); y = W_O(SiLU(W_G x) * GroupNorm(o)).
    The norm has one group per head and no gain: W_O contains it. The paper's normalizers scale whole heads, so the norm
    cancels them; they are left out.
    """

    Options = RetNetOptions
    state_size: ClassVar[str] = "expand_v d^2 / heads float32 and a position"
    supports_context_parallel: ClassVar[bool] = True
    fp8_projections: ClassVar[tuple[str, ...]] = ("q_proj", "k_proj", "v_proj", "out_proj")
    # head_index is a buffer: a head's decay depends on its number in the whole layer.
    tensor_parallel_plan: ClassVar[dict[str, str]] = {
        "q_proj": "column",
        "k_proj": "column",
        "v_proj": "column",
        "gate_proj": "column",
        "head_index": "heads",
        "out_proj": "row",
    }
    parameter_kinds: ClassVar[dict[str, str]] = {}
    head_index: Tensor

    def __init__(self, config: ModelShape, layer_index: int, options: RetNetOptions) -> None:
        super().__init__()
        size, inner = config.hidden_size, options.expand_v * config.hidden_size
        self.options = options
        self.head_dim_k = size // config.num_heads
        self.head_dim_v = inner // config.num_heads
        self.q_proj = linear(config, size, size)
        self.k_proj = linear(config, size, size)
        self.v_proj = linear(config, size, inner)
        self.gate_proj = linear(config, size, inner)
        self.out_proj = linear(config, inner, size, output=True)
        # Integers, so that the decays stay exact if the module is cast to 16 bits.
        self.register_buffer("head_index", head_indices(config), persistent=False)
        self._size = size

    @staticmethod
    def check(config: ModelShape, options: RetNetOptions) -> None:
        """Raise ValueError if a head has an odd number of channels, which rotation in pairs excludes."""
        pairs_name = "the pairs of channels that retnet rotates, model.hidden_size / 2"
        require_divisor("model.num_heads", config.num_heads, pairs_name, config.hidden_size / 2)

    def forward(
        self,
        x: Tensor,
        mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        state: dict[str, Tensor] | None = None,
        return_state: bool = False,
    ) -> Tensor | tuple[Tensor, dict[str, Tensor]]:
        """Compute the layer.

        The state is "recurrent" [batch, heads, head_dim_k, head_dim_v] in float32 and "position" [batch] int, the
        tokens seen.
        """
        state = state or {}
        q, k = (proj(x).unflatten(-1, (-1, self.head_dim_k)) for proj in (self.q_proj, self.k_proj))
        v = self.v_proj(x).unflatten(-1, (-1, self.head_dim_v))
        position, end = token_positions(x, mask, cu_seqlens, state.get("position"))
        dtype = accumulation_dtype(q)
        cos, sin = rotary(position, self.head_dim_k, self.options.rotary_base, dtype)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        log_decay = torch.log1p(-torch.exp2(-5 - self.head_index.to(dtype)))[:, None].expand(*q.shape[:3], 1)
        log_decay, k = without_padding(mask, log_decay, k)
        o, recurrent = gated_linear_attention(
            q,
            k,
            v,
            log_decay,
            scale=self.head_dim_k**-0.5,
            initial_state=state.get("recurrent"),
            cu_seqlens=cu_seqlens,
        )
        y = self.out_proj(gated_head_norm(o, self.gate_proj(x), norm=self.options.norm, eps=self.options.norm_eps))
        return (y, {"recurrent": recurrent, "position": end}) if return_state else y

    def flops_per_token(self, length: int) -> int:
        """Return forward FLOPs per token, two per multiply-add, with the recurrence in chunks of 64 tokens."""
        size, dim_k, dim_v = self._size, self.head_dim_k, self.head_dim_v
        projections = (4 + 6 * self.options.expand_v) * size * size
        return projections + size // dim_k * flops_per_head(length, dim_k, dim_v)
