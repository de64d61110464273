"""Gated linear attention (arXiv 2312.06635): a decay for every channel of the keys, from a map of low rank."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Literal

import torch.nn.functional as F
from torch import Tensor, nn

from ..config import ModelConfig, nearest_divisors
from ..init import linear
from ..precision import wide
from ..recurrence import recurrence


@dataclass(frozen=True)
class GLAOptions:
    """Settings of the GLA mixer."""

    low_rank: int = field(default=16, metadata={"doc": "Width between the two matrices that make the decay."})
    temperature: float = field(default=16.0, metadata={"doc": "The decay is sigmoid(a)^(1 / temperature)."})
    norm: Literal["layernorm", "rmsnorm"] = field(
        default="layernorm",
        metadata={
            "doc": "Norm of every head before the gate, without gain; rmsnorm in flash-linear-attention's models."
        },
    )
    norm_eps: float = field(default=1e-5, metadata={"doc": "Added to the variance (or mean square) in that norm."})

    def __post_init__(self) -> None:
        if self.low_rank < 1:
            raise ValueError(f"model.mixer_options.gla.low_rank = {self.low_rank}: must be at least 1")
        if not self.temperature > 0:
            raise ValueError(f"model.mixer_options.gla.temperature = {self.temperature}: must be greater than 0")
        if self.norm not in ("layernorm", "rmsnorm"):
            raise ValueError(f"model.mixer_options.gla.norm = {self.norm!r}: allowed are layernorm, rmsnorm")
        if not self.norm_eps > 0:
            raise ValueError(f"model.mixer_options.gla.norm_eps = {self.norm_eps}: must be greater than 0")


class GLA(nn.Module):
    """The layer of Yang et al. 2023, section 4.4, with d_k = d / 2 and d_v = d over all heads.

    alpha_t = sigmoid(W_2 W_1 x_t + b)^(1/16); S_t = diag(alpha_t) S_{t-1} + k_t v_t; o_t = q_t S_t /
    sqrt(head_dim_k); y = W_O(SiLU(W_G x + b) * LayerNorm_head(o)). The LayerNorm has no gain: W_O takes its place.
    """

    Options = GLAOptions
    state_size: ClassVar[str] = "d^2 / (2 heads) float32"
    splits_sequence: ClassVar[bool] = True
    # W_1 is used whole by every process of the parallel region, whose heads each see a part of its gradient.
    tensor_parallel_plan: ClassVar[dict[str, str]] = {
        "q_proj": "column",
        "k_proj": "column",
        "v_proj": "column",
        "decay_down": "replicated, gradient summed",
        "decay_up": "column",
        "gate_proj": "column",
        "out_proj": "row",
    }
    parameter_kinds: ClassVar[dict[str, str]] = {}

    def __init__(self, config: ModelConfig, layer_index: int, options: GLAOptions) -> None:
        super().__init__()
        size = config.hidden_size
        self.options = options
        self.head_dim_k = size // 2 // config.num_heads
        self.head_dim_v = size // config.num_heads
        self.q_proj = linear(config, size, size // 2)
        self.k_proj = linear(config, size, size // 2)
        self.v_proj = linear(config, size, size)
        self.decay_down = linear(config, size, options.low_rank)
        self.decay_up = linear(config, options.low_rank, size // 2, bias=True)
        self.gate_proj = linear(config, size, size, bias=True)
        self.out_proj = linear(config, size, size, output=True)
        self._size = size

    @staticmethod
    def check(config: ModelConfig, options: GLAOptions) -> None:
        """ValueError when the heads do not divide the keys, which have half the width."""
        half, odd = divmod(config.hidden_size, 2)
        if odd or half % config.num_heads:
            legal = " or ".join(str(n) for n in nearest_divisors(half, config.num_heads))
            raise ValueError(
                f"model.num_heads = {config.num_heads} does not divide the key width of gla, "
                f"model.hidden_size / 2 = {config.hidden_size / 2:g}; nearest head counts that do: {legal}"
            )

    def forward(
        self,
        x: Tensor,
        mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        state: dict[str, Tensor] | None = None,
        return_state: bool = False,
    ) -> Tensor | tuple[Tensor, dict[str, Tensor]]:
        """x: [batch, length, hidden_size] -> the same shape, and the state when asked for.

        The state is "recurrent" [batch, heads, head_dim_k, head_dim_v] in float32; with cu_seqlens a row for every
        segment.
        """
        q, k = (proj(x).unflatten(-1, (-1, self.head_dim_k)) for proj in (self.q_proj, self.k_proj))
        v = self.v_proj(x).unflatten(-1, (-1, self.head_dim_v))
        log_decay = F.logsigmoid(wide(self.decay_up(self.decay_down(x)))) / self.options.temperature
        log_decay = log_decay.unflatten(-1, (-1, self.head_dim_k))
        if mask is not None:
            padding = ~mask[:, :, None, None]
            log_decay, k = log_decay.masked_fill(padding, 0.0), k.masked_fill(padding, 0.0)
        o, recurrent = recurrence(
            q,
            k,
            v,
            log_decay,
            scale=self.head_dim_k**-0.5,
            initial_state=(state or {}).get("recurrent"),
            cu_seqlens=cu_seqlens,
        )
        norm = F.layer_norm if self.options.norm == "layernorm" else F.rms_norm
        o = norm(wide(o), o.shape[-1:], eps=self.options.norm_eps).flatten(-2)
        y = self.out_proj((F.silu(wide(self.gate_proj(x))) * o).to(v.dtype))
        return (y, {"recurrent": recurrent}) if return_state else y

    def flops_per_token(self, length: int) -> int:
        """Forward FLOPs a token, two a multiply-add: projections, and the recurrence in chunks of 64."""
        size, dim_k, dim_v = self._size, self.head_dim_k, self.head_dim_v
        projections = 8 * size * size + 3 * size * self.options.low_rank
        return projections + size // dim_v * (min(64, length) * (dim_k + dim_v) + 4 * dim_k * dim_v)
