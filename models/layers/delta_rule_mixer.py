"""The parts that the mixers of the delta rule share: sizes, projections, convolutions, and the order of a layer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from math import isclose
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..backend import SIXTEEN_BITS, is_supported
from ..operators.delta_rule.delta_rule import delta_rule
from ..operators.delta_rule.softplus_decay import SoftplusDecay
from ..operators.varlen import without_padding
from ..options import ModelShape, nearest_multiples, option, require_at_least, require_divisor, require_positive
from ..precision import to_accumulation_dtype
from ..recompute import recomputable
from .projections import FusedProjections, apply_each, linear
from .short_convolution import CausalConvolution


@dataclass(frozen=True)
class DeltaRuleOptions:
    """Hold the settings that the mixers of the delta rule share. A subclass names its mixer and changes defaults."""

    mixer: ClassVar[str]
    # key_dim / hidden_size where head_dim is null.
    key_fraction: ClassVar[float] = 1.0

    num_heads: int | None = option(None, "Heads of queries and keys. null: model.num_heads.")
    num_value_heads: int | None = option(
        None,
        "Heads of values and states, a multiple of num_heads; each group shares a query and a key. null: num_heads.",
    )
    head_dim: int | None = option(
        None, "Channels of a query and a key per head. null: the mixer's fraction of hidden_size / num_heads."
    )
    expand_v: float = option(1.0, "Channels of a value per head / head_dim.")
    conv_kernel: int = option(4, "Kernel size of the three convolutions, in tokens.")
    allow_negative_eigenvalues: bool = option(
        False, "true: erase gates reach 2, so that a step can reverse the content of a key (arXiv 2411.12537)."
    )
    norm_eps: float = option(1e-5, "Added to the mean square in the norm per head.")

    def __post_init__(self) -> None:
        require_at_least(self.mixer, self, 1, "num_heads", "num_value_heads", "head_dim", "conv_kernel")
        require_positive(self.mixer, self, "expand_v", "norm_eps")


@dataclass(frozen=True)
class DeltaRuleSizes:
    """Hold the heads and their widths of a layer."""

    heads: int
    value_heads: int
    head_dim_k: int
    head_dim_v: int

    @property
    def key_dim(self) -> int:
        """Return the width of all keys."""
        return self.heads * self.head_dim_k

    @property
    def value_dim(self) -> int:
        """Return the width of all values."""
        return self.value_heads * self.head_dim_v


def delta_rule_sizes(config: ModelShape, options: DeltaRuleOptions) -> DeltaRuleSizes:
    """Return the sizes of a layer. Raises ValueError with the key for heads and widths that do not fit together."""
    prefix = f"model.mixer_options.{options.mixer}"
    heads_key = "model.num_heads" if options.num_heads is None else f"{prefix}.num_heads"
    heads = options.num_heads or config.num_heads
    value_heads = options.num_value_heads or heads
    if value_heads % heads:
        raise ValueError(
            f"{prefix}.num_value_heads = {value_heads} is not a multiple of {heads_key} = {heads}; nearest that are: "
            f"{nearest_multiples(value_heads, heads)}"
        )
    width = options.head_dim
    if width is None:
        key_dim = config.hidden_size * options.key_fraction
        what = (
            f"key_dim of {options.mixer}, model.hidden_size * {options.key_fraction:g} ({prefix}.head_dim sets another)"
        )
        require_divisor(heads_key, heads, what, key_dim)
        width = round(key_dim) // heads
    value_width = width * options.expand_v
    # 45 x 1.4 is not exactly 63 in binary.
    if not isclose(value_width, round(value_width), rel_tol=1e-5):
        raise ValueError(
            f"{prefix}.expand_v = {options.expand_v}: a value would have {value_width:g} channels per head of {width}; set "
            f"it to a whole number of channels, for example {max(1, round(value_width))} / {width}"
        )
    return DeltaRuleSizes(heads, value_heads, width, round(value_width))


class DeltaRuleMixer(nn.Module, ABC):
    """Compute a layer of the delta rule; a subclass has its projections of x, its gates and its output norm.

    q, k, v = SiLU(conv(W x)), q and k of length one per head; (log decay, erase, write) = gates(x);
    o = delta_rule(q, k, v, gates) / sqrt(head_dim_k); y = W_O norm_head(o). A group of value heads shares q and k.
    """

    supports_context_parallel: ClassVar[bool] = True
    project_inputs_is_entry: ClassVar[bool] = True
    state_size: ClassVar[str] = "heads * dim_k * dim_v float32 and (kernel - 1) (2 key_dim + value_dim)"
    fp8_projections: ClassVar[tuple[str, ...]] = ("q_proj", "k_proj", "v_proj", "out_proj")
    # Every tensor-parallel rank uses the whole norm weight, and its heads compute a part of its gradient.
    tensor_parallel_plan: ClassVar[dict[str, str]] = {
        "q_proj": "column",
        "k_proj": "column",
        "v_proj": "column",
        "b_proj": "column",
        "conv_q": "heads",
        "conv_k": "heads",
        "conv_v": "heads",
        "norm_weight": "partial_grad",
        "out_proj": "row",
    }
    parameter_kinds: ClassVar[dict[str, str]] = {"norm_weight": "norm"}

    def __init__(self, config: ModelShape, options: DeltaRuleOptions) -> None:
        super().__init__()
        size, sizes = config.hidden_size, delta_rule_sizes(config, options)
        self.options, self.sizes = options, sizes
        self.q_proj = linear(config, size, sizes.key_dim)
        self.k_proj = linear(config, size, sizes.key_dim)
        self.v_proj = linear(config, size, sizes.value_dim)
        self.conv_q = CausalConvolution(sizes.key_dim, options.conv_kernel, silu=True)
        self.conv_k = CausalConvolution(sizes.key_dim, options.conv_kernel, silu=True)
        self.conv_v = CausalConvolution(sizes.value_dim, options.conv_kernel, silu=True)
        self.norm_weight = nn.Parameter(torch.ones(sizes.head_dim_v))
        self.out_proj = linear(config, sizes.value_dim, size, output=True)
        self.project_inputs: FusedProjections = apply_each

    @staticmethod
    def check(config: ModelShape, options: DeltaRuleOptions) -> None:
        """Raise ValueError for heads and widths that do not fit together."""
        delta_rule_sizes(config, options)

    @staticmethod
    def sharded_sizes(config: ModelShape, options: DeltaRuleOptions) -> dict[str, int]:
        """Return the key heads, which tensor parallelism splits with their groups of value heads."""
        return {f"model.mixer_options.{options.mixer}.num_heads": options.num_heads or config.num_heads}

    @abstractmethod
    def input_projections(self) -> dict[str, nn.Linear]:
        """Return the projections of x besides q, k and v, by the name under which `gates` and `output` find the result."""

    @abstractmethod
    def gates(self, projected: dict[str, Tensor]) -> tuple[Tensor | SoftplusDecay | None, Tensor, Tensor | None]:
        """Return log decay, erase and write of `models.operators.delta_rule.delta_rule`, for key or for value heads.

        A `SoftplusDecay` has one decay per channel of every value head.
        """

    @abstractmethod
    def output(self, o: Tensor, projected: dict[str, Tensor]) -> Tensor:
        """Return the input of W_O, [batch, length, value_dim], for o [batch, length, value heads, head_dim_v]."""

    def forward(
        self,
        x: Tensor,
        mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        state: dict[str, Tensor] | None = None,
        return_state: bool = False,
    ) -> Tensor | tuple[Tensor, dict[str, Tensor]]:
        """Return the output, of x's shape [batch, length, hidden_size], and with return_state the new state.

        The state is "recurrent" [batch, value heads, head_dim_k, head_dim_v] in float32 and "conv_q", "conv_k", "conv_v"
        [batch, kernel - 1, channels]; with cu_seqlens one row per segment.
        """
        state = state or {}
        new_state: dict[str, Tensor] = {}
        linears = {"q": self.q_proj, "k": self.k_proj, "v": self.v_proj, **self.input_projections()}
        projected = dict(zip(linears, self.project_inputs(x, tuple(linears.values())), strict=True))
        for name, conv in (("q", self.conv_q), ("k", self.conv_k), ("v", self.conv_v)):
            key = f"conv_{name}"
            projected[name], history = conv(projected[name], mask, cu_seqlens, state.get(key), return_state)
            if history is not None:
                new_state[key] = history
        q, k = (unit_length(split_heads(projected[name], self.sizes.head_dim_k)) for name in ("q", "k"))
        v = split_heads(projected["v"], self.sizes.head_dim_v)
        log_decay, erase, write = self.gates(projected)
        if isinstance(log_decay, SoftplusDecay) and mask is not None:
            log_decay = log_decay.value()
        if isinstance(log_decay, Tensor):
            (log_decay,) = without_padding(mask, log_decay)
            log_decay = _for_each_value_head(log_decay, v.shape[2])
        (erase,) = without_padding(mask, erase)
        if write is not None:
            (write,) = without_padding(mask, write)
        q, k, erase = (_for_each_value_head(y, v.shape[2]) for y in (q, k, erase))
        o, final = delta_rule(
            q,
            k,
            v,
            log_decay,
            erase,
            write,
            initial_state=state.get("recurrent"),
            output_final_state=return_state,
            cu_seqlens=cu_seqlens,
        )
        if final is not None:
            new_state["recurrent"] = final
        y = self.out_proj(self.output(o, projected))
        return (y, new_state) if return_state else y

    def beta(self, logits: Tensor) -> Tensor:
        """Return sigmoid(logits) in float32, doubled with `allow_negative_eigenvalues`."""
        beta = to_accumulation_dtype(logits).sigmoid()
        return 2 * beta if self.options.allow_negative_eigenvalues else beta

    def flops_per_token(self, length: int) -> int:
        """Return forward FLOPs per token, two per multiply-add, with the recurrence in chunks of 64 tokens."""
        matrices = sum(parameter.numel() for parameter in self.parameters() if parameter.dim() > 1)
        dim_k, dim_v = self.sizes.head_dim_k, self.sizes.head_dim_v
        inside = min(64, length) * (3 * dim_k + 2 * dim_v)
        return 2 * matrices + self.sizes.value_heads * (inside + 6 * dim_k * dim_v)


def split_heads(x: Tensor, head_dim: int) -> Tensor:
    """Return [batch, length, heads * head_dim] as [batch, length, heads, head_dim], with heads from the tensor's shape."""
    return x.unflatten(-1, (-1, head_dim))


