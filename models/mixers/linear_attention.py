"""Linear attention (arXiv 2006.16236): a positive feature map in place of the exponential, and a normalizer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..layers.projections import linear
from ..layers.short_convolution import CausalConvolution, convolve_input
from ..operators.gla.gated_linear_attention import flops_per_head, no_decay
from ..operators.gla.normalized import linear_attention_with_normalizer, short_attention
from ..operators.lion.feature_map import feature_map
from ..operators.varlen import without_padding
from ..options import ModelShape, option, require_at_least
from ..precision import NORMALIZER_EPS, to_accumulation_dtype


@dataclass(frozen=True)
class LinearAttentionOptions:
    """Hold the settings of the linear attention mixer."""

    bias: bool = option(False, "Biases in the four projections.")
    feature_map: Literal["elu", "taylor"] = option(
        "elu",
        "elu: elu(x) + 1. taylor: 1 + x + x^2 / 2 for x = q k / sqrt(feature_dim), the Taylor polynomial of the "
        "exponential, as Based; q and k then have feature_dim channels per head.",
    )
    feature_dim: int = option(16, "Channels of q and k per head before the feature map taylor.")
    conv_kernel: int = option(
        0, "Kernel size, in tokens, of a causal convolution with SiLU on the layer's input; 0: none."
    )

    def __post_init__(self) -> None:
        require_at_least("linear_attention", self, 1, "feature_dim")
        require_at_least("linear_attention", self, 0, "conv_kernel")


class LinearAttention(nn.Module):
    """Compute the causal layer of Katharopoulos et al. 2020, Eq. 7, 9-12 and 16-20, with phi(x) = elu(x) + 1.

    Per head: S_t = S_{t-1} + phi(k_t) v_t, z_t = z_{t-1} + phi(k_t), o_t = phi(q_t) S_t / (phi(q_t) z_t). y = W_O o.
    With feature_map taylor, phi(q) phi(k) = 1 + s + s^2 / 2, s = q k / sqrt(feature_dim): Arora et al. 2024 (Based, arXiv
    2402.18668), section 3.1.
    """

    Options = LinearAttentionOptions
    state_size: ClassVar[str] = "d^2 / heads + d float32"
    supports_context_parallel: ClassVar[bool] = True
    fp8_projections: ClassVar[tuple[str, ...]] = ("q_proj", "k_proj", "v_proj", "out_proj")
    tensor_parallel_plan: ClassVar[dict[str, str]] = {
        "conv": "partial_grad",
        "q_proj": "column",
        "k_proj": "column",
        "v_proj": "column",
        "out_proj": "row",
    }
    parameter_kinds: ClassVar[dict[str, str]] = {}

    def __init__(self, config: ModelShape, layer_index: int, options: LinearAttentionOptions) -> None:
        super().__init__()
        size = config.hidden_size
        self.options = options
        self.head_dim = size // config.num_heads
        taylor = options.feature_map == "taylor"
        self.head_dim_k = options.feature_dim if taylor else self.head_dim
        key_dim = self.head_dim_k * config.num_heads
        self.conv = CausalConvolution(size, options.conv_kernel, silu=True) if options.conv_kernel else None
        self.q_proj = linear(config, size, key_dim, bias=options.bias)
        self.k_proj = linear(config, size, key_dim, bias=options.bias)
        self.v_proj = linear(config, size, size, bias=options.bias)
        self.out_proj = linear(config, size, size, bias=options.bias, output=True)
        self._size, self._key_dim = size, key_dim
        self._features = _taylor_width(self.head_dim_k) if taylor else self.head_dim_k

    def forward(
        self,
        x: Tensor,
        mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        state: dict[str, Tensor] | None = None,
        return_state: bool = False,
    ) -> Tensor | tuple[Tensor, dict[str, Tensor]]:
        """Compute the layer.

        The state is "recurrent" [batch, heads, features, head_dim + 1] in float32, S and z concatenated. A convolution
        adds "conv" [batch, kernel - 1, hidden_size], its last inputs.
        """
        state = state or {}
        x, new_state = convolve_input(self.conv, x, mask, cu_seqlens, state, return_state)
        q, k = (proj(x).unflatten(-1, (-1, self.head_dim_k)) for proj in (self.q_proj, self.k_proj))
        v = self.v_proj(x).unflatten(-1, (-1, self.head_dim))
        recurrent, o = state.get("recurrent"), None
        if self.options.feature_map == "taylor" and mask is None:
            # The kernel computes the polynomial of q k, without features.
            o = short_attention(
                q, k, v, None, scale=self.head_dim_k**-0.5, taylor=True, normalized=True, cu_seqlens=cu_seqlens,
                initial_state=recurrent, return_state=return_state,
            )  # fmt: skip
        if o is not None:
            return self.out_proj(o.flatten(-2))
        if self.options.feature_map == "elu":
            q, k = (feature_map(t, "elu", v.dtype) for t in (q, k))
        else:
            q, k = (_taylor_features(to_accumulation_dtype(t)).to(v.dtype) for t in (q, k))
        (k,) = without_padding(mask, k)
        num, den, new_state["recurrent"] = linear_attention_with_normalizer(
            q,
            k,
            v,
            no_decay(q),
            weight=self.head_dim_k if self.options.feature_map == "elu" else 1,
            initial_state=recurrent,
            cu_seqlens=cu_seqlens,
        )
        y = self.out_proj((num / (den + NORMALIZER_EPS)).flatten(-2).to(v.dtype))
        return (y, new_state) if return_state else y

    def flops_per_token(self, length: int) -> int:
        """Return forward FLOPs per token, two per multiply-add, with the recurrence in chunks of 64 tokens."""
        size, key_dim = self._size, self._key_dim
        projections = 4 * size * (size + key_dim) + 2 * size * self.options.conv_kernel
        return projections + size // self.head_dim * flops_per_head(length, self._features, self.head_dim + 1)


def _taylor_features(x: Tensor) -> Tensor:
    """Return phi(x) [..., features] of q or k [..., dim], for which phi(q) phi(k) = 1 + s + s^2 / 2 with s = q k / sqrt(dim)."""
    # s^2 / 2 contains each pair i < j once: (q_i k_i) (q_j k_j) = (q_i q_j) (k_i k_j), one feature.
    dim = x.shape[-1]
    x = x * dim**-0.25
    first, second = torch.triu_indices(dim, dim, 1, device=x.device)
    parts = [
        torch.ones_like(x[..., :1]),
        x,
        x.square() * 0.5**0.5,
        x.index_select(-1, first) * x.index_select(-1, second),
    ]
    return F.pad(torch.cat(parts, -1), (0, _taylor_width(dim) - 1 - dim - dim * (dim + 1) // 2))


def _taylor_width(dim: int) -> int:
    """Return 1 + dim + dim (dim + 1) / 2 features, rounded up to a multiple of 16 for the kernels."""
    return -(-(1 + dim + dim * (dim + 1) // 2) // 16) * 16
