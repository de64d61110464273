"""Softmax attention: rotary positions, grouped queries, sliding window, a key-value cache. The baseline of linear mixers."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..layers.projections import FusedProjections, apply_each, linear
from ..operators.context_parallel import ContextParallelGroup, context_parallel_group, refuse_state
from ..operators.dot_product import (
    DotProduct,
    attention_over_ranks,
    dot_product,
    for_each_query_head,
    gather_sequence,
    packed_flash_attention,
    supports_flash,
)
from ..operators.rotary import Yarn, check_pairs, check_yarn, rotary, rotate
from ..operators.varlen import check_packed, segment_starts
from ..options import ModelShape, option, require_at_least, require_divisor
from ..precision import accumulation_dtype
from ..recompute import recomputable

_KEY = "model.mixer_options.attention"


@dataclass(frozen=True)
class AttentionOptions:
    """Hold the settings of the attention mixer."""

    head_dim: int | None = option(None, "Channels per head; null: model.hidden_size / model.num_heads.")
    num_kv_heads: int | None = option(None, "Heads of keys and values; null: as many as queries (model.num_heads).")
    rotary_pct: float = option(1.0, "Fraction of each head's channels with rotary positions; 0: no positions (NoPE).")
    rotary_base: float = option(10000.0, "Base of the rotary wavelengths.")
    nope_layers: tuple[int, ...] = option((), "Layers without rotary positions (NoPE), counted from 0.")
    yarn_factor: float | None = option(
        None, "YaRN (arXiv 2309.00071): the context is this many times yarn_original_length. null: no YaRN."
    )
    yarn_original_length: int | None = option(None, "Tokens of the context before YaRN; needed with yarn_factor.")
    yarn_beta_fast: float = option(32.0, "YaRN keeps frequencies with more rotations than this in the original length.")
    yarn_beta_slow: float = option(1.0, "YaRN divides frequencies with fewer rotations than this by yarn_factor.")
    yarn_attention_factor: float | None = option(
        None, "Factor of the rotated channels of queries and keys with YaRN. null: 0.1 ln(yarn_factor) + 1."
    )
    window: int | None = option(
        None, "Sliding window: a token attends to itself and window - 1 earlier tokens. null: to all earlier tokens."
    )
    full_layers: tuple[int, ...] = option((), "Layers without the window of the others, counted from 0.")
    qk_norm: bool = option(False, "RMSNorm with a learned gain per head on queries and keys, before the rotation.")
    output_gate: bool = option(False, "Multiply the output before its projection by sigmoid(W x), per channel.")
    bias: bool = option(False, "Biases in the projections.")
    causal: bool = option(True, "true: a token attends to itself and earlier tokens only. false: to all.")

    def __post_init__(self) -> None:
        if not 0 <= self.rotary_pct <= 1:
            raise ValueError(f"{_KEY}.rotary_pct = {self.rotary_pct}: must be between 0 and 1")
        if not 1 < self.rotary_base < inf:
            raise ValueError(f"{_KEY}.rotary_base = {self.rotary_base}: must be above 1 and finite; 10000 is common")
        require_at_least("attention", self, 1, "head_dim", "num_kv_heads", "yarn_original_length")
        if self.window is not None and self.window < 1:
            raise ValueError(
                f"{_KEY}.window = {self.window}: must be at least 1; set null to attend to all earlier tokens"
            )
        if self.window is not None and not self.causal:
            raise ValueError(f"{_KEY}.window = {self.window} with causal = false: set causal = true, or remove window")
        if self.full_layers and self.window is None:
            raise ValueError(
                f"{_KEY}.full_layers = {list(self.full_layers)} needs window: set it, or remove full_layers"
            )
        if self.nope_layers and not self.rotary_pct:
            raise ValueError(
                f"{_KEY}.nope_layers = {list(self.nope_layers)} with rotary_pct = 0, which has no rotary positions in any layer: "
                "set rotary_pct, or remove nope_layers"
            )
        check_yarn(self)

    @property
    def yarn(self) -> Yarn | None:
        """Return the settings of YaRN, None without it."""
        if self.yarn_factor is None or self.yarn_original_length is None:
            return None
        return Yarn(
            self.yarn_factor,
            self.yarn_original_length,
            self.yarn_beta_fast,
            self.yarn_beta_slow,
            self.yarn_attention_factor,
        )


class Attention(nn.Module):
    """Compute softmax(q k^T / sqrt(head_dim)) v per head, Vaswani et al. 2017.

    Rotary positions: Su et al. 2021 (arXiv 2104.09864), in the half-split layout of GPT-NeoX. Grouped queries: Ainslie et al.
    2023 (arXiv 2305.13245). Sliding window: Beltagy et al. 2020 (arXiv 2004.05150), counted as in Mistral 7B (arXiv
    2310.06825). QK-norm: Qwen3 (arXiv 2505.09388). Output gate: Qiu et al. 2025 (arXiv 2505.06708).
    """

    Options = AttentionOptions
    state_size: ClassVar[str] = "2 d * kv_heads / heads per token seen, at most window - 1"
    supports_context_parallel: ClassVar[bool] = True
    fp8_projections: ClassVar[tuple[str, ...]] = ("q_proj", "k_proj", "v_proj", "out_proj")
    # Every tensor-parallel rank uses the whole gains, and its heads compute a part of their gradients.
    tensor_parallel_plan: ClassVar[dict[str, str]] = {
        "q_proj": "column",
        "k_proj": "column",
        "v_proj": "column",
        "gate_proj": "column",
        "q_norm_weight": "partial_grad",
        "k_norm_weight": "partial_grad",
        "out_proj": "row",
    }
    project_inputs_is_entry: ClassVar[bool] = True
    parameter_kinds: ClassVar[dict[str, str]] = {"q_norm_weight": "norm", "k_norm_weight": "norm"}

    def __init__(self, config: ModelShape, layer_index: int, options: AttentionOptions) -> None:
        super().__init__()
        size = config.hidden_size
        self.options = options
        self.head_dim = options.head_dim or size // config.num_heads
        self.window = None if layer_index in options.full_layers else options.window
        rotary_pct = 0.0 if layer_index in options.nope_layers else options.rotary_pct
        self.rotary_dim = int(self.head_dim * rotary_pct) // 2 * 2
        q_size, kv_size = self.head_dim * config.num_heads, self.head_dim * (options.num_kv_heads or config.num_heads)
        self.q_proj = linear(config, size, q_size, bias=options.bias)
        self.k_proj = linear(config, size, kv_size, bias=options.bias)
        self.v_proj = linear(config, size, kv_size, bias=options.bias)
        self.gate_proj = linear(config, size, q_size, bias=options.bias) if options.output_gate else None
        self.q_norm_weight = nn.Parameter(torch.ones(self.head_dim)) if options.qk_norm else None
        self.k_norm_weight = nn.Parameter(torch.ones(self.head_dim)) if options.qk_norm else None
        self.out_proj = linear(config, q_size, size, bias=options.bias, output=True)
        self.project_inputs: FusedProjections = apply_each
        # An attribute, so that a trainer can replace it.
        self.dot_product: DotProduct = dot_product
        self._q_size, self._norm_eps = q_size, config.norm_eps
        self._matmuls = size * ((3 if options.output_gate else 2) * q_size + 2 * kv_size)

    @staticmethod
    def check(config: ModelShape, options: AttentionOptions) -> None:
        """Raise ValueError for wrong kv heads, a rotary_pct below one pair of channels, or exceptions of no or every layer."""
        if options.num_kv_heads is not None:
            require_divisor(f"{_KEY}.num_kv_heads", options.num_kv_heads, "model.num_heads", config.num_heads)
        check_pairs(options.rotary_pct, options.head_dim or config.hidden_size // config.num_heads)
        layers = [i for i in range(config.num_layers) if config.mixer_of(i) == "attention"]
        for key, rule in (("nope_layers", "yarn_factor"), ("full_layers", "window")):
            exempt, value = getattr(options, key), getattr(options, rule)
            if others := [layer for layer in exempt if layer not in layers]:
                raise ValueError(f"{_KEY}.{key}: layer {others[0]} has no attention; allowed are {layers}")
            if value is not None and layers and len(set(exempt)) == len(layers):
                raise ValueError(
                    f"{_KEY}.{rule} = {value}: {key} exempts every layer; remove {rule}, or layers of {key}"
                )

    @staticmethod
    def sharded_sizes(config: ModelShape, options: AttentionOptions) -> dict[str, int]:
        """Return num_kv_heads: tensor parallelism also splits the heads of keys and values."""
        return {f"{_KEY}.num_kv_heads": options.num_kv_heads or config.num_heads}

    def forward(
        self,
        x: Tensor,
        mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        state: dict[str, Tensor] | None = None,
        return_state: bool = False,
    ) -> Tensor | tuple[Tensor, dict[str, Tensor]]:
        """Compute the layer.

        The state is "key" (rotated) and "value" [batch, seen, kv_heads, head_dim], "mask" [batch, seen] bool, absent if nothing
        is padded, and "seen" [batch, 1], the number of real tokens; with cu_seqlens one row per segment, padded on the right.
        With a window it has the last window - 1 real tokens, padded on the left. Raises ValueError for a state if not causal.
        """
        if not self.options.causal and (state is not None or return_state):
            raise ValueError(
                "attention with model.mixer_options.attention.causal = false sees both directions and has no state to decode "
                "from: call it without state and return_state, or set causal = true"
            )
        group = context_parallel_group()
        if group is not None and (state is not None or return_state):
            refuse_state()
        q, k, v, *gate = self._project(x)
        new_state: dict[str, Tensor] = {}
        if group is not None:
            o = self._over_ranks(group, q, k, v, mask, cu_seqlens)
        elif cu_seqlens is not None:
            check_packed(x, cu_seqlens)
            o, new_state = self._packed(q, k, v, mask, cu_seqlens, state, return_state)
        else:
            o, new_state = self._attend(q, k, v, mask, state, return_state)
        o = o.flatten(-2)
        if gate:
            attended, o = o, _gated(o, *gate)
            recomputable(o, _gated, attended, *gate)
        y = self.out_proj(o)
        return (y, new_state) if return_state else y

    def _project(self, x: Tensor) -> list[Tensor]:
        """Return q, k and v [batch, length, heads, head_dim] before rotation, and the logits of the output gate if any."""
        gates = () if self.gate_proj is None else (self.gate_proj,)
        q, k, v, *gate = self.project_inputs(x, (self.q_proj, self.k_proj, self.v_proj, *gates))
        q, k, v = (y.unflatten(-1, (-1, self.head_dim)) for y in (q, k, v))
        if self.q_norm_weight is not None:
            q = F.rms_norm(q, (self.head_dim,), self.q_norm_weight, self._norm_eps)
            k = F.rms_norm(k, (self.head_dim,), self.k_norm_weight, self._norm_eps)
        return [q, k, v, *gate]

    def _rotate(self, position: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
        """Return the inputs [batch, length, heads, head_dim] rotated by their positions [batch, length]."""
        dtype = accumulation_dtype(inputs[0])
        cos, sin = rotary(position, self.rotary_dim, self.options.rotary_base, dtype, self.options.yarn)
        return tuple(rotate(x, cos, sin) for x in inputs)

    def _over_ranks(
        self,
        group: ContextParallelGroup,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor | None,
        cu_seqlens: Tensor | None,
    ) -> Tensor:
        """Return o of the local shard of a sequence."""
        length = q.shape[1]
        real = None if mask is None else gather_sequence(group, mask)
        if self.rotary_dim:
            # Positions count real tokens of the segment.
            counted = q.new_ones(1, length * group.count, dtype=torch.bool) if real is None else real
            position = counted.cumsum(1) - 1
            if cu_seqlens is not None:
                segment, _ = segment_starts(cu_seqlens, length * group.count)
                position = position - F.pad(position + 1, (1, 0))[:, cu_seqlens[:-1].long()][:, segment]
            q, k = self._rotate(position[:, group.index * length : (group.index + 1) * length], q, k)
        causal, implementation = self.options.causal, self.dot_product
        return attention_over_ranks(
            group, q, k, v, real, cu_seqlens, causal=causal, window=self.window, implementation=implementation
        )

    def _packed(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor | None,
        cu_seqlens: Tensor,
        state: dict[str, Tensor] | None,
        return_state: bool,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return o and the new state of packed segments: each becomes a row, padded on the right."""
        starts, ends = cu_seqlens[:-1].long(), cu_seqlens[1:].long()
        lengths = ends - starts
        stateless = state is None and not return_state
        if mask is None and stateless and self.dot_product is dot_product and supports_flash(q):
            if self.rotary_dim:
                segment, _ = segment_starts(cu_seqlens, q.shape[1])
                q, k = self._rotate((torch.arange(q.shape[1], device=q.device) - starts[segment])[None], q, k)
            k, v = for_each_query_head(k, q), for_each_query_head(v, q)
            bounds = (cu_seqlens, q.shape[1])
            o = packed_flash_attention(
                q[0], k[0], v[0], bounds, bounds, is_causal=self.options.causal, window=self.window
            )
            return o[None], {}
        if q.shape[1] and stateless:
            # Batches of a fixed shape may end with empty segments, which need no row.
            starts, lengths = starts[lengths > 0], lengths[lengths > 0]
        place = torch.arange(int(lengths.max()), device=q.device)
        token = place < lengths[:, None]
        index = torch.where(token, starts[:, None] + place, 0)
        real: Tensor | None = token if mask is None else token & mask[0][index]
        if mask is None and stateless and self.options.causal:
            real = None  # no token reads the padding on its right
        o, new_state = self._attend(q[0][index], k[0][index], v[0][index], real, state, return_state)
        return o[token][None], new_state

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
        real = torch.ones(batch, length, dtype=torch.bool, device=q.device) if mask is None else mask
        seen = state["seen"] if state else torch.zeros(batch, 1, dtype=torch.int64, device=q.device)
        if self.rotary_dim:
            # Positions count real tokens, so that padding shifts nothing. Without padding all sequences have the same ones.
            position = real.cumsum(1) - 1 + seen
            q, k = self._rotate(position if state or mask is not None else position[:1], q, k)
        if state and "used" in state:
            if length != 1 or mask is not None:
                raise ValueError(
                    f"{length} tokens: a preallocated state takes one token per step, without mask or cu_seqlens"
                )
            return self._one_token(q, k, v, state)
        keys_real = mask
        if state:
            past = state["key"]
            k, v = torch.cat([past, k], 1), torch.cat([state["value"], v], 1)
            if mask is not None or "mask" in state:
                keys_real = torch.cat([state.get("mask", real.new_ones(past.shape[:2])), real], 1)
        # A long text that is read in parts needs no mask of all pairs. One token needs no wait for the device.
        plain = keys_real is None or (mask is None and length > 1 and bool(keys_real.all()))
        allowed = None if plain or keys_real is None else self._allowed(keys_real, length)
        if state and length == 1:
            o = self._of_groups(q, k, v, allowed)
        else:
            o = self.dot_product(
                q.transpose(1, 2),
                for_each_query_head(k, q).transpose(1, 2),
                for_each_query_head(v, q).transpose(1, 2),
                allowed,
                plain and self.options.causal,
                self.window,
            ).transpose(1, 2)
        if not return_state:
            return o, {}
        new_state = {"key": k, "value": v} if keys_real is None else {"key": k, "value": v, "mask": keys_real}
        if self.window is not None:
            new_state.setdefault("mask", real)
            new_state = _last_real(new_state, self.window - 1, padded=mask is not None)
        return o, {**new_state, "seen": seen + real.sum(1, keepdim=True)}

    def preallocate(self, state: dict[str, Tensor], tokens: int) -> dict[str, Tensor]:
        """Return a state that can hold this many more tokens, for steps of one unpadded token each that update it in place.

        "used" [1] is the number of places that the cache has filled. A window does not grow: its state is returned.
        """
        if self.window is not None:
            return state
        places = state["key"].shape[1]
        # Attention kernels read masks of 16 keys at a time.
        free = -(-(places + tokens) // 64) * 64 - places
        mask = state.get("mask", torch.ones_like(state["key"][..., 0, 0], dtype=torch.bool))
        enlarged = {name: F.pad(state[name], (0, 0, 0, 0, 0, free)) for name in ("key", "value")}
        used = torch.tensor([places], device=mask.device)
        return {**state, **enlarged, "mask": F.pad(mask, (0, free)), "used": used}

    def _one_token(self, q: Tensor, k: Tensor, v: Tensor, state: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        """Return o of one token, whose key and value are written into a state of `preallocate`, and the new state."""
        for name, x in (("key", k), ("value", v)):
            state[name].index_copy_(1, state["used"], x)
        state["mask"].index_fill_(1, state["used"], True)
        o = self._of_groups(q, state["key"], state["value"], state["mask"][:, None, None])
        return o, {**state, "seen": state["seen"] + 1, "used": state["used"] + 1}

    def _of_groups(self, q: Tensor, k: Tensor, v: Tensor, allowed: Tensor | None) -> Tensor:
        """Return o of one token. The heads of a group are queries of its key head, so that no key is copied for them."""
        grouped = q.reshape(len(q), k.shape[2], -1, self.head_dim)
        return self.dot_product(grouped, k.transpose(1, 2), v.transpose(1, 2), allowed, False, None).reshape(q.shape)

    def _allowed(self, keys_real: Tensor, length: int) -> Tensor:
        """Return which keys the last `length` tokens may attend to, [batch, 1, length, keys] bool.

        keys_real: [batch, keys], True for real tokens. A window counts real tokens.
        """
        key = torch.arange(keys_real.shape[1], device=keys_real.device)
        query = key[-length:, None] if length else key[:0, None]
        seen = keys_real[:, None, :]
        if self.options.causal:
            seen = seen & (key <= query)
        if self.window is not None:
            count = keys_real.cumsum(1)
            seen = seen & (count[:, query] - count[:, None, :] < self.window)
        # A padded query attends to itself: some kernels return nan for a softmax over no key, and nan reaches the gradients.
        return (seen | (key == query))[:, None]

    def flops_per_token(self, length: int) -> int:
        """Return forward FLOPs per token, two per multiply-add. If causal, half of the scores and values count.

        With a window w the mean over the tokens is w - w^2 / (2 length) keys.
        """
        if not self.options.causal:
            return 2 * self._matmuls + 4 * self._q_size * length
        window = length if self.window is None else min(self.window, length)
        scores = 4 * self._q_size * window - 2 * self._q_size * window * window // max(length, 1)
        return 2 * self._matmuls + scores


def _gated(o: Tensor, logits: Tensor) -> Tensor:
    return o * logits.sigmoid()


def _last_real(state: dict[str, Tensor], count: int, *, padded: bool) -> dict[str, Tensor]:
    """Return the last `count` real tokens of every row of [batch, tokens, ...], with padding on the left.

    padded: padding may be among or behind the real tokens; otherwise it is before them.
    """
    if padded:
        order = state["mask"].int().argsort(dim=1, stable=True)
        row = torch.arange(len(order), device=order.device)[:, None]
        state = {name: x[row, order] for name, x in state.items()}
    # Negative padding removes tokens, and copies the others.
    size = count - state["mask"].shape[1]
    return {name: F.pad(x, (*(0, 0) * (x.dim() - 2), size, 0)) for name, x in state.items()}
