"""The channel mixers: gated linear units (SwiGLU and its relatives), GELU, and RWKV-7's with a token shift."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..backend import cpu_kernel, is_supported
from ..operators.varlen import token_shift
from ..options import ModelShape
from ..recompute import recomputable
from .projections import FusedProjections, apply_each, linear


class GatedMLP(nn.Module):
    """Compute down(activation(gate x) * up x). Shazeer 2020 (arXiv 2002.05202), Eq. 5-6; `model.mlp` names the activation."""

    tensor_parallel_plan: ClassVar[dict[str, str]] = {"gate_proj": "column", "up_proj": "column", "down_proj": "row"}
    fp8_projections: ClassVar[tuple[str, ...]] = ("gate_proj", "up_proj", "down_proj")
    parameter_kinds: ClassVar[dict[str, str]] = {}
    project_inputs_is_entry: ClassVar[bool] = True

    def __init__(self, config: ModelShape) -> None:
        super().__init__()
        size, width, bias = config.hidden_size, config.mlp_width, config.mlp_bias
        self.gate_proj = linear(config, size, width, bias=bias)
        self.up_proj = linear(config, size, width, bias=bias)
        self.down_proj = linear(config, width, size, bias=bias, output=True)
        self.project_inputs: FusedProjections = apply_each
        self.is_swiglu = config.mlp == "swiglu"
        self._combine = swiglu if self.is_swiglu else partial(_recomputed_gate, _ACTIVATIONS[config.mlp])
        self._flops = 6 * size * width

    def forward(self, x: Tensor) -> Tensor:
        """Return the output of x [..., hidden_size], in the same shape."""
        return self.down_proj(self._combine(*self.project_inputs(x, (self.gate_proj, self.up_proj))))

    def flops_per_token(self, length: int) -> int:
        """Return forward FLOPs per token, two per multiply-add."""
        return self._flops


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """Return SiLU(gate) * up for gate and up of one shape."""
    if is_supported(up) and gate.dtype == up.dtype:
        from ..kernels.swiglu import swiglu as kernel
    elif (native := cpu_kernel("swiglu")) is not None and native.supports_swiglu(gate, up):
        kernel = native.swiglu
    else:
        kernel = _swiglu
    y = kernel(gate, up)
    recomputable(y, kernel, gate, up)
    return y


def _swiglu(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up


def _gate(activation: Callable[[Tensor], Tensor], gate: Tensor, up: Tensor) -> Tensor:
    return activation(gate) * up


def _recomputed_gate(activation: Callable[[Tensor], Tensor], gate: Tensor, up: Tensor) -> Tensor:
    y = _gate(activation, gate, up)
    recomputable(y, _gate, activation, gate, up)
    return y


# Besides SiLU, which has kernels. The GELU is exact (erf); glu is that of Dauphin et al. 2017 (arXiv 1612.08083).
_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "geglu": F.gelu,
    "reglu": F.relu,
    "glu": torch.sigmoid,
    "bilinear": nn.Identity(),
}


class GELU(nn.Module):
    """Compute down(GELU(up x)) with the exact (erf) GELU, as in GPT-NeoX and Pythia."""

    tensor_parallel_plan: ClassVar[dict[str, str]] = {"up_proj": "column", "down_proj": "row"}
    fp8_projections: ClassVar[tuple[str, ...]] = ("up_proj", "down_proj")
    parameter_kinds: ClassVar[dict[str, str]] = {}
    project_inputs_is_entry: ClassVar[bool] = True

    def __init__(self, config: ModelShape) -> None:
        super().__init__()
        size, width, bias = config.hidden_size, config.mlp_width, config.mlp_bias
        self.up_proj = linear(config, size, width, bias=bias)
        self.down_proj = linear(config, width, size, bias=bias, output=True)
        self.project_inputs: FusedProjections = apply_each
        self._flops = 4 * size * width

    def forward(self, x: Tensor) -> Tensor:
        """Return the output of x [..., hidden_size], in the same shape."""
        (hidden,) = self.project_inputs(x, (self.up_proj,))
        activated = F.gelu(hidden)
        recomputable(activated, F.gelu, hidden)
        return self.down_proj(activated)

    def flops_per_token(self, length: int) -> int:
        """Return forward FLOPs per token, two per multiply-add."""
        return self._flops


class ChannelMixing(nn.Module):
    """Compute down(relu(up(x_t + mu (x_{t-1} - x_t)))^2), the channel mixing of RWKV-7 (arXiv 2503.14456)."""

    # The block gives it the mask, the segments and the state.
    shifts_tokens: ClassVar[bool] = True
    tensor_parallel_plan: ClassVar[dict[str, str]] = {"mix": "partial_grad", "up_proj": "column", "down_proj": "row"}
    fp8_projections: ClassVar[tuple[str, ...]] = ("up_proj", "down_proj")
    parameter_kinds: ClassVar[dict[str, str]] = {"mix": "norm"}

    def __init__(self, config: ModelShape) -> None:
        super().__init__()
        size, width, bias = config.hidden_size, config.mlp_width, config.mlp_bias
        self.mix = nn.Parameter(1 - torch.arange(size) / size)
        self.up_proj = linear(config, size, width, bias=bias)
        self.down_proj = linear(config, width, size, bias=bias, output=True)
        self._flops = 4 * size * width

    def forward(
        self,
        x: Tensor,
        mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        state: dict[str, Tensor] | None = None,
        return_state: bool = False,
    ) -> Tensor | tuple[Tensor, dict[str, Tensor]]:
        """Return the output of x [batch, length, hidden_size], in the same shape, and with return_state the new state.

        The state is "mlp_shift" [batch, hidden_size], the last input; with cu_seqlens one row per segment.
        """
        shifted, last = token_shift(x, mask, cu_seqlens, (state or {}).get("mlp_shift"))
        y = self.down_proj(F.relu(self.up_proj(x + (shifted - x) * self.mix.to(x.dtype))).square())
        return (y, {"mlp_shift": last}) if return_state else y

    def flops_per_token(self, length: int) -> int:
        """Return forward FLOPs per token, two per multiply-add."""
        return self._flops


MLPS: dict[str, Any] = {
    "gelu": GELU,
    "swiglu": GatedMLP,
    **dict.fromkeys(_ACTIVATIONS, GatedMLP),
    "rwkv7": ChannelMixing,
}
