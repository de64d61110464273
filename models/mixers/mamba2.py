"""Mamba-2 (arXiv 2405.21060): a state space with one decay per head (SSD), which is linear attention with a gate."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..backend import is_supported
from ..layers.initial_decays import initial_a_log, initial_dt_bias
from ..layers.projections import linear
from ..layers.short_convolution import CausalConvolution
from ..operators.gla.gated_linear_attention import flops_per_head, gated_linear_attention
from ..operators.gla.normalized import short_attention
from ..operators.varlen import without_padding
from ..options import ModelShape, option, require_at_least, require_divisor
from ..precision import to_accumulation_dtype


@dataclass(frozen=True)
class Mamba2Options:
    """Hold the settings of the Mamba-2 mixer."""

    expand: int = option(2, "Channels of the state space are expand * hidden_size.")
    state_size: int = option(128, "Channels of B and C, N. All heads share B and C.")
    conv_kernel: int = option(4, "Kernel size of the convolutions, in tokens.")

    def __post_init__(self) -> None:
        require_at_least("mamba2", self, 1, "expand", "state_size", "conv_kernel")


class Mamba2(nn.Module):
    """Compute the block of Dao and Gu 2024, section 7, around the state space of Eq. 1-2, E = expand * d.

    u, B, C = SiLU(conv(W x)); dt = softplus(W_dt x + b) and a = -exp(A_log) per head;
    h_t = exp(dt_t a) h_{t-1} + dt_t B_t u_t; y_t = W_O RMSNorm_head(SiLU(W_z x_t) * (C_t h_t + D u_t)).
    The recurrence has q = C, k = B, v = dt u, log decay dt a. All heads share B and C (multi-value attention).
    The norm averages one head and has a gain (section 8.1), so that tensor parallelism can split by heads. The released
    models average all of E. The convolutions have no bias.
    """

    Options = Mamba2Options
    state_size: ClassVar[str] = "expand d N float32 and (kernel - 1) (expand d + 2 N)"
    supports_context_parallel: ClassVar[bool] = True
    fp8_projections: ClassVar[tuple[str, ...]] = ("x_proj", "out_proj")
    # Every tensor-parallel rank uses the whole of B and C, and its heads compute a part of their gradients.
    tensor_parallel_plan: ClassVar[dict[str, str]] = {
        "x_proj": "column",
        "b_proj": "partial_grad",
        "c_proj": "partial_grad",
        "dt_proj": "column",
        "gate_proj": "column",
        "conv_x": "heads",
        "conv_b": "partial_grad",
        "conv_c": "partial_grad",
        "dt_bias": "heads",
        "a_log": "heads",
        "skip": "heads",
        "norm_weight": "heads",
        "out_proj": "row",
    }
    parameter_kinds: ClassVar[dict[str, str]] = {"a_log": "decay", "skip": "norm", "norm_weight": "norm"}

    def __init__(self, config: ModelShape, layer_index: int, options: Mamba2Options) -> None:
        super().__init__()
        size, heads = config.hidden_size, config.num_heads
        inner = options.expand * size
        self.options = options
        self.head_dim = inner // heads
        self.x_proj = linear(config, size, inner)
        self.b_proj = linear(config, size, options.state_size)
        self.c_proj = linear(config, size, options.state_size)
        self.dt_proj = linear(config, size, heads)
        self.gate_proj = linear(config, size, inner)
        self.conv_x = CausalConvolution(inner, options.conv_kernel, silu=True)
        self.conv_b = CausalConvolution(options.state_size, options.conv_kernel, silu=True)
        self.conv_c = CausalConvolution(options.state_size, options.conv_kernel, silu=True)
        self.dt_bias = initial_dt_bias(heads)
        self.a_log = initial_a_log(heads, 1)
        self.skip = nn.Parameter(torch.ones(heads))
        self.norm_weight = nn.Parameter(torch.ones(inner))
        self.norm_eps = config.norm_eps
        self.out_proj = linear(config, inner, size, output=True)
        self._size, self._heads = size, heads

    @staticmethod
    def check(config: ModelShape, options: Mamba2Options) -> None:
        """Raise ValueError if model.num_heads does not divide the channels."""
        channels_name = "the channels of mamba2, expand * model.hidden_size"
        require_divisor("model.num_heads", config.num_heads, channels_name, options.expand * config.hidden_size)

    def forward(
        self,
        x: Tensor,
        mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        state: dict[str, Tensor] | None = None,
        return_state: bool = False,
    ) -> Tensor | tuple[Tensor, dict[str, Tensor]]:
        """Compute the layer.

        The state is "recurrent" [batch, heads, N, head_dim] in float32 and "conv_x", "conv_b", "conv_c" [batch, kernel
        - 1, channels].
        """
        state = state or {}
        new_state: dict[str, Tensor] = {}
        convolved = []
        for name, proj, conv in (
            ("conv_x", self.x_proj, self.conv_x),
            ("conv_b", self.b_proj, self.conv_b),
            ("conv_c", self.c_proj, self.conv_c),
        ):
            y, history = conv(proj(x), mask, cu_seqlens, state.get(name), return_state)
            convolved.append(y)
            if history is not None:
                new_state[name] = history
        u, b, c = convolved
        u = u.unflatten(-1, (-1, self.head_dim))
        dt = F.softplus(to_accumulation_dtype(self.dt_proj(x)) + to_accumulation_dtype(self.dt_bias))
        # dt = 0 leaves the state unchanged.
        (dt,) = without_padding(mask, dt)
        heads = dt.shape[-1]
        q, k = (y.unsqueeze(2).expand(-1, -1, heads, -1) for y in (c, b))
        v, log_decay = _apply_time_step(dt, u), (-dt * to_accumulation_dtype(self.a_log).exp()).unsqueeze(-1)
        initial_state = state.get("recurrent")
        o = short_attention(
            q,
            k,
            v,
            log_decay,
            normalized=False,
            cu_seqlens=cu_seqlens,
            initial_state=initial_state,
            return_state=return_state,
        )
        if o is None:
            o, new_state["recurrent"] = gated_linear_attention(
                q, k, v, log_decay, initial_state=initial_state, cu_seqlens=cu_seqlens
            )
        y = self.out_proj(_gated_norm(o, u, self.skip, self.gate_proj(x), self.norm_weight, self.norm_eps))
        return (y, new_state) if return_state else y

    def flops_per_token(self, length: int) -> int:
        """Return forward FLOPs per token, two per multiply-add, with the recurrence in chunks of 64 tokens."""
        size, heads, states, head_dim = self._size, self._heads, self.options.state_size, self.head_dim
        inner = heads * head_dim
        projections = 2 * size * (3 * inner + 2 * states + heads)
        convolutions = 2 * self.options.conv_kernel * (inner + 2 * states)
        return projections + convolutions + heads * flops_per_head(length, states, head_dim)


def _apply_time_step(dt: Tensor, u: Tensor) -> Tensor:
    """Return dt * u in u's dtype. dt: [batch, length, heads]; u: [batch, length, heads, head_dim]."""
    if is_supported(u):
        from ..kernels.mamba2 import apply_time_step

        return apply_time_step(dt, u)
    return (dt.unsqueeze(-1) * to_accumulation_dtype(u)).to(u.dtype)


def _gated_norm(o: Tensor, u: Tensor, skip: Tensor, z: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return w x / rms_head(x) with x = (o + D u) SiLU(z), in u's dtype and z's shape."""
    if is_supported(o) and o.dtype == u.dtype == z.dtype:
        from ..kernels.mamba2 import gated_norm

        return gated_norm(o, u, skip, z, weight, eps)
    x = to_accumulation_dtype(o) + to_accumulation_dtype(skip).unsqueeze(-1) * to_accumulation_dtype(u)
    x = x * F.silu(to_accumulation_dtype(z)).view_as(x)
    x = x * (x.square().mean(-1, keepdim=True) + eps).rsqrt()
    return (x.flatten(-2) * to_accumulation_dtype(weight)).to(u.dtype)
