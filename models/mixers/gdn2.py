"""GDN-2, Gated DeltaNet 2 (arXiv 2605.22791): KDA with erase gates per key channel and write gates per value channel."""

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
from ..precision import to_accumulation_dtype


@dataclass(frozen=True)
class GDN2Options(DeltaRuleOptions):
    """Hold the settings of the GDN-2 mixer."""

    mixer: ClassVar[str] = "gdn2"


class GDN2(DeltaRuleMixer):
    """Compute KDA's layer with e = sigmoid(W_b x) per key channel and w = sigmoid(W_w x) per value channel.

    S_t = (I - k_t (e_t * k_t)^T) Diag(alpha_t) S_{t-1} + k_t (w_t * v_t)^T. Decays and erase gates belong to key heads;
    `allow_negative_eigenvalues` doubles e.
    """

    Options = GDN2Options
    tensor_parallel_plan: ClassVar[dict[str, str]] = {
        **DeltaRuleMixer.tensor_parallel_plan,
        "w_proj": "column",
        "decay_down": "partial_grad",
        "decay_up": "column",
        "gate_down": "partial_grad",
        "gate_up": "column",
        "a_log": "heads",
        "dt_bias": "heads",
    }
    parameter_kinds: ClassVar[dict[str, str]] = {**DeltaRuleMixer.parameter_kinds, "a_log": "decay"}

    def __init__(self, config: ModelShape, layer_index: int, options: GDN2Options) -> None:
        super().__init__(config, options)
        size, sizes = config.hidden_size, self.sizes
        self.b_proj = linear(config, size, sizes.key_dim)
        self.w_proj = linear(config, size, sizes.value_dim)
        self.decay_down = linear(config, size, sizes.head_dim_v)
        self.decay_up = linear(config, sizes.head_dim_v, sizes.key_dim)
        self.gate_down = linear(config, size, sizes.head_dim_v)
        self.gate_up = linear(config, sizes.head_dim_v, sizes.value_dim, bias=True)
        self.a_log = initial_a_log(sizes.heads, 1)
        self.dt_bias = initial_dt_bias(sizes.key_dim)

    def input_projections(self) -> dict[str, nn.Linear]:
        """Return W_b, W_w, W_f1 and W_g1."""
        return {"erase": self.b_proj, "write": self.w_proj, "decay": self.decay_down, "gate": self.gate_down}

    def gates(self, projected: dict[str, Tensor]) -> tuple[Tensor | None, Tensor, Tensor]:
        """Return (log alpha, e, w)."""
        dim = self.sizes.head_dim_k
        logits = split_heads(self.decay_up(projected["decay"]), dim)
        write = to_accumulation_dtype(projected["write"]).sigmoid()
        return (
            SoftplusDecay(logits, self.a_log, split_heads(self.dt_bias, dim)).value(),
            split_heads(self.beta(projected["erase"]), dim),
            split_heads(write, self.sizes.head_dim_v),
        )

    def output(self, o: Tensor, projected: dict[str, Tensor]) -> Tensor:
        """Return the gated norm of o."""
        gate = self.gate_up(projected["gate"])
        return gated_rms_norm(o, gate, self.norm_weight, self.options.norm_eps, torch.sigmoid)
