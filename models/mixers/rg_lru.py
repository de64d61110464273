"""RG-LRU, the recurrent block of Griffin (arXiv 2402.19427): a real LRU with gates on its decay and its input."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..layers.projections import linear
from ..layers.short_convolution import CausalConvolution
from ..operators.scan.linear_scan import scan
from ..operators.varlen import without_padding
from ..options import ModelShape, option, require_at_least, require_divisor, require_positive
from ..precision import to_accumulation_dtype


@dataclass(frozen=True)
class RGLRUOptions:
    """Hold the settings of the RG-LRU mixer."""

    width: int | None = option(None, "Channels of the recurrence; null: model.hidden_size. Griffin: 4 d / 3.")
    conv_kernel: int = option(4, "Kernel size of the convolution, in tokens.")
    exponent: float = option(8.0, "Factor c in the decay a_t = exp(-c softplus(Lambda) r_t).")

    def __post_init__(self) -> None:
        require_at_least("rg_lru", self, 1, "width", "conv_kernel")
        require_positive("rg_lru", self, "exponent")


class RGLRU(nn.Module):
    """Compute the recurrent block of De et al. 2024, section 2.3, around the RG-LRU of section 2.4, Eq. 1-4.

    u = conv(W_x x); r_t = sigmoid(W_a u_t + b_a); i_t = sigmoid(W_i u_t + b_i); a_t = exp(-c softplus(Lambda) r_t);
    h_t = a_t h_{t-1} + sqrt(1 - a_t^2) i_t u_t; y_t = W_O(GeLU(W_G x_t) h_t).
    W_a and W_i are block-diagonal with one block per head, as in the paper's sharded models. The convolution has no bias.
    Initially a_t at r_t = 1 is uniform in [0.9, 0.999].
    """

    Options = RGLRUOptions
    state_size: ClassVar[str] = "width float32 and (kernel - 1) width"
    supports_context_parallel: ClassVar[bool] = True
    fp8_projections: ClassVar[tuple[str, ...]] = ("x_proj", "out_proj")
    tensor_parallel_plan: ClassVar[dict[str, str]] = {
        "x_proj": "column",
        "gate_proj": "column",
        "conv": "heads",
        "decay_gate_weight": "heads",
        "decay_gate_bias": "heads",
        "input_gate_weight": "heads",
        "input_gate_bias": "heads",
        "decay": "heads",
        "out_proj": "row",
    }
    parameter_kinds: ClassVar[dict[str, str]] = {"decay": "decay"}

    def __init__(self, config: ModelShape, layer_index: int, options: RGLRUOptions) -> None:
        super().__init__()
        size, heads = config.hidden_size, config.num_heads
        width = options.width or size
        block = width // heads
        self.options = options
        self.x_proj = linear(config, size, width)
        self.gate_proj = linear(config, size, width)
        self.conv = CausalConvolution(width, options.conv_kernel, silu=False)
        self.decay_gate_weight = nn.Parameter(torch.randn(heads, block, block) * block**-0.5)
        self.decay_gate_bias = nn.Parameter(torch.zeros(width))
        self.input_gate_weight = nn.Parameter(torch.randn(heads, block, block) * block**-0.5)
        self.input_gate_bias = nn.Parameter(torch.zeros(width))
        rate = -torch.empty(width).uniform_(0.9, 0.999).log() / options.exponent
        self.decay = nn.Parameter(rate + (-torch.expm1(-rate)).log())
        self.out_proj = linear(config, width, size, output=True)
        self._size, self._width, self._block = size, width, block

    @staticmethod
    def check(config: ModelShape, options: RGLRUOptions) -> None:
        """Raise ValueError if model.num_heads does not divide the width into blocks."""
        width = options.width or config.hidden_size
        require_divisor("model.num_heads", config.num_heads, "model.mixer_options.rg_lru.width", width)

    def forward(
        self,
        x: Tensor,
        mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        state: dict[str, Tensor] | None = None,
        return_state: bool = False,
    ) -> Tensor | tuple[Tensor, dict[str, Tensor]]:
        """Compute the layer. The state is "recurrent" [batch, width] in float32 and "conv" [batch, kernel - 1, width]."""
        state = state or {}
        u, history = self.conv(self.x_proj(x), mask, cu_seqlens, state.get("conv"), return_state)
        decay_gate = _block_diagonal(u, self.decay_gate_weight, self.decay_gate_bias)
        input_gate = _block_diagonal(u, self.input_gate_weight, self.input_gate_bias)
        log_decay = -self.options.exponent * F.softplus(to_accumulation_dtype(self.decay)) * decay_gate
        # sqrt(1 - a^2). At 0 the root has no derivative.
        scale = (-torch.expm1(2 * log_decay)).clamp_min(torch.finfo(log_decay.dtype).tiny).sqrt()
        v = scale * input_gate * to_accumulation_dtype(u)
        log_decay, v = without_padding(mask, log_decay, v)
        h, recurrent = scan(
            v, log_decay, initial_state=state.get("recurrent"), cu_seqlens=cu_seqlens, compute_dtype=u.dtype
        )
        y = self.out_proj((F.gelu(to_accumulation_dtype(self.gate_proj(x))) * h).to(u.dtype))
        return (y, {"recurrent": recurrent, "conv": history}) if return_state else y

    def flops_per_token(self, length: int) -> int:
        """Return forward FLOPs per token, two per multiply-add."""
        projections = 6 * self._size * self._width
        return projections + (2 * self.options.conv_kernel + 4 * self._block + 5) * self._width


def _block_diagonal(u: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Return the sigmoid of a block-diagonal projection of u [batch, length, width], in float32 (float64 for float64).

    weight: [heads, block, block]; bias: [width].
    """
    blocks = u.unflatten(-1, (-1, weight.shape[-1]))
    return (
        to_accumulation_dtype(torch.einsum("blhi,hji->blhj", blocks, weight).flatten(-2)) + to_accumulation_dtype(bias)
    ).sigmoid()
