"""Bidirectional MetaLA: the layer of arXiv 2411.10741 in which every token sees the whole sequence."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from ..layers.complex_decay import hippo_angles, rotation
from ..layers.projections import head_indices, linear
from ..layers.short_convolution import CausalConvolution
from ..operators.context_parallel import context_parallel_group, shard_segments
from ..operators.gla.gated_linear_attention import flops_per_head
from ..operators.lion.context_parallel import from_other_ranks
from ..operators.lion.scans import two_scans
from ..operators.metala import decay_and_key, metala_epilogue
from ..operators.rotary import rotate
from ..operators.varlen import without_padding
from ..options import DT_MAX, DT_MIN, ModelShape, check_key_dim, check_time_steps, option, require_at_least
from .metala import DECAY_INIT, MetaLA, initial_decay, with_decay


@dataclass(frozen=True)
class MetaLABidirectionalOptions:
    """Hold the settings of the bidirectional MetaLA mixer."""

    preset: Literal["released", "paper"] = option(
        "released",
        "released: scale 1/sqrt(head_dim_k) and SiLU after the convolution. paper: scale 1 and no activation.",
    )
    self_augmentation: bool = option(True, "Self-augmentation: an extra term for the token itself, Eq. 22.")
    convolution: bool = option(True, "Convolution on the input, causal as in metala.")
    conv_kernel: int = option(4, "Kernel size of the convolution, in tokens.")
    decay_init: Literal["none", "hippo", "s4d_lin"] = option(
        "none", f"{DECAY_INIT} s4d_lin: exp(-dt / 2) for a channel with time step dt, the real part of S4D-Lin."
    )
    dt_min: float = option(0.001, DT_MIN)
    dt_max: float = option(0.1, DT_MAX)
    complex_decay: bool = option(
        False,
        "true: decays have the angle (pi n + offset) dt for channel n of a head, with a learned offset: the imaginary part of "
        "S4D-Lin. Queries are complex, with two channels per decay. It needs decay_init: s4d_lin.",
    )

    def __post_init__(self) -> None:
        require_at_least("metala_bidirectional", self, 1, "conv_kernel")
        check_time_steps("metala_bidirectional", self.dt_min, self.dt_max)
        if self.complex_decay and self.decay_init != "s4d_lin":
            raise ValueError(
                "model.mixer_options.metala_bidirectional.complex_decay = true with decay_init = "
                f"{self.decay_init}: set decay_init = s4d_lin, or complex_decay = false"
            )


class MetaLABidirectional(nn.Module):
    """Apply MetaLA's projections (Eq. 13-22, `models.mixers.metala`) under LION's mask, Eq. 17, with per-channel decays:

        o_i = scale sum_j sum_c q_ic k_jc exp(-|c_ic - c_jc|) v_j,      c_i = sum_{t <= i} log alpha_t

    Token j < i reaches i with the factor alpha_{j+1} ... alpha_i, token j > i with alpha_{i+1} ... alpha_j. The diagonal
    counts once (`models.operators.lion.scans`). Self-augmentation, LayerNorm per head, gate and W_O are MetaLA's. The
    convolution is causal. complex_decay: q_ic is complex, with the imaginary parts of a head behind its real parts. The sum has
    the real part of q_ic e^(1j angle_c (i - j)), and self-augmentation that of q_ic.
    """

    Options = MetaLABidirectionalOptions
    causal: ClassVar[bool] = False
    state_size: ClassVar[str] = "none"
    supports_context_parallel: ClassVar[bool] = True
    fp8_projections: ClassVar[tuple[str, ...]] = ("q_proj", "v_proj", "out_proj")
    tensor_parallel_plan: ClassVar[dict[str, str]] = {
        **{name: spec for name, spec in MetaLA.tensor_parallel_plan.items() if name != "k_proj"},
        "conv": "partial_grad",  # the parallel region begins before the convolution
        "frequency_offset": "heads",
        "head_index": "heads",
    }
    parameter_kinds: ClassVar[dict[str, str]] = {**MetaLA.parameter_kinds, "frequency_offset": "decay"}
    head_index: Tensor

    def __init__(self, config: ModelShape, layer_index: int, options: MetaLABidirectionalOptions) -> None:
        super().__init__()
        size = config.hidden_size
        self.options = options
        self.head_dim_k = size // 2 // config.num_heads
        self.head_dim_v = size // config.num_heads
        silu = options.preset == "released"
        self.conv = CausalConvolution(size, options.conv_kernel, silu=silu) if options.convolution else None
        # A complex query has two channels per decay, in a head first the real parts.
        self.head_dim_q = 2 * self.head_dim_k if options.complex_decay else self.head_dim_k
        self.q_proj = linear(config, size, config.num_heads * self.head_dim_q)
        self.a_proj = linear(config, size, size // 2)
        self.decay = initial_decay(options, config.num_heads, self.head_dim_k)
        self.frequency_offset = nn.Parameter(torch.zeros(size // 2)) if options.complex_decay else None
        self.register_buffer("head_index", head_indices(config) if options.complex_decay else None, persistent=False)
        self.v_proj = linear(config, size, size)
        self.gate_proj = linear(config, size, size, bias=True)
        self.aug_weight = nn.Parameter(torch.zeros(size // 2)) if options.self_augmentation else None
        self.out_proj = linear(config, size, size, output=True)
        self._size, self._heads = size, config.num_heads

    @staticmethod
    def check(config: ModelShape, options: MetaLABidirectionalOptions) -> None:
        """Raise ValueError if model.num_heads does not divide key_dim = hidden_size / 2."""
        check_key_dim("metala_bidirectional", config, 0.5)

    def forward(
        self,
        x: Tensor,
        mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        state: dict[str, Tensor] | None = None,
        return_state: bool = False,
    ) -> Tensor:
        """Return the output, of x's shape [batch, length, hidden_size]. Raises ValueError for a state: there is none."""
        if state is not None or return_state:
            raise ValueError(
                "metala_bidirectional sees both directions and has no state to decode from: call it without state and "
                "return_state, or use the mixer metala"
            )
        if self.conv is not None:
            x, _ = self.conv(x, mask, cu_seqlens)
        q = self.q_proj(x).unflatten(-1, (-1, self.head_dim_q))
        v = self.v_proj(x).unflatten(-1, (-1, self.head_dim_v))
        a = with_decay(self.a_proj(x), self.decay, x).unflatten(-1, (-1, self.head_dim_k))
        log_decay, k = without_padding(mask, *decay_and_key(a))
        real_query, key = q[..., : self.head_dim_k], k  # of the self-augmentation
        if self.frequency_offset is not None:
            angle = hippo_angles(self.frequency_offset, self.head_index, self._heads, self.options)
            cos, sin = rotation(angle, v, mask, cu_seqlens)
            q, k = rotate(q, cos, sin), torch.cat([k * cos, k * sin], -1)
            log_decay = torch.cat([log_decay, log_decay], -1)
        scale = self.head_dim_k**-0.5 if self.options.preset == "released" else 1.0
        group = context_parallel_group()
        if group is None:
            o = two_scans(q, k, v, log_decay, scale, cu_seqlens)
        else:
            segments = None if cu_seqlens is None else shard_segments(cu_seqlens, x.shape[1], group)
            o = two_scans(q, k, v, log_decay, scale, None if segments is None else segments.cu_seqlens)
            o = o + from_other_ranks(group, q * scale, k, v, log_decay, log_decay, segments).to(o.dtype)
        return self.out_proj(metala_epilogue(o, real_query, key, v, self.aug_weight, self.gate_proj(x)))

    def flops_per_token(self, length: int) -> int:
        """Return forward FLOPs per token, two per multiply-add, with both recurrences in chunks of 64 tokens."""
        size, heads, dim_q, dim_v = self._size, self._heads, self.head_dim_q, self.head_dim_v
        convolution = 2 * size * self.options.conv_kernel if self.conv is not None else 0
        projections = 7 * size * size + 2 * size * heads * dim_q
        return projections + convolution + 2 * heads * flops_per_head(length, dim_q, dim_v)
