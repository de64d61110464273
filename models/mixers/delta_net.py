"""DeltaNet (arXiv 2406.06484): linear attention whose update replaces the value that the state holds for a key."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch.nn.functional as F
from torch import Tensor, nn

from ..layers.delta_rule_mixer import DeltaRuleMixer, DeltaRuleOptions
from ..layers.projections import linear
from ..options import ModelShape
from ..precision import to_accumulation_dtype


@dataclass(frozen=True)
class DeltaNetOptions(DeltaRuleOptions):
    """Hold the settings of the DeltaNet mixer."""

    mixer: ClassVar[str] = "delta_net"


class DeltaNet(DeltaRuleMixer):
    """Compute the layer of Yang et al. 2024, section 3: no decay, and erase = write = beta = sigmoid(W_b x) per head.

    S_t = S_{t-1} + beta_t k_t (v_t - S_{t-1}^T k_t)^T; y = W_O RMSNorm_head(o), without a gate.
    """

    Options = DeltaNetOptions

    def __init__(self, config: ModelShape, layer_index: int, options: DeltaNetOptions) -> None:
        super().__init__(config, options)
        self.b_proj = linear(config, config.hidden_size, self.sizes.value_heads)

    def input_projections(self) -> dict[str, nn.Linear]:
        """Return W_b."""
        return {"beta": self.b_proj}

    def gates(self, projected: dict[str, Tensor]) -> tuple[Tensor | None, Tensor, Tensor | None]:
        """Return (None, beta, None)."""
        beta = self.beta(projected["beta"])
        return None, beta, None

    def output(self, o: Tensor, projected: dict[str, Tensor]) -> Tensor:
        """Return the norm of o per head."""
        weight = to_accumulation_dtype(self.norm_weight)
        normed = F.rms_norm(to_accumulation_dtype(o), weight.shape, weight, self.options.norm_eps)
        return normed.flatten(-2).to(o.dtype)
