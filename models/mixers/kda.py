"""KDA, Kimi Delta Attention (arXiv 2510.26692): the delta rule with one decay per key channel and token."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from ..layers.delta_rule_mixer import (
    DeltaRuleMixer,
    DeltaRuleOptions,
    gated_rms_norm,
    split_heads,
)
from ..layers.initial_decays import initial_a_log, initial_dt_bias
from ..layers.projections import linear
from ..operators.delta_rule.softplus_decay import SoftplusDecay
from ..options import ModelShape


@dataclass(frozen=True)
class KDAOptions(DeltaRuleOptions):
    """Hold the settings of the KDA mixer."""

    mixer: ClassVar[str] = "kda"


class KDA(DeltaRuleMixer):
    """Compute the layer of Kimi Linear, section 4, with decay and output gate of rank head_dim_v.

    beta = sigmoid(W_b x) per value head; log alpha = -exp(A_log) softplus(W_f2 W_f1 x + dt_bias) per key channel of each
    value head; S_t = (I - beta_t k_t k_t^T) Diag(alpha_t) S_{t-1} + beta_t k_t v_t^T;
    y = W_O(RMSNorm_head(o) * sigmoid(W_g2 W_g1 x + b)).
    """

    Options = KDAOptions
    # Every tensor-parallel rank uses the whole W_f1 and W_g1, and its heads compute a part of their gradients.
    tensor_parallel_plan: ClassVar[dict[str, str]] = {
        **DeltaRuleMixer.tensor_parallel_plan,
        "decay_down": "partial_grad",
        "decay_up": "column",
        "gate_down": "partial_grad",
        "gate_up": "column",
        "a_log": "heads",
        "dt_bias": "heads",
    }
    parameter_kinds: ClassVar[dict[str, str]] = {**DeltaRuleMixer.parameter_kinds, "a_log": "decay"}

    def __init__(self, config: ModelShape, layer_index: int, options: KDAOptions) -> None:
        super().__init__(config, options)
        size, sizes = config.hidden_size, self.sizes
        decay_dim = sizes.value_heads * sizes.head_dim_k
        self.b_proj = linear(config, size, sizes.value_heads)
        self.decay_down = linear(config, size, sizes.head_dim_v)
        self.decay_up = linear(config, sizes.head_dim_v, decay_dim)
        self.gate_down = linear(config, size, sizes.head_dim_v)
        self.gate_up = linear(config, sizes.head_dim_v, sizes.value_dim, bias=True)
        self.a_log = initial_a_log(sizes.value_heads, 1)
        self.dt_bias = initial_dt_bias(decay_dim)

    def input_projections(self) -> dict[str, nn.Linear]:
        """Return W_b, W_f1 and W_g1."""
        return {"beta": self.b_proj, "decay": self.decay_down, "gate": self.gate_down}

    def gates(self, projected: dict[str, Tensor]) -> tuple[SoftplusDecay, Tensor, None]:
        """Return (log alpha, beta, None)."""
        dim, beta = self.sizes.head_dim_k, self.beta(projected["beta"])
        logits = split_heads(self.decay_up(projected["decay"]), dim)
        return SoftplusDecay(logits, self.a_log, split_heads(self.dt_bias, dim)), beta, None

    def output(self, o: Tensor, projected: dict[str, Tensor]) -> Tensor:
        """Return the gated norm of o."""
        gate = self.gate_up(projected["gate"])
        return gated_rms_norm(o, gate, self.norm_weight, self.options.norm_eps, torch.sigmoid)
