"""HGRN (arXiv 2311.04823): an elementwise recurrence whose forget gate is bounded from below, more so in upper layers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..layers.forget_gate import bounded_forget_gate
from ..layers.gated_norm import gated_head_norm
from ..layers.projections import linear
from ..operators.scan.linear_scan import scan
from ..operators.varlen import without_padding
from ..options import ModelShape, option
from ..precision import to_accumulation_dtype


@dataclass(frozen=True)
class HGRNOptions:
    """Hold the settings of the HGRN mixer."""

    input_gate: Literal["tied", "free"] = option(
        "tied", "tied: 1 - forget gate, as HGRN. free: sigmoid(W_i x), an independent gate, as GLRU."
    )
    rotation: bool = option(
        False,
        "true: complex state, rotated by one learned angle per channel at every token, as in the HGRN paper; the "
        "candidate, gate and output projections are twice as wide. false: real state, as the MetaLA paper compares; it "
        "has a CUDA kernel.",
    )


class HGRN(nn.Module):
    """Compute the layer of Qin et al. 2023, section 3 (GLRU / HGRN in MetaLA's general recurrence).

    f_t = gamma + (1 - gamma) sigmoid(W_f x_t); i_t = 1 - f_t; c_t = SiLU(W_c x_t);
    h_t = f_t e^{i theta} h_{t-1} + i_t c_t; y_t = W_O(SiLU(W_G x_t) * LayerNorm_head(h_t)).
    theta = 0 for a real state. Complex c_t and h_t are pairs of numbers. The LayerNorm has no gain.
    gamma = layer / layers is fixed: the initial value of the paper's bound, a cumulative softmax over layers. Layers may be
    on different ranks, so they cannot share a softmax.
    """

    Options = HGRNOptions
    state_size: ClassVar[str] = "d float32 (2 d with rotation)"
    supports_context_parallel: ClassVar[bool] = True
    fp8_projections: ClassVar[tuple[str, ...]] = ("candidate_proj", "out_proj")
    tensor_parallel_plan: ClassVar[dict[str, str]] = {
        "forget_proj": "column",
        "input_proj": "column",
        "candidate_proj": "column",
        "gate_proj": "column",
        "theta": "heads",
        "out_proj": "row",
    }
    parameter_kinds: ClassVar[dict[str, str]] = {"theta": "decay"}

    def __init__(self, config: ModelShape, layer_index: int, options: HGRNOptions) -> None:
        super().__init__()
        size = config.hidden_size
        self.parts = 2 if options.rotation else 1
        self.head_dim = size // config.num_heads * self.parts
        self.lower_bound = layer_index / config.num_layers
        self.forget_proj = linear(config, size, size)
        self.input_proj = linear(config, size, size) if options.input_gate == "free" else None
        self.candidate_proj = linear(config, size, size * self.parts)
        self.gate_proj = linear(config, size, size * self.parts)
        self.theta = None
        if options.rotation:
            # The frequencies of rotary positions.
            self.theta = nn.Parameter(10000.0 ** (-torch.arange(size, dtype=torch.float32) / size))
        self.out_proj = linear(config, size * self.parts, size, output=True)
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

        The state is "recurrent" [batch, hidden_size] in float32, with rotation [batch, hidden_size, 2].
        """
        forget_logits = to_accumulation_dtype(self.forget_proj(x))
        candidate = self.candidate_proj(x)
        bound = forget_logits.new_full((), self.lower_bound)
        log_decay, gate = bounded_forget_gate(forget_logits, bound.log(), torch.log1p(-bound))
        if self.input_proj is not None:
            gate = to_accumulation_dtype(self.input_proj(x)).sigmoid()
        v = F.silu(to_accumulation_dtype(candidate))
        initial = (state or {}).get("recurrent")
        if self.theta is not None:
            v = torch.view_as_complex(v.unflatten(-1, (-1, 2)).contiguous())
            log_decay = torch.complex(log_decay, to_accumulation_dtype(self.theta).expand_as(log_decay))
            initial = None if initial is None else torch.view_as_complex(initial.contiguous())
        v = gate * v
        log_decay, v = without_padding(mask, log_decay, v)
        h, recurrent = scan(v, log_decay, initial_state=initial, cu_seqlens=cu_seqlens, compute_dtype=candidate.dtype)
        if self.theta is not None:
            h, recurrent = torch.view_as_real(h).flatten(-2), torch.view_as_real(recurrent)
        y = self.out_proj(gated_head_norm(h.unflatten(-1, (-1, self.head_dim)), self.gate_proj(x)))
        return (y, {"recurrent": recurrent}) if return_state else y

    def flops_per_token(self, length: int) -> int:
        """Return forward FLOPs per token, two per multiply-add."""
        matrices = 1 + (self.input_proj is not None) + 3 * self.parts
        return 2 * matrices * self._size * self._size + 4 * self.parts**2 * self._size
