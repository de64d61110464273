"""TransNormer (TransNormerLLM, arXiv 2307.14995): linear attention with a fixed decay and a learned complex phase."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..layers.embedding import token_positions
from ..layers.projections import head_indices, linear
from ..operators.gla.gated_linear_attention import flops_per_head, gated_linear_attention
from ..operators.varlen import without_padding
from ..options import ModelShape, option, require_positive
from ..precision import to_accumulation_dtype


@dataclass(frozen=True)
class TransNormerOptions:
    """Hold the settings of the TransNormer mixer."""

    phase: Literal["all", "first", "none"] = option(
        "all", "Layers with the phase cos(theta (s - t)): all, the first only (faster, as in the paper), or none."
    )
    phase_base: float = option(10000.0, "Base of the initial theta, as in rotary positions.")

    def __post_init__(self) -> None:
        require_positive("transnormer", self, "phase_base")


class TransNormer(nn.Module):
    """Compute the gated linear attention of Qin et al. 2023, section 3 (LRPE-d, SimpleRMSNorm), phi = SiLU.

    a_st = sum_c phi(q_s)_c phi(k_t)_c lambda^(s-t) cos(theta_c (s - t)), lambda = exp(-8 h / heads (1 - layer / layers))
    with h and layer counted from 0; o_s = sum_(t <= s) a_st v_t; y = W_O(SimpleRMSNorm(o) * W_U x).
    cos(a - b) = cos a cos b + sin a sin b, so the recurrence has keys [k cos, k sin] of twice the width. theta is learned.
    The norm averages one head, so that heads are independent.
    """

    Options = TransNormerOptions
    state_size: ClassVar[str] = "2 d^2 / heads float32 and a position; half without the phase"
    supports_context_parallel: ClassVar[bool] = True
    fp8_projections: ClassVar[tuple[str, ...]] = ("q_proj", "k_proj", "v_proj", "out_proj")
    # head_index is a buffer: a head's decay depends on its number in the whole layer.
    tensor_parallel_plan: ClassVar[dict[str, str]] = {
        "q_proj": "column",
        "k_proj": "column",
        "v_proj": "column",
        "gate_proj": "column",
        "theta": "heads",
        "head_index": "heads",
        "out_proj": "row",
    }
    parameter_kinds: ClassVar[dict[str, str]] = {"theta": "decay"}
    head_index: Tensor

    def __init__(self, config: ModelShape, layer_index: int, options: TransNormerOptions) -> None:
        super().__init__()
        size = config.hidden_size
        self.head_dim = size // config.num_heads
        self.q_proj = linear(config, size, size)
        self.k_proj = linear(config, size, size)
        self.v_proj = linear(config, size, size)
        self.gate_proj = linear(config, size, size)
        self.out_proj = linear(config, size, size, output=True)
        channel = torch.arange(self.head_dim).repeat(config.num_heads)
        has_phase = options.phase == "all" or (options.phase == "first" and layer_index == 0)
        self.theta = nn.Parameter(options.phase_base ** (-channel / self.head_dim)) if has_phase else None
        # Integers, so that the decays stay exact if the module is cast to 16 bits.
        self.register_buffer("head_index", head_indices(config), persistent=False)
        self.rate = -8 / config.num_heads * (1 - layer_index / config.num_layers)
        self._size = size

    def forward(
        self,
        x: Tensor,
        mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        state: dict[str, Tensor] | None = None,
        return_state: bool = False,
    ) -> Tensor | tuple[Tensor, dict[str, Tensor]]:
        """Compute the layer.

        The state is "recurrent" [batch, heads, 2 head_dim, head_dim] in float32 and "position" [batch] int, the tokens
        seen (without the phase: head_dim instead of 2 head_dim).
        """
        state = state or {}
        q, k, v = (proj(x).unflatten(-1, (-1, self.head_dim)) for proj in (self.q_proj, self.k_proj, self.v_proj))
        q, k = F.silu(to_accumulation_dtype(q)), F.silu(to_accumulation_dtype(k))
        position, end = token_positions(x, mask, cu_seqlens, state.get("position"))
        if self.theta is not None:
            angle = position[:, :, None, None] * to_accumulation_dtype(self.theta).unflatten(-1, (-1, self.head_dim))
            cos, sin = angle.cos(), angle.sin()
            q, k = (torch.cat([t * cos, t * sin], -1) for t in (q, k))
        log_decay = (self.rate * self.head_index.to(q.dtype))[:, None].expand(*q.shape[:3], 1)
        log_decay, k = without_padding(mask, log_decay, k)
        o, recurrent = gated_linear_attention(
            q.to(v.dtype),
            k.to(v.dtype),
            v,
            log_decay,
            scale=self.head_dim**-0.5,
            initial_state=state.get("recurrent"),
            cu_seqlens=cu_seqlens,
        )
        o = F.rms_norm(to_accumulation_dtype(o), o.shape[-1:], eps=1e-5).flatten(-2)
        y = self.out_proj((to_accumulation_dtype(self.gate_proj(x)) * o).to(v.dtype))
        return (y, {"recurrent": recurrent, "position": end}) if return_state else y

    def flops_per_token(self, length: int) -> int:
        """Return forward FLOPs per token, two per multiply-add, with the recurrence in chunks of 64 tokens."""
        dim_v = self.head_dim
        dim_k = dim_v if self.theta is None else 2 * dim_v
        return 10 * self._size**2 + self._size // dim_v * flops_per_head(length, dim_k, dim_v)
