"""RWKV-7 (arXiv 2503.14456): a generalised delta rule with a removal key of its own, token shift and value residual."""

from __future__ import annotations

from dataclasses import dataclass
from math import exp
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..layers.delta_rule_mixer import split_heads, unit_length
from ..layers.projections import linear
from ..operators.delta_rule.delta_rule import delta_rule
from ..operators.varlen import token_shift, without_padding
from ..options import ModelShape, option, require_at_least, require_positive
from ..precision import to_accumulation_dtype


@dataclass(frozen=True)
class RWKV7Options:
    """Hold the settings of the RWKV-7 mixer."""

    decay_low_rank: int = option(64, "Rank of the decay projection.")
    rate_low_rank: int = option(64, "Rank of the projection of the in-context learning rate.")
    value_low_rank: int = option(16, "Rank of the value residual's gate.")
    gate_low_rank: int = option(128, "Rank of the output gate.")
    norm_eps: float = option(1e-5, "This number times the channels of a head is added to the variance in the norm.")

    def __post_init__(self) -> None:
        require_at_least("rwkv7", self, 1, "decay_low_rank", "rate_low_rank", "value_low_rank", "gate_low_rank")
        require_positive("rwkv7", self, "norm_eps")


class RWKV7(nn.Module):
    """Compute the time mixing of Peng et al. 2025, section 4, with d = heads * head_dim.

    x_c = x_t + mu_c (x_{t-1} - x_t) for c in r, w, k, v, a, g; r, k, v = W x_c; w = -exp(-0.5) sigmoid(lora_w(x_w));
    a = sigmoid(lora_a(x_a)); kappa = k * xi of length one; k <- k (1 + (a - 1) alpha);
    v <- v + (v_1 - v) sigmoid(lora_v(x_v)), with v_1 the values of the first RWKV-7 layer;
    S_t = diag(exp(w_t)) S_{t-1} - (a_t * kappa_t) (kappa_t^T S_{t-1}) + k_t v_t^T; o_t = S_t^T r_t;
    y = W_O((LayerNorm_head(o) + (sum r k rho) v) * lora_g(x_g)). The MLP of the block is the model's.
    """

    Options = RWKV7Options
    state_size: ClassVar[str] = "d^2 / heads float32 and d"
    supports_context_parallel: ClassVar[bool] = True
    # The block hands the values of the first layer to the others.
    value_residual: ClassVar[bool] = True
    fp8_projections: ClassVar[tuple[str, ...]] = ("r_proj", "k_proj", "v_proj", "out_proj")
    # The token shift begins the parallel region. Every rank uses whole mixes and low-rank projections.
    tensor_parallel_plan: ClassVar[dict[str, str]] = {
        **dict.fromkeys((f"mix_{name}" for name in "rwkvag"), "partial_grad"),
        "r_proj": "column",
        "k_proj": "column",
        "v_proj": "column",
        "decay_down": "partial_grad",
        "decay_up": "column",
        "rate_down": "partial_grad",
        "rate_up": "column",
        "value_down": "partial_grad",
        "value_up": "column",
        "gate_down": "partial_grad",
        "gate_up": "column",
        "removal_scale": "heads",
        "key_scale": "heads",
        "bonus": "heads",
        "norm_weight": "heads",
        "norm_bias": "heads",
        "out_proj": "row",
    }
    parameter_kinds: ClassVar[dict[str, str]] = {
        **dict.fromkeys((f"mix_{name}" for name in "rwkvag"), "norm"),
        **dict.fromkeys(("removal_scale", "key_scale", "bonus", "norm_weight"), "norm"),
        "norm_bias": "bias",
    }

    def __init__(self, config: ModelShape, layer_index: int, options: RWKV7Options) -> None:
        super().__init__()
        size = config.hidden_size
        self.head_dim = size // config.num_heads
        self.norm_eps = options.norm_eps * self.head_dim
        first = not any(config.mixer_of(index) == "rwkv7" for index in range(layer_index))
        # As the released models begin: deeper layers mix less of the previous token.
        depth = layer_index / max(1, config.num_layers - 1)
        falling = 1 - layer_index / config.num_layers
        place = torch.arange(size) / size
        line = torch.arange(size) / max(1, size - 1)
        inside = (torch.arange(size) % self.head_dim) / max(1, self.head_dim - 1) * 2 - 1
        zigzag = inside * inside.abs()
        for name, power in zip("rwkvag", (0.2, 0.9, 0.7, 0.7, 0.9, 0.2), strict=True):
            setattr(self, f"mix_{name}", nn.Parameter(1 - place ** (power * falling)))
        self.r_proj = linear(config, size, size)
        self.k_proj = linear(config, size, size)
        self.v_proj = linear(config, size, size)
        decay_bias = -5.5 + 6 * line ** (1 + depth**0.3) + 2.5 * zigzag
        self.decay_down, self.decay_up = _low_rank(config, options.decay_low_rank, decay_bias)
        rate_bias = -0.19 + 0.3 * zigzag + 0.4 * (line - 0.5)
        self.rate_down, self.rate_up = _low_rank(config, options.rate_low_rank, rate_bias)
        value_bias = None if first else 0.73 - 0.4 * (line - 0.5)
        down, up = (None, None) if first else _low_rank(config, options.value_low_rank, value_bias)
        self.value_down, self.value_up = down, up
        self.gate_down, self.gate_up = _low_rank(config, options.gate_low_rank, None)
        self.removal_scale = nn.Parameter(0.71 - 0.1 * (line - 0.5))
        self.key_scale = nn.Parameter(torch.full((size,), 1.02))
        self.bonus = nn.Parameter(torch.full((size,), -0.04))
        self.norm_weight = nn.Parameter(torch.full((size,), ((layer_index + 1) / config.num_layers) ** 0.7))
        self.norm_bias = nn.Parameter(torch.zeros(size))
        self.out_proj = linear(config, size, size, output=True)

    def forward(
        self,
        x: Tensor,
        mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        state: dict[str, Tensor] | None = None,
        return_state: bool = False,
        values: Tensor | None = None,
        return_values: bool = False,
    ) -> Tensor | tuple[Tensor, dict[str, Tensor]] | tuple[Tensor | tuple[Tensor, dict[str, Tensor]], Tensor]:
        """Return the output, of x's shape [batch, length, hidden_size], and with return_state the new state.

        The state is "shift" [batch, hidden_size], the last input, and "recurrent" [batch, heads, head_dim, head_dim] in
        float32; with cu_seqlens one row per segment.

        values: the values of the first RWKV-7 layer, as its return_values gave them; None in that layer. return_values: also
        return these values behind the result, with as many rows as the output and the columns of this rank.
        Raises ValueError in another layer without values.
        """
        state = state or {}
        shifted, shift = token_shift(x, mask, cu_seqlens, state.get("shift"))
        mixes: list[Tensor] = [getattr(self, f"mix_{name}") for name in "rwkvag"]
        x_r, x_w, x_k, x_v, x_a, x_g = (x + (shifted - x) * mix.to(x.dtype) for mix in mixes)
        r, k, v = self.r_proj(x_r), self.k_proj(x_k), self.v_proj(x_v)
        if self.value_down is None or self.value_up is None:
            values = v
        elif values is None:
            raise ValueError(
                "a RWKV-7 layer after the first needs `values` of the first: call it in a block of the model"
            )
        else:
            # Under sequence parallelism the rows between layers are fewer and longer.
            values = values.reshape(v.shape)
            v = v + (values - v) * self.value_up(self.value_down(x_v)).sigmoid()
        rate = to_accumulation_dtype(self.rate_up(self.rate_down(x_a))).sigmoid()
        decay = to_accumulation_dtype(self.decay_up(self.decay_down(x_w).tanh())).sigmoid() * -exp(-0.5)
        removal_key = unit_length(split_heads(k * self.removal_scale.to(k.dtype), self.head_dim))
        k = (k * (1 + (rate - 1) * to_accumulation_dtype(self.key_scale))).to(k.dtype)
        r, k, v, decay, rate = (split_heads(y, self.head_dim) for y in (r, k, v, decay, rate))
        decay, rate, write = without_padding(mask, decay, rate, rate.new_ones(rate.shape[:3]))
        o, final = delta_rule(
            r,
            k,
            v,
            decay,
            rate,
            write,
            removal_key=removal_key,
            scale=1.0,
            initial_state=state.get("recurrent"),
            output_final_state=return_state,
            cu_seqlens=cu_seqlens,
        )
        y = self.out_proj(self._output(o, r, k, v) * self.gate_up(self.gate_down(x_g).sigmoid()))
        result = (y, {"shift": shift, "recurrent": final}) if final is not None else y
        width = values.shape[1:].numel() // y.shape[1] if y.shape[1] else values.shape[2]
        return (result, values.reshape(*y.shape[:2], width)) if return_values else result

    def _output(self, o: Tensor, r: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Return the norm of o per head plus the bonus of the token itself, [batch, length, heads * head_dim] in v's dtype."""
        normed = F.layer_norm(to_accumulation_dtype(o), o.shape[-1:], eps=self.norm_eps).flatten(-2)
        normed = normed * to_accumulation_dtype(self.norm_weight) + to_accumulation_dtype(self.norm_bias)
        bonus = to_accumulation_dtype(self.bonus).view(-1, self.head_dim)
        weight = (to_accumulation_dtype(r) * k * bonus).sum(-1, keepdim=True)
        return (normed + (weight * v).flatten(-2)).to(v.dtype)

    def flops_per_token(self, length: int) -> int:
        """Return forward FLOPs per token, two per multiply-add, with the recurrence in chunks of 64 tokens."""
        matrices = sum(layer.weight.numel() for layer in self.modules() if isinstance(layer, nn.Linear))
        size, dim = self.norm_weight.numel(), self.head_dim
        return 2 * matrices + size * (7 * min(64, length) + 6 * dim)


def _low_rank(config: ModelShape, rank: int, bias: Tensor | None) -> tuple[nn.Linear, nn.Linear]:
    """Return the two layers of a low-rank projection, whose first output is `bias`: the first layer is zero."""
    down = linear(config, config.hidden_size, rank)
    up = linear(config, rank, config.hidden_size, bias=bias is not None)
    nn.init.zeros_(down.weight)
    if bias is not None:
        with torch.no_grad():
            up.bias.copy_(bias)
    return down, up
