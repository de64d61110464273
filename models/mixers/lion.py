"""LION (arXiv 2502.16249): bidirectional linear attention, and its causal form."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..layers.complex_decay import hippo_angles, rotation
from ..layers.initial_decays import decay_logits, initial_log_decays, zero_order_hold
from ..layers.norm import LayerNorm
from ..layers.projections import FusedProjections, apply_each, head_indices, init_normal, init_std, linear
from ..operators.gla.gated_linear_attention import flops_per_head, gated_linear_attention, no_decay
from ..operators.gla.normalized import linear_attention_with_normalizer, short_attention
from ..operators.lion.bidirectional_attention import ProjectedDecayLogits, bidirectional_linear_attention
from ..operators.lion.feature_map import NORMALIZED, feature_map
from ..operators.rotary import rotate
from ..operators.varlen import without_padding
from ..options import DT_MAX, DT_MIN, ModelShape, check_time_steps, option, require_positive
from ..precision import NORMALIZER_EPS, to_accumulation_dtype


@dataclass(frozen=True)
class LionOptions:
    """Hold the settings of the LION mixer."""

    variant: Literal["lit", "d", "s", "lstm", "grfa"] = option(
        "s",
        "Decay. lit: none. d: one learned scalar per head. s: one per head and token. lstm: s with an input gate "
        "on the key, and outputs divided by max(|normalizer|, 1). grfa: s with the key times 1 - decay; with decay_per: "
        "value_channel the value.",
    )
    causal: bool = option(
        True, "true: a token sees itself and earlier tokens only. false: all tokens, for masked models."
    )
    phi: Literal["silu", "silu_paper", "elu", "sigmoid", "relu", "softplus", "none"] = option(
        "silu",
        "Feature map of queries and keys. silu: (SiLU(x) + 0.5) / norm, positive. silu_paper: SiLU(x + 0.5) / "
        "norm as printed in the paper, not always positive. elu: elu(x) + 1. sigmoid, relu, softplus: the function of each "
        "channel; only the sigmoid is bounded. none: keys / sqrt(head_dim), for lstm or scaled: false.",
    )
    decay_per: Literal["head", "channel", "value_channel"] = option(
        "head",
        "head: one decay per head. channel: a vector per head, one decay per channel of its keys, as in GLA. value_channel: one "
        "decay, mask and normalizer per channel of its values, for variants d, s and grfa with causal: false. lit has none.",
    )
    decay_init: Literal["half", "retnet", "half_life", "hippo", "s4d_lin"] = option(
        "retnet",
        "Initial decay. half: 1/2. retnet: 1 - 2^(-5-h) for head h. half_life: 2^(-1 / half_life). hippo: exp(-dt (n+1)) for "
        "channel n of a head with time step dt, the diagonal of HiPPO-LegS. s4d_lin: exp(-dt / 2) for a channel with time step "
        "dt, the real part of S4D-Lin. Both need decays per channel. lit does not use it.",
    )
    half_life: float = option(64.0, "Tokens over which the initial decay is 1/2, for decay_init: half_life.")
    dt_min: float = option(0.001, DT_MIN)
    dt_max: float = option(0.1, DT_MAX)
    complex_decay: bool = option(
        False,
        "true: channels c and c + head_dim / 2 of a head's values are a complex number, and so is their decay. Its angle is "
        "(pi n + offset) dt for pair n of a head, with a learned offset: the imaginary part of S4D-Lin. It needs decay_per: "
        "value_channel and decay_init: s4d_lin.",
    )
    init_std: float | None = option(
        None, "Standard deviation of the initial weights of queries, keys and decays; null: that of the model."
    )
    value_init: Literal["normal", "zero_order_hold"] = option(
        "normal",
        "Initial weight of values. normal: as the other projections. zero_order_hold: the diagonal matrix of (1 - decay) / rate, "
        "where the initial decay is exp(-dt rate). rate: n + 1 with hippo, 1/2 with s4d_lin, else -log decay, with dt = 1.",
    )
    scaled: bool = option(
        True, "true: divide each output by its normalizer, the row sum of the decayed attention matrix."
    )
    mask_convention: Literal["eq17", "shifted"] = option(
        "eq17",
        "eq17: the symmetric mask. shifted: the forward decay is one token later, for comparisons; it needs "
        "causal: false.",
    )
    form: Literal["auto", "parallel", "recurrent", "chunked"] = option(
        "auto",
        "Algorithm for both directions; all give the same result. auto: the fastest for the device. parallel: "
        "quadratic in length. recurrent: token by token with a constant state. chunked: linear in length. causal: true "
        "allows auto only.",
    )
    output_norm: bool | None = option(None, "LayerNorm after the mixer; null: for lit only, as in the paper.")
    bias: bool = option(False, "Biases in the four projections.")

    def __post_init__(self) -> None:
        require_positive("lion", self, "half_life")
        check_time_steps("lion", self.dt_min, self.dt_max)
        if self.init_std is not None:
            require_positive("lion", self, "init_std")
        if self.variant == "lit" and (self.decay_per != "head" or self.value_init == "zero_order_hold"):
            key = "value_init = zero_order_hold" if self.decay_per == "head" else f"decay_per = {self.decay_per}"
            raise ValueError(
                f"model.mixer_options.lion.{key} with variant = lit, which has no decay: set variant = d, s, lstm or grfa, or "
                "remove the key"
            )
        if self.decay_init in ("hippo", "s4d_lin") and self.decay_per == "head":
            raise ValueError(
                f"model.mixer_options.lion.decay_init = {self.decay_init} with decay_per = head: channels have different initial "
                "decays; set model.mixer_options.lion.decay_per = channel or value_channel, or decay_init = half, retnet or "
                "half_life"
            )
        if self.decay_per == "value_channel" and (self.causal or self.variant not in ("d", "s", "grfa")):
            raise ValueError(
                f"model.mixer_options.lion.decay_per = value_channel with variant = {self.variant}, causal = "
                f"{str(self.causal).lower()}: it is for variants d, s and grfa with causal = false; set these, or decay_per = "
                "channel"
            )
        if self.decay_per == "value_channel" and self.variant == "grfa" and self.scaled:
            raise ValueError(
                "model.mixer_options.lion.scaled = true with decay_per = value_channel and variant = grfa, whose factor 1 - "
                "decay is on the value and not in the normalizer: set scaled = false, or decay_per = channel"
            )
        if self.complex_decay and (self.decay_per != "value_channel" or self.decay_init != "s4d_lin"):
            raise ValueError(
                f"model.mixer_options.lion.complex_decay = true with decay_per = {self.decay_per} and decay_init = "
                f"{self.decay_init}: set decay_per = value_channel and decay_init = s4d_lin, or complex_decay = false"
            )
        if self.causal and self.form != "auto":
            raise ValueError(
                f"model.mixer_options.lion.form = {self.form!r} is for both directions only: set "
                "model.mixer_options.lion.causal = false, or form = auto"
            )
        if self.causal and self.mask_convention != "eq17":
            raise ValueError(
                "model.mixer_options.lion.mask_convention = 'shifted' is for both directions only: set "
                "model.mixer_options.lion.causal = false, or mask_convention = eq17"
            )
        if self.phi == "none" and self.scaled and self.variant != "lstm":
            raise ValueError(
                f"model.mixer_options.lion.phi = 'none' with variant = {self.variant!r}: normalizers may be 0; set phi = silu or "
                "another feature map, variant = lstm, or scaled = false"
            )
        if self.variant == "lstm" and not self.scaled:
            raise ValueError(
                "model.mixer_options.lion.scaled = false with variant = lstm, which divides by max(|normalizer|, 1): set "
                "scaled = true, or variant = s"
            )


class Lion(nn.Module):
    """Compute y = W_O (scale(phi(Q) phi(K)^T * M) V) per head, Afzal et al. 2025, Eq. 16-17 and appendix C.5.

    M_ij = exp(-|c_i - c_j|), c the running sum of log lambda. scale divides a row by its normalizer, row sum + 1e-6. Causal:
    M_ij = 0 for j > i, so S_t = lambda_t S_{t-1} + k_t [v_t, 1], o_t = q_t S_t (Eq. 7).
      lit   lambda = 1                         d      lambda = sigmoid(a), one a per head
      s     lambda_t = sigmoid(w x_t + b)      grfa   as s, k_t <- (1 - lambda_t) k_t (gated RFA, arXiv 2103.02143)
      lstm  as s, k_t <- sigmoid(w' x_t + b') k_t, normalizer max(|row sum|, 1) (mLSTM, arXiv 2405.04517). The mLSTM's
            exponential input gate needs a running maximum; the sigmoid does not.
    decay_per = channel: a, w and b have one row per channel of keys, and M_ij multiplies the channel's part of phi(q_i) phi(k_j).
    decay_per = value_channel: one row, one M and one normalizer per channel of values (appendix C.7), and grfa
    multiplies v_t by 1 - |lambda_t| instead of k_t. complex_decay: two channels of values are a complex number, and M_ij is
    multiplied by exp(1j angle (i - j)): v_j is rotated by -angle j before the real operator, and its output by angle i. The angle
    is (pi n + frequency_offset) dt for pair n of a head with the initial time step dt.
    The bias b is the non-selective term. decay_init = hippo and value_init = zero_order_hold are those of the Long Range Arena.
    There are no positions: lit has no decay and needs model.positions = learned.
    """

    Options = LionOptions
    state_size: ClassVar[str] = "d^2 / heads + d float32; none when not causal"
    supports_context_parallel: ClassVar[bool] = True
    fp8_projections: ClassVar[tuple[str, ...]] = ("q_proj", "k_proj", "v_proj", "out_proj")
    tensor_parallel_plan: ClassVar[dict[str, str]] = {
        "q_proj": "column",
        "k_proj": "column",
        "v_proj": "column",
        "decay_weight": "heads",
        "decay": "heads",
        "frequency_offset": "heads",
        "head_index": "heads",
        "input_gate": "column",
        "out_proj": "row",
        "output_norm": "replicated",
    }
    parameter_kinds: ClassVar[dict[str, str]] = {"decay_weight": "decay", "decay": "decay", "frequency_offset": "decay"}

    head_index: Tensor

    def __init__(self, config: ModelShape, layer_index: int, options: LionOptions) -> None:
        super().__init__()
        size, heads = config.hidden_size, config.num_heads
        self.options = options
        self.head_dim = size // heads
        self.q_proj = linear(config, size, size, bias=options.bias)
        self.k_proj = linear(config, size, size, bias=options.bias)
        self.v_proj = linear(config, size, size, bias=options.bias)
        channels = self.head_dim // 2 if options.complex_decay else self.head_dim
        log_decay = initial_log_decays(options, heads, channels)
        self.decay = None if options.variant == "lit" else nn.Parameter(decay_logits(log_decay))
        self.decay_weight = None
        if options.variant not in ("lit", "d"):
            self.decay_weight = nn.Parameter(torch.empty(len(log_decay), size))
            init_normal(self.decay_weight, init_std(config))
        self.frequency_offset = nn.Parameter(torch.zeros(len(log_decay))) if options.complex_decay else None
        # Integers, so that time steps stay exact if the module is cast to 16 bits.
        self.register_buffer("head_index", head_indices(config) if options.complex_decay else None, persistent=False)
        self.input_gate = linear(config, size, heads, bias=True) if options.variant == "lstm" else None
        self.out_proj = linear(config, size, size, bias=options.bias, output=True)
        normed = options.variant == "lit" if options.output_norm is None else options.output_norm
        self.output_norm = LayerNorm(size) if normed else None
        if options.init_std is not None:
            for weight in (self.q_proj.weight, self.k_proj.weight, self.decay_weight):
                if weight is not None:
                    init_normal(weight, options.init_std)
        if options.value_init == "zero_order_hold":
            angle = None
            if options.complex_decay:
                offset = torch.zeros_like(log_decay)
                angle = hippo_angles(offset, self.head_index, heads, options).flatten()
            weight = zero_order_hold(options.decay_init, log_decay, angle, heads, self.head_dim)
            with torch.no_grad():
                self.v_proj.weight.copy_(weight)
        self.project_inputs: FusedProjections = apply_each
        self._size, self._heads, self._decays = size, heads, len(log_decay) // heads  # per head
        self._per_channel = options.decay_per != "head"
        self._per_value_channel = options.decay_per == "value_channel"

    @staticmethod
    def check(config: ModelShape, options: LionOptions) -> None:
        """Raise ValueError for complex decays of heads with an odd number of channels."""
        if options.complex_decay and (dim := config.hidden_size // config.num_heads) % 2:
            raise ValueError(
                f"model.mixer_options.lion.complex_decay = true with heads of {dim} channels: make model.hidden_size / "
                "model.num_heads even, or set complex_decay = false"
            )

    def forward(
        self,
        x: Tensor,
        mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        state: dict[str, Tensor] | None = None,
        return_state: bool = False,
    ) -> Tensor | tuple[Tensor, dict[str, Tensor]]:
        """Compute the layer.

        The state is "recurrent" [batch, heads, head_dim, head_dim + 1 (head_dim if not scaled)] in float32. Raises
        ValueError for a state if not causal.
        """
        if not self.options.causal and (state is not None or return_state):
            raise ValueError(
                "lion with model.mixer_options.lion.causal = false sees both directions and has no state to decode from: "
                "call it without state and return_state, or set causal = true"
            )
        projected = self.decay_weight is not None and self.input_gate is None
        q, k, v, *rest = self.project_inputs(x, (self.q_proj, self.k_proj, self.v_proj), return_input=projected)
        q, k, v = (y.unflatten(-1, (-1, self.head_dim)) for y in (q, k, v))
        x = rest[0] if projected else x
        logits = self._decay_logits(x)
        q, k, phi = self._features(q, k, v.dtype)
        k, v = self._gate(x, k, v, logits)
        if self.frequency_offset is not None:
            angle = hippo_angles(self.frequency_offset, self.head_index, self._heads, self.options)
            cos, sin = rotation(angle, v, mask, cu_seqlens)
            v = rotate(v, cos, -sin)
        if self.options.causal:
            logits = logits.logits() if isinstance(logits, ProjectedDecayLogits) else logits
            o, new_state = self._causal(q, k, v, logits, mask, cu_seqlens, (state or {}).get("recurrent"), return_state)
        else:
            o, new_state = self._bidirectional(q, k, v, logits, phi, mask, cu_seqlens), {}
        if self.frequency_offset is not None:
            o = rotate(o, cos, sin)
        y = self.out_proj(o.flatten(-2).to(v.dtype))
        if self.output_norm is not None:
            y = self.output_norm(y)
        return (y, new_state) if return_state else y

    def _features(self, q: Tensor, k: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, str | None]:
        """Return phi(q), phi(k) and None; or q, k and the phi that `bidirectional_linear_attention` applies."""
        options = self.options
        if options.phi == "none":
            return q, to_accumulation_dtype(k) * self.head_dim**-0.5, None
        gated_key = options.variant == "lstm" or (options.variant == "grfa" and not self._per_value_channel)
        if not (options.causal or gated_key):
            return q, k, options.phi
        # A gated key is rounded after the gate.
        return feature_map(q, options.phi, dtype), feature_map(k, options.phi, None if gated_key else dtype), None

    def _gate(
        self, x: Tensor, k: Tensor, v: Tensor, logits: Tensor | ProjectedDecayLogits | None
    ) -> tuple[Tensor, Tensor]:
        """Return keys and values in v's dtype after the input gate of lstm or the factor 1 - lambda of grfa."""
        if self.input_gate is not None:
            k = k * torch.sigmoid(to_accumulation_dtype(self.input_gate(x))).unsqueeze(-1)
        if self.options.variant == "grfa" and isinstance(logits, Tensor):
            share = torch.sigmoid(-logits if self._per_channel else -logits.unsqueeze(-1))
            if self._per_value_channel:
                v = (v * share).to(v.dtype)
            else:
                k = k * share
        return k.to(v.dtype), v

    def _decay_logits(self, x: Tensor) -> Tensor | ProjectedDecayLogits | None:
        """Return the logits of lambda, [batch, length, heads] in float32 (float64 for float64), or their projection.

        With per-channel decays they are [batch, length, heads, head_dim].
        """
        if self.decay is None:
            return None
        if self._per_channel:
            logits = to_accumulation_dtype(self.decay)
            if self.decay_weight is not None:
                logits = logits + F.linear(x, self.decay_weight)
            if self.frequency_offset is not None:
                logits = torch.cat(2 * [logits.unflatten(-1, (-1, self.head_dim // 2))], -1)
            else:
                logits = logits.unflatten(-1, (-1, self.head_dim))
            return logits.expand(*x.shape[:2], -1, -1)
        if self.decay_weight is None:
            return to_accumulation_dtype(self.decay).expand(*x.shape[:2], -1) if self.options.causal else self.decay
        projected = ProjectedDecayLogits(x, self.decay_weight, self.decay)
        return projected.logits() if self.options.variant == "grfa" else projected

    def _causal(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        logits: Tensor | None,
        mask: Tensor | None,
        cu_seqlens: Tensor | None,
        initial_state: Tensor | None,
        return_state: bool,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        log_decay = no_decay(q) if logits is None else F.logsigmoid(logits)
        log_decay = log_decay if log_decay.dim() == 4 else log_decay.unsqueeze(-1)
        log_decay, k = without_padding(mask, log_decay, k)
        short = None
        if self.input_gate is None and not self._per_channel:
            short = short_attention(
                q, k, v, log_decay, normalized=self.options.scaled, cu_seqlens=cu_seqlens, initial_state=initial_state,
                return_state=return_state,
            )  # fmt: skip
        if short is not None:
            return short, {}
        if not self.options.scaled:
            o, recurrent = gated_linear_attention(
                q, k, v, log_decay, initial_state=initial_state, cu_seqlens=cu_seqlens,
                fits_matmul_form=self._per_channel,
            )  # fmt: skip
            return o, {"recurrent": recurrent}
        weight = 1 if self.options.phi in (*NORMALIZED, "none") else self.head_dim
        num, den, recurrent = linear_attention_with_normalizer(
            q, k, v, log_decay, weight=weight, initial_state=initial_state, cu_seqlens=cu_seqlens,
            fits_matmul_form=self._per_channel,
        )  # fmt: skip
        o = num / (den + NORMALIZER_EPS if self.input_gate is None else den.abs().clamp_min(1.0))
        return o, {"recurrent": recurrent}

    def _bidirectional(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        logits: Tensor | ProjectedDecayLogits | None,
        phi: str | None,
        mask: Tensor | None,
        cu_seqlens: Tensor | None,
    ) -> Tensor:
        lstm = self.input_gate is not None
        if lstm and v.dtype == torch.float16:  # sums over a long sequence, and their gradients, may overflow
            q, k, v = to_accumulation_dtype(q), to_accumulation_dtype(k), to_accumulation_dtype(v)
        log_decay = F.logsigmoid(logits) if self._per_channel and isinstance(logits, Tensor) else None
        o = bidirectional_linear_attention(
            q,
            k,
            F.pad(v, (0, 1), value=1.0) if lstm else v,
            log_decay,
            decay_logits=logits if log_decay is None else None,
            phi=phi,
            normalized=self.options.scaled and not lstm,
            mask=mask,
            cu_seqlens=cu_seqlens,
            mask_convention=self.options.mask_convention,
            form=self.options.form,
            per_value_channel=self._per_value_channel,
        )
        return (
            to_accumulation_dtype(o[..., :-1]) / to_accumulation_dtype(o[..., -1:]).abs().clamp_min(1.0) if lstm else o
        )

    def flops_per_token(self, length: int) -> int:
        """Return forward FLOPs per token, two per multiply-add, with the operator in chunks of 64 tokens."""
        dim, directions = self.head_dim, 1 if self.options.causal else 2
        gates = 2 * self._size * ((self.decay_weight is not None) * self._decays + (self.input_gate is not None))
        normalizers = (dim if self._per_value_channel else 1) if self.options.scaled else 0
        operator = flops_per_head(length, dim, dim + normalizers)
        return 8 * self._size**2 + self._heads * (gates + directions * operator)
