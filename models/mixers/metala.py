"""MetaLA (arXiv 2411.10741): linear attention with k = 1 - alpha, self-augmentation and a short convolution."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from ..layers.initial_decays import decay_logits, initial_log_decays
from ..layers.projections import FusedProjections, apply_each, linear
from ..layers.short_convolution import CausalConvolution, convolve_input
from ..operators.gla.gated_linear_attention import flops_per_head
from ..operators.metala import metala
from ..options import (
    DT_MAX,
    DT_MIN,
    ModelShape,
    check_key_dim,
    check_time_steps,
    option,
    require_at_least,
    require_positive,
)

DECAY_INIT = (
    "none: alpha = sigmoid(W_a x)^(1/16). hippo: alpha = sigmoid(W_a x + b)^(1/16), b a parameter whose initial alpha is "
    "exp(-dt (n+1)) for channel n of a head with time step dt, the diagonal of HiPPO-LegS."
)


@dataclass(frozen=True)
class MetaLAOptions:
    """Hold the settings of the MetaLA mixer."""

    preset: Literal["released", "paper"] = option(
        "released",
        "released: scale 1/sqrt(head_dim_k) and SiLU after the convolution, as in the released models. "
        "paper: scale 1 and no activation after the convolution, as in the paper's equations.",
    )
    self_augmentation: bool = option(
        True, "Self-augmentation: an extra term for the token itself, Eq. 22. false: an ablation of Table 8."
    )
    convolution: bool = option(True, "Causal convolution on the input. false: an ablation of Table 8.")
    conv_kernel: int = option(4, "Kernel size of the convolution, in tokens; 2 for MQAR.")
    key_projection: bool = option(False, "true: k = W_K x, an ablation of Table 8. false: k = 1 - alpha.")
    dynamic_decay: bool = option(
        True,
        "true: alpha depends on the token. false: one learned alpha per channel, an ablation; it needs "
        "key_projection: true.",
    )
    expand_k: float = option(0.5, "key_dim / hidden_size: the width of q, k and alpha over all heads. 1 for MQAR.")
    decay_init: Literal["none", "hippo"] = option("none", DECAY_INIT)
    dt_min: float = option(0.001, DT_MIN)
    dt_max: float = option(0.1, DT_MAX)

    def __post_init__(self) -> None:
        require_at_least("metala", self, 1, "conv_kernel")
        require_positive("metala", self, "expand_k")
        check_time_steps("metala", self.dt_min, self.dt_max)
        if not self.dynamic_decay and not self.key_projection:
            raise ValueError(
                "model.mixer_options.metala.dynamic_decay = false with key_projection = false: k = 1 - alpha would be the same "
                "for every token; also set model.mixer_options.metala.key_projection = true"
            )


class MetaLA(nn.Module):
    """Compute the MetaLA layer, Eq. 13-22 and A35, with key_dim = expand_k d (d / 2) and value_dim = d.

    x <- SiLU(conv(x)); q, a, v = W x; u = W_G x + b; g = logsigmoid(a) / 16; k = 1 - exp(g);
    o = GLA(q, k, v, g) + sigmoid((sum_c q_c w_c k_c) v); y = W_O(SiLU(u) * LayerNorm_head(o)).
    """

    Options = MetaLAOptions
    state_size: ClassVar[str] = "d^2 / (2 heads) float32 and (kernel - 1) d"
    supports_context_parallel: ClassVar[bool] = True
    project_inputs_is_entry: ClassVar[bool] = True
    fp8_projections: ClassVar[tuple[str, ...]] = ("q_proj", "k_proj", "v_proj", "gate_proj", "out_proj")
    tensor_parallel_plan: ClassVar[dict[str, str]] = {
        "conv": "replicated",
        "q_proj": "column",
        "k_proj": "column",
        "a_proj": "column",
        "decay": "heads",
        "v_proj": "column",
        "gate_proj": "column",
        "aug_weight": "heads",
        "out_proj": "row",
    }
    parameter_kinds: ClassVar[dict[str, str]] = {"decay": "decay"}

    def __init__(self, config: ModelShape, layer_index: int, options: MetaLAOptions) -> None:
        super().__init__()
        size = config.hidden_size
        key_dim = round(size * options.expand_k)
        self.options = options
        self.head_dim_k = key_dim // config.num_heads
        self.head_dim_v = size // config.num_heads
        self.scale = self.head_dim_k**-0.5 if options.preset == "released" else 1.0
        silu = options.preset == "released"
        self.conv = CausalConvolution(size, options.conv_kernel, silu=silu) if options.convolution else None
        self.q_proj = linear(config, size, key_dim)
        self.a_proj = linear(config, size, key_dim) if options.dynamic_decay else None
        self.decay = initial_decay(options, config.num_heads, self.head_dim_k)
        if self.decay is None and not options.dynamic_decay:
            # Initially alpha = 0.5^(1/16), the initial mean with a_proj.
            self.decay = nn.Parameter(torch.zeros(key_dim))
        self.k_proj = linear(config, size, key_dim) if options.key_projection else None
        self.v_proj = linear(config, size, size)
        self.gate_proj = linear(config, size, size, bias=True)
        self.aug_weight = nn.Parameter(torch.zeros(key_dim)) if options.self_augmentation else None
        self.out_proj = linear(config, size, size, output=True)
        self.project_inputs: FusedProjections = apply_each
        self.fp8_output = False  # a trainer sets it if out_proj multiplies in FP8
        self._size, self._key_dim, self._heads = size, key_dim, config.num_heads

    @staticmethod
    def check(config: ModelShape, options: MetaLAOptions) -> None:
        """Raise ValueError if model.num_heads does not divide key_dim."""
        check_key_dim("metala", config, options.expand_k)

    def forward(
        self,
        x: Tensor,
        mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        state: dict[str, Tensor] | None = None,
        return_state: bool = False,
    ) -> Tensor | tuple[Tensor, dict[str, Tensor]]:
        """Compute the layer.

        The state is "recurrent" [batch, heads, head_dim_k, head_dim_v] in float32 and "conv" [batch, kernel - 1,
        hidden_size], the last inputs of the convolution.
        """
        state = state or {}
        x, new_state = convolve_input(self.conv, x, mask, cu_seqlens, state, return_state)
        # In this order the weights are adjacent in a trainer's flat memory.
        linears = {"q": self.q_proj, "a": self.a_proj, "k": self.k_proj, "v": self.v_proj, "gate": self.gate_proj}
        present = {name: linear for name, linear in linears.items() if linear is not None}
        projected = dict(zip(present, self.project_inputs(x, tuple(present.values())), strict=True))
        a = with_decay(projected.get("a"), self.decay, x)
        y, new_state["recurrent"] = metala(
            projected["q"].unflatten(-1, (-1, self.head_dim_k)),
            a.unflatten(-1, (-1, self.head_dim_k)),
            projected["v"].unflatten(-1, (-1, self.head_dim_v)),
            self.aug_weight,
            projected["gate"],
            k=projected["k"].unflatten(-1, (-1, self.head_dim_k)) if "k" in projected else None,
            mask=mask,
            scale=self.scale,
            initial_state=state.get("recurrent"),
            cu_seqlens=cu_seqlens,
            fp8_output=self.fp8_output,
        )
        y = self.out_proj(y)
        return (y, new_state) if return_state else y

    def flops_per_token(self, length: int) -> int:
        """Return forward FLOPs per token, two per multiply-add, with the recurrence in chunks of 64 tokens."""
        size, heads = self._size, self._heads
        key_projections = sum(proj is not None for proj in (self.q_proj, self.a_proj, self.k_proj))
        projections = 2 * size * (3 * size + key_projections * self._key_dim)
        convolution = 2 * size * self.options.conv_kernel if self.conv is not None else 0
        return projections + convolution + heads * flops_per_head(length, self.head_dim_k, self.head_dim_v)


def initial_decay(options: Any, heads: int, head_dim: int) -> nn.Parameter | None:
    """Return the non-selective logits of alpha^16, [heads * head_dim] float32, or None for decay_init: none.

    options: those of `metala` or `metala_bidirectional`.
    """
    if options.decay_init == "none":
        return None
    return nn.Parameter(decay_logits(16 * initial_log_decays(options, heads, head_dim)))


def with_decay(a: Tensor | None, decay: Tensor | None, x: Tensor) -> Tensor:
    """Return the logits of alpha^16 [batch, length, key_dim] for tokens x: `a`, which depends on the token, plus `decay`."""
    if a is None:
        assert decay is not None
        return decay.expand(*x.shape[:2], -1)
    return a if decay is None else (a + decay).to(a.dtype)
