"""S5 / LRU: a constant complex diagonal recurrence between two full matrices (arXiv 2208.04933, 2303.06349)."""

from __future__ import annotations

from dataclasses import dataclass
from math import pi
from typing import ClassVar

import torch
from torch import Tensor, nn

from ..layers.projections import linear
from ..operators.scan.linear_scan import scan
from ..operators.varlen import without_padding
from ..options import ModelShape, option, require_at_least, require_divisor, require_positive
from ..precision import to_accumulation_dtype


@dataclass(frozen=True)
class S5Options:
    """Hold the settings of the S5 mixer."""

    state_size: int | None = option(None, "Number of complex states; null: model.hidden_size.")
    min_radius: float = option(0.9, "Smallest initial |lambda|.")
    max_radius: float = option(0.999, "Largest initial |lambda|.")
    max_phase: float = option(
        2 * pi, "Largest initial angle of lambda, in radians per token; pi / 10 for long sequences."
    )

    def __post_init__(self) -> None:
        require_at_least("s5", self, 1, "state_size")
        require_positive("s5", self, "max_phase")
        if not 0 < self.min_radius < self.max_radius < 1:
            raise ValueError(
                f"model.mixer_options.s5.min_radius = {self.min_radius}, max_radius = {self.max_radius}: must be "
                "0 < min < max < 1"
            )


class S5(nn.Module):
    """Compute the layer of Smith et al. 2023, parametrised as the LRU of Orvieto et al. 2023.

    h_t = lambda h_{t-1} + gamma B x_t; y_t = Re(C h_t); lambda = exp(-exp(nu) + i exp(theta)); gamma = exp(log_gamma).
    Initially lambda is uniform on a ring and gamma = sqrt(1 - |lambda|^2). B and C are complex matrices, stored as real ones:
    their rows (columns) are pairs of a real and an imaginary part. The sign of the imaginary part is part of C's weights.
    The residual connection replaces the skip D x_t, and the MLP the nonlinearity after the layer.
    """

    Options = S5Options
    state_size: ClassVar[str] = "2 d float32"
    supports_context_parallel: ClassVar[bool] = True
    fp8_projections: ClassVar[tuple[str, ...]] = ("out_proj",)
    tensor_parallel_plan: ClassVar[dict[str, str]] = {
        "b_proj": "column",
        "nu": "heads",
        "theta": "heads",
        "log_gamma": "heads",
        "out_proj": "row",
    }
    parameter_kinds: ClassVar[dict[str, str]] = {"nu": "decay", "theta": "decay", "log_gamma": "decay"}

    def __init__(self, config: ModelShape, layer_index: int, options: S5Options) -> None:
        super().__init__()
        size = config.hidden_size
        states = options.state_size or size
        self.b_proj = linear(config, size, 2 * states)
        # Uniform over the area of the ring.
        low, high = options.min_radius**2, options.max_radius**2
        radius_squared = torch.empty(states).uniform_(low, high)
        self.nu = nn.Parameter((-0.5 * radius_squared.log()).log())
        self.theta = nn.Parameter((torch.rand(states).clamp_min(1e-4) * options.max_phase).log())
        self.log_gamma = nn.Parameter(0.5 * (1 - radius_squared).log())
        self.out_proj = linear(config, 2 * states, size, output=True)
        self._size, self._states = size, states

    @staticmethod
    def check(config: ModelShape, options: S5Options) -> None:
        """Raise ValueError if model.num_heads, by which tensor parallelism splits, does not divide the states."""
        states = options.state_size or config.hidden_size
        require_divisor("model.num_heads", config.num_heads, "model.mixer_options.s5.state_size", states)

    def forward(
        self,
        x: Tensor,
        mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        state: dict[str, Tensor] | None = None,
        return_state: bool = False,
    ) -> Tensor | tuple[Tensor, dict[str, Tensor]]:
        """Compute the layer. The state is "recurrent" [batch, states, 2] in float32, real and imaginary parts."""
        u = self.b_proj(x)
        v = (
            torch.view_as_complex(to_accumulation_dtype(u).unflatten(-1, (-1, 2)).contiguous())
            * to_accumulation_dtype(self.log_gamma).exp()
        )
        log_decay = torch.complex(
            -to_accumulation_dtype(self.nu).exp(), to_accumulation_dtype(self.theta).exp()
        ).expand_as(v)
        log_decay, v = without_padding(mask, log_decay, v)
        initial = (state or {}).get("recurrent")
        if initial is not None:
            initial = torch.view_as_complex(initial.contiguous())
        h, recurrent = scan(v, log_decay, initial_state=initial, cu_seqlens=cu_seqlens)
        y = self.out_proj(torch.view_as_real(h).flatten(-2).to(u.dtype))
        return (y, {"recurrent": torch.view_as_real(recurrent)}) if return_state else y

    def flops_per_token(self, length: int) -> int:
        """Return forward FLOPs per token, two per multiply-add."""
        return 8 * self._size * self._states + 8 * self._states
