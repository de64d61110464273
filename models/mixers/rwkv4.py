"""RWKV-4 (arXiv 2305.13048): an average of the values weighted by exponential keys, with one fixed decay per channel."""

from __future__ import annotations

from dataclasses import dataclass
from math import log
from typing import ClassVar

import torch
from torch import Tensor, nn

from ..layers.projections import linear
from ..operators.context_parallel import (
    ContextParallelGroup,
    ShardSegments,
    all_gather_states,
    context_parallel_group,
    refuse_state,
    shard_segments,
    zeros_with_grad,
)
from ..operators.cumulative_decay import running_sum
from ..operators.scan.linear_scan import local_scan
from ..operators.varlen import last, previous, segment_starts, token_shift
from ..options import ModelShape
from ..precision import to_accumulation_dtype

# The logarithm of a zero weight. It is finite, so that a difference of two is not nan.
_LOG_ZERO = -1e30


@dataclass(frozen=True)
class RWKV4Options:
    """RWKV-4 has no settings."""


class RWKV4(nn.Module):
    """Compute the time mixing of Peng et al. 2023, section 3.1, with the token shift on its three inputs.

    r, k, v = W (mu x_t + (1 - mu) x_{t-1}); y_t = W_O(sigmoid(r_t) wkv_t);
    wkv_t = (sum_{i<t} e^{-(t-1-i) w + k_i} v_i + e^{u + k_t} v_t) / (the same without v), w = exp(decay) > 0.
    Weights are stored relative to their running maximum (appendix D). The MLP of the block replaces the paper's channel
    mixing, without token shift and receptance.
    """

    Options = RWKV4Options
    state_size: ClassVar[str] = "3 d float32 and d"
    supports_context_parallel: ClassVar[bool] = True
    fp8_projections: ClassVar[tuple[str, ...]] = ("k_proj", "v_proj", "out_proj")
    # The token shift begins the parallel region, and all columns of the projections read it.
    tensor_parallel_plan: ClassVar[dict[str, str]] = {
        "mix_r": "partial_grad",
        "mix_k": "partial_grad",
        "mix_v": "partial_grad",
        "r_proj": "column",
        "k_proj": "column",
        "v_proj": "column",
        "decay": "heads",
        "bonus": "heads",
        "out_proj": "row",
    }
    parameter_kinds: ClassVar[dict[str, str]] = {
        "mix_r": "norm",
        "mix_k": "norm",
        "mix_v": "norm",
        "decay": "decay",
        "bonus": "decay",
    }

    def __init__(self, config: ModelShape, layer_index: int, options: RWKV4Options) -> None:
        super().__init__()
        size = config.hidden_size
        # Appendix E: deeper layers mix more of the previous token; later channels decay more slowly.
        depth = layer_index / max(1, config.num_layers - 1)
        falling = 1 - layer_index / config.num_layers
        channel = torch.arange(size, dtype=torch.float32)
        place = channel / size
        self.mix_k = nn.Parameter(place**falling)
        self.mix_v = nn.Parameter(place**falling + 0.3 * depth)
        self.mix_r = nn.Parameter(place ** (0.5 * falling))
        self.decay = nn.Parameter(-5 + 8 * (channel / max(1, size - 1)) ** (0.7 + 1.3 * depth))
        self.bonus = nn.Parameter(0.5 * ((channel + 1) % 3 - 1) + log(0.3))
        self.r_proj = linear(config, size, size)
        self.k_proj = linear(config, size, size)
        self.v_proj = linear(config, size, size)
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
        """Compute the layer.

        The state is "shift" [batch, hidden_size], the last input, and "recurrent" [batch, 3, hidden_size] in float32.
        Its third row is the largest log weight m; the first two are numerator and denominator divided by exp(m).
        """
        state = state or {}
        shifted, shift = token_shift(x, mask, cu_seqlens, state.get("shift"))
        r, k, v = (
            proj(shifted + mix.to(x.dtype) * (x - shifted))
            for proj, mix in ((self.r_proj, self.mix_r), (self.k_proj, self.mix_k), (self.v_proj, self.mix_v))
        )
        wkv, recurrent = _wkv(
            to_accumulation_dtype(k),
            to_accumulation_dtype(v),
            to_accumulation_dtype(self.decay).exp(),
            to_accumulation_dtype(self.bonus),
            mask,
            cu_seqlens,
            state.get("recurrent"),
            v.dtype,
        )
        y = self.out_proj((to_accumulation_dtype(r).sigmoid() * wkv).to(v.dtype))
        return (y, {"shift": shift, "recurrent": recurrent}) if return_state else y

    def flops_per_token(self, length: int) -> int:
        """Return forward FLOPs per token, two per multiply-add."""
        return 8 * self._size * self._size + 20 * self._size


