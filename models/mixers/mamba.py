"""Mamba (arXiv 2312.00752): a selective state space (S6) with a short convolution and a gate."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..layers.initial_decays import initial_dt_bias
from ..layers.projections import init_std, linear
from ..layers.short_convolution import CausalConvolution
from ..operators.scan.selective_scan import selective_scan
from ..operators.varlen import without_padding
from ..options import ModelShape, option, require_at_least, require_divisor
from ..precision import to_accumulation_dtype


@dataclass(frozen=True)
class MambaOptions:
    """Hold the settings of the Mamba mixer."""

    expand: int = option(2, "Channels of the state space are expand * hidden_size.")
    state_size: int = option(16, "States per channel, N.")
    conv_kernel: int = option(4, "Kernel size of the convolution, in tokens.")
    dt_rank: int | None = option(None, "Rank of the projection to dt, over all groups; null: ceil(hidden_size / 16).")
    groups: int = option(
        1,
        "Channel groups. Each group computes dt, B and C from its own channels. 1: all channels together, as in "
        "the paper. Tensor parallelism needs a multiple of its degree.",
    )

    def __post_init__(self) -> None:
        require_at_least("mamba", self, 1, "expand", "state_size", "conv_kernel", "dt_rank", "groups")


class Mamba(nn.Module):
    """Compute the block of Gu and Dao 2023, section 3.4, around the selective state space of Algorithm 2, E = expand * d.

    u = SiLU(conv(W_x x)); dt, B, C = W u; dt_t = softplus(W_dt dt + b); A = -exp(A_log);
    h_t = exp(dt_t A) h_{t-1} + dt_t B_t u_t; y_t = W_O(SiLU(W_z x_t) * (C_t h_t + D u_t)).
    Initially A is -1, ..., -N in every channel and dt log-uniform in [0.001, 0.1]. The convolution has no bias.
    """

    Options = MambaOptions
    state_size: ClassVar[str] = "expand d N float32 and (kernel - 1) expand d"
    supports_context_parallel: ClassVar[bool] = True
    fp8_projections: ClassVar[tuple[str, ...]] = ("x_proj", "out_proj")
    # dt, B and C depend on the channels of their group only, so tensor parallelism splits between groups.
    tensor_parallel_plan: ClassVar[dict[str, str]] = {
        "x_proj": "column",
        "gate_proj": "column",
        "conv": "heads",
        "select_weight": "heads",
        "dt_weight": "heads",
        "dt_bias": "heads",
        "a_log": "heads",
        "skip": "heads",
        "out_proj": "row",
    }
    parameter_kinds: ClassVar[dict[str, str]] = {"a_log": "decay", "skip": "norm"}

    def __init__(self, config: ModelShape, layer_index: int, options: MambaOptions) -> None:
        super().__init__()
        size, groups, states = config.hidden_size, options.groups, options.state_size
        inner = options.expand * size
        rank = -(-(options.dt_rank or -(-size // 16)) // groups)
        self.options = options
        self.x_proj = linear(config, size, inner)
        self.gate_proj = linear(config, size, inner)
        self.conv = CausalConvolution(inner, options.conv_kernel, silu=True)
        self.select_weight = nn.Parameter(torch.randn(groups, rank + 2 * states, inner // groups) * init_std(config))
        self.dt_weight = nn.Parameter(torch.empty(groups, inner // groups, rank).uniform_(-(rank**-0.5), rank**-0.5))
        self.dt_bias = initial_dt_bias(inner)
        self.a_log = nn.Parameter(torch.arange(1, states + 1, dtype=torch.float32).log().repeat(inner, 1))
        self.skip = nn.Parameter(torch.ones(inner))
        self.out_proj = linear(config, inner, size, output=True)
        self._size, self._inner, self._rank = size, inner, rank

    @staticmethod
    def check(config: ModelShape, options: MambaOptions) -> None:
        """Raise ValueError if groups does not divide the channels."""
        key = "model.mixer_options.mamba.groups"
        require_divisor(key, options.groups, "expand * model.hidden_size", options.expand * config.hidden_size)

    @staticmethod
    def sharded_sizes(config: ModelShape, options: MambaOptions) -> dict[str, int]:
        """Return the number of groups: tensor parallelism splits between groups only."""
        return {"model.mixer_options.mamba.groups": options.groups}

    def forward(
        self,
        x: Tensor,
        mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        state: dict[str, Tensor] | None = None,
        return_state: bool = False,
    ) -> Tensor | tuple[Tensor, dict[str, Tensor]]:
        """Compute the layer.

        The state is "recurrent" [batch, groups, E / groups, N] in float32 and "conv" [batch, kernel - 1, E], E = expand
        * hidden_size.
        """
        state = state or {}
        u, history = self.conv(self.x_proj(x), mask, cu_seqlens, state.get("conv"), return_state)
        grouped = u.unflatten(-1, (self.select_weight.shape[0], -1))
        states = self.options.state_size
        selected = torch.einsum("blgc,grc->blgr", grouped, self.select_weight)
        low_rank, b, c = selected.split([self._rank, states, states], -1)
        dt = to_accumulation_dtype(torch.einsum("blgr,gcr->blgc", low_rank, self.dt_weight).flatten(-2))
        dt = F.softplus(dt + to_accumulation_dtype(self.dt_bias)).view_as(grouped)
        # dt = 0 leaves the state unchanged.
        (dt,) = without_padding(mask, dt)
        a = -to_accumulation_dtype(self.a_log).exp().unflatten(0, grouped.shape[2:])
        y, recurrent = selective_scan(
            to_accumulation_dtype(grouped),
            dt,
            a,
            to_accumulation_dtype(b),
            to_accumulation_dtype(c),
            initial_state=state.get("recurrent"),
            cu_seqlens=cu_seqlens,
            compute_dtype=u.dtype,
        )
        y = y.flatten(-2) + to_accumulation_dtype(self.skip) * to_accumulation_dtype(u)
        y = self.out_proj((y * F.silu(to_accumulation_dtype(self.gate_proj(x)))).to(u.dtype))
        return (y, {"recurrent": recurrent, "conv": history}) if return_state else y

    def flops_per_token(self, length: int) -> int:
        """Return forward FLOPs per token, two per multiply-add."""
        states = self.options.state_size
        selection = 2 * (self._rank + 2 * states) + 2 * self._rank
        return self._inner * (6 * self._size + selection + 2 * self.options.conv_kernel + 7 * states + 2)
