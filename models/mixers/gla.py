"""Gated linear attention (arXiv 2312.06635): one decay per key channel, from a projection of low rank."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch.nn.functional as F
from torch import Tensor, nn

from ..layers.gated_norm import gated_head_norm
from ..layers.projections import linear
from ..layers.short_convolution import CausalConvolution, convolve_input
from ..operators.gla.gated_linear_attention import flops_per_head, gated_linear_attention
from ..operators.varlen import without_padding
from ..options import HEAD_NORM, HEAD_NORM_EPS, ModelShape, check_key_dim, option, require_at_least, require_positive
from ..precision import to_accumulation_dtype


@dataclass(frozen=True)
class GLAOptions:
    """Hold the settings of the GLA mixer."""

    low_rank: int = option(16, "Rank of the decay projection W_2 W_1.")
    temperature: float = option(16.0, "The decay is sigmoid(a)^(1 / temperature).")
    norm: Literal["layernorm", "rmsnorm"] = option("layernorm", HEAD_NORM)
    norm_eps: float = option(1e-5, HEAD_NORM_EPS)
    expand_k: float = option(0.5, "key_dim / hidden_size: the width of q, k and the decay over all heads. 1 for MQAR.")
    conv_kernel: int = option(
        0, "Kernel size, in tokens, of a causal convolution with SiLU on the layer's input; 0: none. 2 for MQAR."
    )

    def __post_init__(self) -> None:
        require_at_least("gla", self, 1, "low_rank")
        require_at_least("gla", self, 0, "conv_kernel")
        require_positive("gla", self, "temperature", "norm_eps", "expand_k")


class GLA(nn.Module):
    """Compute the layer of Yang et al. 2023, section 4.4, with key_dim = expand_k d (d / 2) and value_dim = d.

    alpha_t = sigmoid(W_2 W_1 x_t + b)^(1 / temperature); S_t = diag(alpha_t) S_{t-1} + k_t v_t;
    o_t = q_t S_t / sqrt(head_dim_k); y = W_O(SiLU(W_G x + b) * LayerNorm_head(o)). The LayerNorm has no gain: W_O contains it.
    """

    Options = GLAOptions
    state_size: ClassVar[str] = "d^2 / (2 heads) float32"
    supports_context_parallel: ClassVar[bool] = True
    fp8_projections: ClassVar[tuple[str, ...]] = ("q_proj", "k_proj", "v_proj", "out_proj")
    # Every tensor-parallel rank uses the whole W_1, and its heads compute a part of the gradient of W_1.
    tensor_parallel_plan: ClassVar[dict[str, str]] = {
        "conv": "partial_grad",
        "q_proj": "column",
        "k_proj": "column",
        "v_proj": "column",
        "decay_down": "partial_grad",
        "decay_up": "column",
        "gate_proj": "column",
        "out_proj": "row",
    }
    parameter_kinds: ClassVar[dict[str, str]] = {}

    def __init__(self, config: ModelShape, layer_index: int, options: GLAOptions) -> None:
        super().__init__()
        size = config.hidden_size
        key_dim = round(size * options.expand_k)
        self.options = options
        self.head_dim_k = key_dim // config.num_heads
        self.head_dim_v = size // config.num_heads
        self.conv = CausalConvolution(size, options.conv_kernel, silu=True) if options.conv_kernel else None
        self.q_proj = linear(config, size, key_dim)
        self.k_proj = linear(config, size, key_dim)
        self.v_proj = linear(config, size, size)
        self.decay_down = linear(config, size, options.low_rank)
        self.decay_up = linear(config, options.low_rank, key_dim, bias=True)
        self.gate_proj = linear(config, size, size, bias=True)
        self.out_proj = linear(config, size, size, output=True)
        self._size, self._key_dim = size, key_dim

    @staticmethod
    def check(config: ModelShape, options: GLAOptions) -> None:
        """Raise ValueError if model.num_heads does not divide key_dim."""
        check_key_dim("gla", config, options.expand_k)

    def forward(
        self,
        x: Tensor,
        mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        state: dict[str, Tensor] | None = None,
        return_state: bool = False,
    ) -> Tensor | tuple[Tensor, dict[str, Tensor]]:
        """Compute the layer.

        The state is "recurrent" [batch, heads, head_dim_k, head_dim_v] in float32, and with a convolution "conv"
        [batch, kernel - 1, hidden_size], its last inputs.
        """
        state = state or {}
        x, new_state = convolve_input(self.conv, x, mask, cu_seqlens, state, return_state)
        q, k = (proj(x).unflatten(-1, (-1, self.head_dim_k)) for proj in (self.q_proj, self.k_proj))
        v = self.v_proj(x).unflatten(-1, (-1, self.head_dim_v))
        log_decay = F.logsigmoid(to_accumulation_dtype(self.decay_up(self.decay_down(x)))) / self.options.temperature
        log_decay = log_decay.unflatten(-1, (-1, self.head_dim_k))
        log_decay, k = without_padding(mask, log_decay, k)
        o, new_state["recurrent"] = gated_linear_attention(
            q,
            k,
            v,
            log_decay,
            scale=self.head_dim_k**-0.5,
            initial_state=state.get("recurrent"),
            cu_seqlens=cu_seqlens,
            fits_matmul_form=self.options.temperature >= 8,
        )
        y = self.out_proj(gated_head_norm(o, self.gate_proj(x), norm=self.options.norm, eps=self.options.norm_eps))
        return (y, new_state) if return_state else y

    def flops_per_token(self, length: int) -> int:
        """Return forward FLOPs per token, two per multiply-add, with the recurrence in chunks of 64 tokens."""
        size, key_dim = self._size, self._key_dim
        projections = 6 * size * size + 4 * size * key_dim + 2 * (size + key_dim) * self.options.low_rank
        recurrence = size // self.head_dim_v * flops_per_head(length, self.head_dim_k, self.head_dim_v)
        return projections + 2 * size * self.options.conv_kernel + recurrence
