"""Softmax attention: rotary positions, grouped queries, a key-value cache. The baseline of the linear mixers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.bias import causal_lower_right

from ..backend import replaceable
from ..layers.projections import FusedProjections, apply_each, linear
from ..operators.attention_over_ranks import attention_over_ranks, whole
from ..operators.context_parallel import ContextParallelGroup, context_parallel_group, refuse_state
from ..operators.varlen import check_packed, segment_starts
from ..options import ModelShape, option, require_at_least, require_divisor


@dataclass(frozen=True)
class AttentionOptions:
    """Hold the settings of the attention mixer."""

    num_kv_heads: int | None = option(None, "Heads of keys and values; null: as many as queries (model.num_heads).")
    rotary_pct: float = option(1.0, "Fraction of each head's channels with rotary positions; 0: no positions.")
    rotary_base: float = option(10000.0, "Base of the rotary wavelengths.")
    bias: bool = option(False, "Biases in the four projections.")
    causal: bool = option(True, "true: a token attends to itself and earlier tokens only. false: to all.")

    def __post_init__(self) -> None:
        if not 0 <= self.rotary_pct <= 1:
            raise ValueError(f"model.mixer_options.attention.rotary_pct = {self.rotary_pct}: must be between 0 and 1")
        require_at_least("attention", self, 1, "num_kv_heads")


class Attention(nn.Module):
    """Compute softmax(q k^T / sqrt(head_dim)) v per head, Vaswani et al. 2017.

    Rotary positions: Su et al. 2021 (arXiv 2104.09864), in the half-split layout of GPT-NeoX. Grouped queries: Ainslie et al.
    2023 (arXiv 2305.13245).
    """

    Options = AttentionOptions
    state_size: ClassVar[str] = "2 d * kv_heads / heads per token seen"
    supports_context_parallel: ClassVar[bool] = True
    tensor_parallel_plan: ClassVar[dict[str, str]] = {
        "q_proj": "column",
        "k_proj": "column",
        "v_proj": "column",
        "out_proj": "row",
    }
    project_inputs_is_entry: ClassVar[bool] = True
    parameter_kinds: ClassVar[dict[str, str]] = {}

    def __init__(self, config: ModelShape, layer_index: int, options: AttentionOptions) -> None:
        super().__init__()
        size = config.hidden_size
        self.options = options
        self.head_dim = size // config.num_heads
        self.rotary_dim = int(self.head_dim * options.rotary_pct) // 2 * 2
        kv_size = self.head_dim * (options.num_kv_heads or config.num_heads)
        self.q_proj = linear(config, size, size, bias=options.bias)
        self.k_proj = linear(config, size, kv_size, bias=options.bias)
        self.v_proj = linear(config, size, kv_size, bias=options.bias)
        self.out_proj = linear(config, size, size, bias=options.bias, output=True)
        self.project_inputs: FusedProjections = apply_each
        # An attribute, so that a trainer can replace it.
        self.dot_product: Callable[[Tensor, Tensor, Tensor, Tensor | None, bool], Tensor] = dot_product
        self._size, self._kv_size = size, kv_size

    @staticmethod
    def check(config: ModelShape, options: AttentionOptions) -> None:
        """Raise ValueError if num_kv_heads does not divide model.num_heads."""
        if options.num_kv_heads is not None:
            key = "model.mixer_options.attention.num_kv_heads"
            require_divisor(key, options.num_kv_heads, "model.num_heads", config.num_heads)

    @staticmethod
    def sharded_sizes(config: ModelShape, options: AttentionOptions) -> dict[str, int]:
        """Return num_kv_heads: tensor parallelism also splits the heads of keys and values."""
        return {"model.mixer_options.attention.num_kv_heads": options.num_kv_heads or config.num_heads}

    def forward(
        self,
        x: Tensor,
        mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        state: dict[str, Tensor] | None = None,
        return_state: bool = False,
    ) -> Tensor | tuple[Tensor, dict[str, Tensor]]:
        """Compute the layer.

        The state is "key" (rotated) and "value" [batch, seen, kv_heads, head_dim] and "mask" [batch, seen] bool; with
        cu_seqlens one row per segment, padded on the right. Raises ValueError for a state if not causal.
        """
        if not self.options.causal and (state is not None or return_state):
            raise ValueError(
                "attention with model.mixer_options.attention.causal = false sees both directions and has no state to decode "
                "from: call it without state and return_state, or set causal = true"
            )
        group = context_parallel_group()
        if group is not None:
            if state is not None or return_state:
                refuse_state()
            return self._over_ranks(group, x, mask, cu_seqlens)
        if cu_seqlens is not None:
            return self._packed(x, mask, cu_seqlens, state, return_state)
        q, k, v = self._project(x)
        o, new_state = self._attend(q, k, v, mask, state, return_state)
        y = self.out_proj(o.flatten(-2))
        return (y, new_state) if return_state else y

    def _project(self, x: Tensor) -> list[Tensor]:
        """Return q, k and v [batch, length, heads, head_dim] before rotation."""
        projected = self.project_inputs(x, (self.q_proj, self.k_proj, self.v_proj))
        return [y.unflatten(-1, (-1, self.head_dim)) for y in projected]

    def _over_ranks(
        self, group: ContextParallelGroup, x: Tensor, mask: Tensor | None, cu_seqlens: Tensor | None
    ) -> Tensor:
        """Compute `forward` of the local shard of a sequence."""
        q, k, v = self._project(x)
        length = x.shape[1]
        real = None if mask is None else whole(group, mask)
        if self.rotary_dim:
            # Positions count real tokens of the segment.
            counted = q.new_ones(1, length * group.count, dtype=torch.bool) if real is None else real
            position = counted.cumsum(1) - 1
            if cu_seqlens is not None:
                segment, _ = segment_starts(cu_seqlens, length * group.count)
                position = position - F.pad(position + 1, (1, 0))[:, cu_seqlens[:-1].long()][:, segment]
            own = position[:, group.index * length : (group.index + 1) * length]
            cos, sin = _rotary(own, self.rotary_dim, self.options.rotary_base)
            q, k = _rotate(q, cos, sin), _rotate(k, cos, sin)
        o = attention_over_ranks(
            group, q, k, v, real, cu_seqlens, causal=self.options.causal, dot_product=self.dot_product
        )  # fmt: skip
        return self.out_proj(o.flatten(-2))

    def _packed(
        self,
        x: Tensor,
        mask: Tensor | None,
        cu_seqlens: Tensor,
        state: dict[str, Tensor] | None,
        return_state: bool,
    ) -> Tensor | tuple[Tensor, dict[str, Tensor]]:
        """Compute `forward` of packed segments: each becomes a row, padded on the right."""
        check_packed(x, cu_seqlens)
        starts, ends = cu_seqlens[:-1].long(), cu_seqlens[1:].long()
        lengths = ends - starts
        if x.shape[1] and state is None and not return_state:
            # Batches of a fixed shape may end with empty segments, which need no row.
            starts, lengths = starts[lengths > 0], lengths[lengths > 0]
        place = torch.arange(int(lengths.max()), device=x.device)
        token = place < lengths[:, None]
        index = torch.where(token, starts[:, None] + place, 0)
        q, k, v = (p[0][index] for p in self._project(x))
        real = token if mask is None else token & mask[0][index]
        o, new_state = self._attend(q, k, v, real, state, return_state)
        y = self.out_proj(o.flatten(-2)[token][None])
        return (y, new_state) if return_state else y

    def _attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor | None,
        state: dict[str, Tensor] | None,
        return_state: bool,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return o in q's shape, and the new state. q, k, v: [batch, length, heads, head_dim] before rotation."""
        batch, length = q.shape[:2]
        plain = mask is None and not state
        real = torch.ones(batch, length, dtype=torch.bool, device=q.device) if mask is None else mask
        seen_mask = state["mask"] if state else real[:, :0]
        past = seen_mask.shape[1]
        if self.rotary_dim:
            # Positions count real tokens, so that padding shifts nothing.
            position = real.cumsum(1) - 1 + seen_mask.sum(1, keepdim=True)
            cos, sin = _rotary(position, self.rotary_dim, self.options.rotary_base)
            q, k = _rotate(q, cos, sin), _rotate(k, cos, sin)
        if state:
            k, v = torch.cat([state["key"], k], 1), torch.cat([state["value"], v], 1)
        keys_real = torch.cat([seen_mask, real], 1)
        allowed = None if plain else self._allowed(keys_real, length, past)
        grouped = q.shape[2] // k.shape[2]
        expand = [t.repeat_interleave(grouped, 2) if grouped > 1 else t for t in (k, v)]
        o = self.dot_product(
            q.transpose(1, 2),
            expand[0].transpose(1, 2),
            expand[1].transpose(1, 2),
            allowed,
            plain and self.options.causal,
        ).transpose(1, 2)
        return o, {"key": k, "value": v, "mask": keys_real} if return_state else {}

    def _allowed(self, keys_real: Tensor, length: int, past: int) -> Tensor:
        """Return which keys a query may attend to, [batch, 1, length, past + length] bool."""
        key = torch.arange(past + length, device=keys_real.device)
        query = torch.arange(length, device=keys_real.device)[:, None] + past
        seen = keys_real[:, None, :]
        if self.options.causal:
            seen = seen & (key <= query)
        # A padded query attends to itself: some kernels return nan for a softmax over no key, and nan reaches the gradients.
        return (seen | (key == query))[:, None]

    def flops_per_token(self, length: int) -> int:
        """Return forward FLOPs per token, two per multiply-add. If causal, half of the scores and values count."""
        projections = 4 * self._size * self._size + 4 * self._size * self._kv_size
        return projections + (2 if self.options.causal else 4) * self._size * length


