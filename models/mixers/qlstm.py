"""qLSTM: the LSTM without its nonlinear feedback, an elementwise linear recurrence with three gates."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..layers.projections import linear
from ..operators.scan.linear_scan import scan
from ..operators.varlen import without_padding
from ..options import ModelShape, option
from ..precision import to_accumulation_dtype


@dataclass(frozen=True)
class QLSTMOptions:
    """Hold the settings of the qLSTM mixer."""

    forget_gate: Literal["sigmoid", "reversed"] = option(
        "sigmoid",
        "sigmoid: sigmoid(W_f x), as in an LSTM. reversed: (1 + exp(W_f x))^-a with one learned a > 0 per "
        "channel, the decay exp(-a softplus(W_f x)) of Mamba.",
    )


class QLSTM(nn.Module):
    """Compute the qLSTM of Sieber et al. 2024 (arXiv 2405.15731), section 4.

    h_t = sigmoid(W_f x_t) h_{t-1} + sigmoid(W_i x_t) (W_u x_t); y_t = W_O(sigmoid(W_o x_t) h_t); all elementwise.
    The reversed variant has the decay (1 + exp(W_f x_t))^-a with a learned a, initially 1. Here a = exp(log_exponent) per
    channel; the paper has one number. The paper's convolution and GELU gate are not part of this layer.
    """

    Options = QLSTMOptions
    state_size: ClassVar[str] = "d float32"
    supports_context_parallel: ClassVar[bool] = True
    fp8_projections: ClassVar[tuple[str, ...]] = ("update_proj", "out_proj")
    tensor_parallel_plan: ClassVar[dict[str, str]] = {
        "forget_proj": "column",
        "input_proj": "column",
        "update_proj": "column",
        "output_proj": "column",
        "log_exponent": "heads",
        "out_proj": "row",
    }
    parameter_kinds: ClassVar[dict[str, str]] = {"log_exponent": "decay"}

    def __init__(self, config: ModelShape, layer_index: int, options: QLSTMOptions) -> None:
        super().__init__()
        size = config.hidden_size
        self.forget_proj = linear(config, size, size)
        self.input_proj = linear(config, size, size)
        self.update_proj = linear(config, size, size)
        self.output_proj = linear(config, size, size)
        self.log_exponent = nn.Parameter(torch.zeros(size)) if options.forget_gate == "reversed" else None
        self.out_proj = linear(config, size, size, output=True)
        self._size = size

    def forward(
        self,
        x: Tensor,
        mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        state: dict[str, Tensor] | None = None,
        return_state: bool = False,
    ) -> Tensor | tuple[Tensor, dict[str, Tensor]]:
        """Compute the layer. The state is "recurrent" [batch, hidden_size] in float32."""
        forget_logits = to_accumulation_dtype(self.forget_proj(x))
        if self.log_exponent is None:
            log_decay = F.logsigmoid(forget_logits)
        else:
            log_decay = -to_accumulation_dtype(self.log_exponent).exp() * F.softplus(forget_logits)
        update = self.update_proj(x)
        v = to_accumulation_dtype(self.input_proj(x)).sigmoid() * to_accumulation_dtype(update)
        log_decay, v = without_padding(mask, log_decay, v)
        h, recurrent = scan(
            v,
            log_decay,
            initial_state=(state or {}).get("recurrent"),
            cu_seqlens=cu_seqlens,
            compute_dtype=update.dtype,
        )
        y = self.out_proj((to_accumulation_dtype(self.output_proj(x)).sigmoid() * h).to(update.dtype))
        return (y, {"recurrent": recurrent}) if return_state else y

    def flops_per_token(self, length: int) -> int:
        """Return forward FLOPs per token, two per multiply-add."""
        return 10 * self._size * self._size + 4 * self._size
