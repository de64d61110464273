"""HGRN2 (arXiv 2404.07904): a gated linear RNN whose outer product with 1 - f expands its state to a matrix."""

from __future__ import annotations

from dataclasses import dataclass
from math import log
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..layers.forget_gate import bounded_forget_gate
from ..layers.projections import linear
from ..operators.gla.gated_linear_attention import flops_per_head, gated_linear_attention
from ..operators.varlen import without_padding
from ..options import ModelShape, option, require_positive
from ..precision import to_accumulation_dtype


@dataclass(frozen=True)
class HGRN2Options:
    """Hold the settings of the HGRN2 mixer."""

    learned_lower_bound: bool = option(
        True, "true: the lower bound of the forget gate is learned. false: it is layer / layers."
    )
    lower_bound_range: Literal["layer", "free"] = option(
        "layer",
        "Range of a learned lower bound. layer: within 0.5 / layers of layer / layers. free: from 0 to 1, as in "
        "the paper; imported models need it.",
    )
    norm_over: Literal["head", "all"] = option(
        "head",
        "Channels that the norm before the output projection averages: those of one head, or all, as in "
        "flash-linear-attention's models. Tensor parallelism needs head.",
    )
    norm_eps: float = option(1e-5, "Added to the mean square in that norm.")

    def __post_init__(self) -> None:
        require_positive("hgrn2", self, "norm_eps")


class HGRN2(nn.Module):
    """Compute the layer of Qin et al. 2024: q = SiLU(W_q x), f = beta + (1 - beta) sigmoid(W_f x), k = 1 - f.

    S_t = diag(f_t) S_{t-1} + (1 - f_t) v_t, o_t = q_t S_t, y = W_O RMSNorm_head(o). There is no gate. The norm has no gain:
    W_O contains it.

    The paper's lower bounds beta are a cumulative softmax over all layers. Here layer l of L has its own parameter gamma [d]:
    beta = (l - 1/2 + sigmoid(gamma)) / L, and beta = 0 without a parameter for l = 0. Both start at l / L, grow with depth
    and stay below 1; this one needs no other layer. With lower_bound_range "free" beta = sigmoid(gamma), from l / L.
    """

    Options = HGRN2Options
    state_size: ClassVar[str] = "d^2 / heads float32"
    supports_context_parallel: ClassVar[bool] = True
    fp8_projections: ClassVar[tuple[str, ...]] = ("q_proj", "v_proj", "out_proj")
    tensor_parallel_plan: ClassVar[dict[str, str]] = {
        "q_proj": "column",
        "f_proj": "column",
        "v_proj": "column",
        "lower_bound": "heads",
        "out_proj": "row",
    }
    parameter_kinds: ClassVar[dict[str, str]] = {"lower_bound": "decay"}

    def __init__(self, config: ModelShape, layer_index: int, options: HGRN2Options) -> None:
        super().__init__()
        size = config.hidden_size
        self.head_dim = size // config.num_heads
        self.layer_index, self.num_layers = layer_index, config.num_layers
        self.q_proj = linear(config, size, size)
        self.f_proj = linear(config, size, size)
        self.v_proj = linear(config, size, size)
        self.options = options
        learned = options.learned_lower_bound and layer_index > 0
        depth = layer_index / config.num_layers
        start = log(depth / (1 - depth)) if learned and options.lower_bound_range == "free" else 0.0
        self.lower_bound = nn.Parameter(torch.full((size,), start)) if learned else None
        self.out_proj = linear(config, size, size, output=True)
        self._size = size

    @staticmethod
    def sharded_sizes(config: ModelShape, options: HGRN2Options) -> dict[str, int]:
        """Return size 1, which no tensor-parallel degree divides, if the norm averages all channels."""
        return {"model.mixer_options.hgrn2.norm_over: all": 1} if options.norm_over == "all" else {}

    def forward(
        self,
        x: Tensor,
        mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        state: dict[str, Tensor] | None = None,
        return_state: bool = False,
    ) -> Tensor | tuple[Tensor, dict[str, Tensor]]:
        """Compute the layer. The state is "recurrent" [batch, heads, head_dim, head_dim] in float32."""
        q, v = (proj(x).unflatten(-1, (-1, self.head_dim)) for proj in (self.q_proj, self.v_proj))
        q = F.silu(to_accumulation_dtype(q)).to(v.dtype)
        log_decay, k = (
            t.unflatten(-1, (-1, self.head_dim)) for t in self._gates(to_accumulation_dtype(self.f_proj(x)))
        )
        k = k.to(v.dtype)
        log_decay, k = without_padding(mask, log_decay, k)
        o, recurrent = gated_linear_attention(
            q, k, v, log_decay, initial_state=(state or {}).get("recurrent"), cu_seqlens=cu_seqlens
        )
        normed = to_accumulation_dtype(o) if self.options.norm_over == "head" else to_accumulation_dtype(o).flatten(-2)
        normed = F.rms_norm(normed, normed.shape[-1:], eps=self.options.norm_eps)
        y = self.out_proj(normed.reshape(*o.shape[:2], o.shape[2] * o.shape[3]).to(v.dtype))
        return (y, {"recurrent": recurrent}) if return_state else y

    def _gates(self, a: Tensor) -> tuple[Tensor, Tensor]:
        """Return log f and 1 - f for logits a [batch, length, hidden_size] in float32 or float64."""
        gamma = None if self.lower_bound is None else to_accumulation_dtype(self.lower_bound)
        if gamma is not None and self.options.lower_bound_range == "free":
            # Not from beta, which is rounded near 1.
            return bounded_forget_gate(a, F.logsigmoid(gamma), F.logsigmoid(-gamma))
        depth = a.new_full((), self.layer_index) if gamma is None else self.layer_index - 0.5 + torch.sigmoid(gamma)
        beta = depth / self.num_layers
        return bounded_forget_gate(a, beta.log(), torch.log1p(-beta))

    def flops_per_token(self, length: int) -> int:
        """Return forward FLOPs per token, two per multiply-add, with the recurrence in chunks of 64 tokens."""
        heads = self._size // self.head_dim
        return 8 * self._size**2 + heads * flops_per_head(length, self.head_dim, self.head_dim)