@replaceable
def dot_product(q: Tensor, k: Tensor, v: Tensor, allowed: Tensor | None, is_causal: bool) -> Tensor:
    """Return softmax(q k^T / sqrt(head_dim)) v for q, k, v [batch, heads, length, head_dim].

    allowed: bool, broadcastable to [batch, heads, query length, key length]; None if is_causal or without a mask.
    is_causal: the last query and the last key are one token; there may be more keys than queries.
    """
    if is_causal and q.shape[2] != k.shape[2]:
        allowed, is_causal = causal_lower_right(q.shape[2], k.shape[2]), False
    return F.scaled_dot_product_attention(q, k, v, attn_mask=allowed, is_causal=is_causal)


def _rotary(position: Tensor, dim: int, base: float) -> tuple[Tensor, Tensor]:
    """Return cos and sin, [batch, length, 1, dim / 2] in float32, for position [batch, length]."""
    frequency = base ** (-torch.arange(0, dim, 2, dtype=torch.float32, device=position.device) / dim)
    angle = position.clamp_min(0)[:, :, None, None].float() * frequency
    return angle.cos(), angle.sin()


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the first channels of every head, in pairs (c, c + dim / 2). Computed in float32, returned in x's dtype."""
    half = cos.shape[-1]
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    rotated = [first * cos - second * sin, second * cos + first * sin]
    return torch.cat([*(t.to(x.dtype) for t in rotated), rest], -1)
