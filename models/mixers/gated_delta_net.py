"""Gated DeltaNet (arXiv 2412.06464): the delta rule with one decay per head and token."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor, nn

from ..layers.delta_rule_mixer import (
    DeltaRuleMixer,
    DeltaRuleOptions,
    gated_rms_norm,
)
from ..layers.initial_decays import initial_a_log, initial_dt_bias
from ..layers.projections import linear
from ..operators.delta_rule.softplus_decay import SoftplusDecay
from ..options import ModelShape, option


@dataclass(frozen=True)
class GatedDeltaNetOptions(DeltaRuleOptions):
    """Hold the settings of the Gated DeltaNet mixer."""

    mixer: ClassVar[str] = "gated_delta_net"
    key_fraction: ClassVar[float] = 0.75

    expand_v: float = option(2.0, "Channels of a value per head / head_dim.")


class GatedDeltaNet(DeltaRuleMixer):
    """Compute the layer of Yang, Kautz and Hatamizadeh 2024, section 3.4, with key_dim = 3/4 d and value_dim = 3/2 d.

    beta = sigmoid(W_b x); log alpha = -exp(A_log) softplus(W_a x + dt_bias), one per value head;
    S_t = (I - beta_t k_t k_t^T) alpha_t S_{t-1} + beta_t k_t v_t^T; y = W_O(RMSNorm_head(o) * SiLU(W_g x)).
    """

    Options = GatedDeltaNetOptions
    tensor_parallel_plan: ClassVar[dict[str, str]] = {
        **DeltaRuleMixer.tensor_parallel_plan,
        "a_proj": "column",
        "gate_proj": "column",
        "a_log": "heads",
        "dt_bias": "heads",
    }
    parameter_kinds: ClassVar[dict[str, str]] = {**DeltaRuleMixer.parameter_kinds, "a_log": "decay"}

    def __init__(self, config: ModelShape, layer_index: int, options: GatedDeltaNetOptions) -> None:
        super().__init__(config, options)
        size, heads = config.hidden_size, self.sizes.value_heads
        self.a_proj = linear(config, size, heads)
        self.b_proj = linear(config, size, heads)
        self.gate_proj = linear(config, size, self.sizes.value_dim)
        self.a_log = initial_a_log(heads, 0)
        self.dt_bias = initial_dt_bias(heads)

    def input_projections(self) -> dict[str, nn.Linear]:
        """Return W_a, W_b and W_g."""
        return {"decay": self.a_proj, "beta": self.b_proj, "gate": self.gate_proj}

    def gates(self, projected: dict[str, Tensor]) -> tuple[Tensor | None, Tensor, Tensor | None]:
        """Return (log alpha, beta, None)."""
        beta = self.beta(projected["beta"])
        return SoftplusDecay(projected["decay"], self.a_log, self.dt_bias).value(), beta, None

    def output(self, o: Tensor, projected: dict[str, Tensor]) -> Tensor:
        """Return the gated norm of o."""
        return gated_rms_norm(o, projected["gate"], self.norm_weight, self.options.norm_eps)