def unit_length(x: Tensor) -> Tensor:
    """Return x / sqrt(sum x^2 + 1e-6) over the last axis, in x's dtype."""
    y = _unit_length(x)
    recomputable(y, _unit_length, x)
    return y


def _unit_length(x: Tensor) -> Tensor:
    if _has_kernels(x):
        from ..kernels.delta_rule.layer import unit_length as kernel

        return kernel(x, 1e-6)
    accumulated = to_accumulation_dtype(x)
    return (accumulated * (accumulated.square().sum(-1, keepdim=True) + 1e-6).rsqrt()).to(x.dtype)


def gated_rms_norm(
    o: Tensor, gate: Tensor, weight: Tensor, eps: float, activation: Callable[[Tensor], Tensor] = F.silu
) -> Tensor:
    """Return activation(gate) * weight * o / rms_head(o) in gate's dtype and shape.

    o: [batch, length, heads, head_dim]; gate: [batch, length, heads * head_dim]; weight: [head_dim].
    """
    arguments = (o, gate, weight, eps, activation)
    y = _gated_rms_norm(*arguments)
    recomputable(y, _gated_rms_norm, *arguments)
    return y


def _gated_rms_norm(o: Tensor, gate: Tensor, weight: Tensor, eps: float, activation: Any) -> Tensor:
    if o.dtype == gate.dtype and _has_kernels(o):
        from ..kernels.delta_rule.layer import gated_norm

        return gated_norm(o, gate, weight, eps, activation is F.silu)
    normed = F.rms_norm(to_accumulation_dtype(o), weight.shape, to_accumulation_dtype(weight), eps)
    return (activation(to_accumulation_dtype(gate)) * normed.flatten(-2)).to(gate.dtype)


def _has_kernels(x: Tensor) -> bool:
    """Return whether `models/kernels/delta_rule/layer.py` computes with x [batch, length, heads, dim]."""
    return x.dim() == 4 and x.dtype in SIXTEEN_BITS and is_supported(x)


def _for_each_value_head(x: Tensor, value_heads: int) -> Tensor:
    """Repeat x [batch, length, heads, ...] of key heads for the value heads of each group."""
    return x if x.shape[2] == value_heads else x.repeat_interleave(value_heads // x.shape[2], 2)