def _wkv(
    k: Tensor,
    v: Tensor,
    w: Tensor,
    u: Tensor,
    mask: Tensor | None,
    cu_seqlens: Tensor | None,
    state: Tensor | None,
    compute_dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """Return wkv in v's shape and the new state.

    k, v: [batch, length, channels]; w, u: [channels]; state: [batch or segments, 3, channels]. The quotient does not depend on
    the scale exp(m_t), m_t = max(k_t, m_{t-1} - w), so m_t needs no gradient.
    """
    group, segments = context_parallel_group(), None
    if group is not None:
        if state is not None:
            refuse_state()
        if cu_seqlens is not None:
            segments = shard_segments(cu_seqlens, k.shape[1], group)
            cu_seqlens = segments.cu_seqlens
    step = w.expand_as(k)
    if mask is not None:
        padding = ~mask.unsqueeze(-1)
        step, k = step.masked_fill(padding, 0.0), k.masked_fill(padding, _LOG_ZERO)
    numerator, denominator, largest = (None, None, None) if state is None else state.to(k.dtype).unbind(1)
    if largest is None:
        sequences = k.shape[0] if cu_seqlens is None else len(cu_seqlens) - 1
        largest = k.new_full((sequences, k.shape[2]), _LOG_ZERO)
    with torch.no_grad():
        m = _running_maximum(k, step, largest, cu_seqlens)
        m_before = previous(m, largest, cu_seqlens)
    weight = (k - m).exp()
    if mask is not None:
        weight = weight.masked_fill(padding, 0.0)
    sums, ends, finals = [], [], []
    for update, initial in ((weight * v, numerator), (weight, denominator)):
        h, final = local_scan(
            update, m_before - step - m, initial_state=initial, cu_seqlens=cu_seqlens, compute_dtype=compute_dtype
        )
        sums.append(previous(h, initial, cu_seqlens))
        ends.append(h[:, -1:])
        finals.append(final)
    with torch.no_grad():
        scale = torch.maximum(m_before, u + k)
    if group is not None:
        log_weight, *incoming = _incoming_sums(group, segments, ends[0], ends[1], m[:, -1:], step)
        scale = torch.maximum(scale, log_weight.detach())
    past, now = (m_before - scale).exp(), (u + k - scale).exp()
    above, below = past * sums[0] + now * v, past * sums[1] + now
    if group is not None:
        weight = (log_weight - scale).exp()
        above, below = above + weight * incoming[0], below + weight * incoming[1]
    return above / below, torch.stack([*finals, last(m, largest, cu_seqlens)], 1)


def _incoming_sums(
    group: ContextParallelGroup,
    segments: ShardSegments | None,
    numerator: Tensor,
    denominator: Tensor,
    m: Tensor,
    step: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the incoming state of the local shard: a log weight [batch, length, channels], a numerator and a denominator.

    As `models.operators.context_parallel.incoming_states`, relative to exp(m).
    numerator, denominator, m: [batch, 1, channels] at the end of the local shard; step: [batch, length, channels].
    """
    decayed = running_sum(step, 1)
    total, none = decayed[:, -1:], m.new_full((), -_LOG_ZERO)
    if segments is not None:
        total = torch.where(segments.from_left[-1], total, none)
    ranks = all_gather_states(group, numerator, denominator, m, total)
    above, below, largest = zeros_with_grad(ranks[0][0]), zeros_with_grad(ranks[0][1]), torch.full_like(m, _LOG_ZERO)
    for numerator_, denominator_, m_, total_ in ranks[: group.index]:
        with torch.no_grad():
            larger = torch.maximum(largest - total_, m_)
        decay, factor = (largest - total_ - larger).exp(), (m_ - larger).exp()
        above, below, largest = decay * above + factor * numerator_, decay * below + factor * denominator_, larger
    elapsed = torch.cat([torch.zeros_like(total), decayed[:, :-1]], 1)
    if segments is not None:
        elapsed = torch.where(segments.from_left[None, :, None], elapsed, none)
    return largest - elapsed, above, below


def _running_maximum(k: Tensor, step: Tensor, largest: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """Return m_t = max(k_t, m_{t-1} - step_t) with m_0 = largest [batch or segments, channels], in log2(length) steps."""
    if cu_seqlens is None:
        m, fall = torch.maximum(k, previous(torch.full_like(k, _LOG_ZERO), largest, None) - step), step
    else:
        segment, first = segment_starts(cu_seqlens, k.shape[1])
        first = first.unsqueeze(-1)
        m = torch.where(first, torch.maximum(k, largest[segment] - step), k)
        fall = torch.where(first, -_LOG_ZERO, step)
    reach = 1
    while reach < k.shape[1]:
        m = torch.cat([m[:, :reach], torch.maximum(m[:, reach:], m[:, :-reach] - fall[:, reach:])], 1)
        fall = torch.cat([fall[:, :reach], fall[:, reach:] + fall[:, :-reach]], 1)
        reach *= 2
    return m
