"""The base of the Transformers models: embedding and blocks, padding, recurrent cache, gradient checkpointing, loading."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import Cache, PreTrainedModel

from ..language_model import layer_specs
from ..layers.embedding import Embedding, look_up
from ..layers.projections import init_std
from .configuration_metalion import MetalionConfig


class TokenEmbedding(Embedding):
    """Return the scaled vectors of tokens without positions. Callers may pass them as `inputs_embeds`."""

    def forward(self, tokens: Tensor, **arguments: Any) -> Any:  # type: ignore[override]
        if arguments:  # called by a `LanguageModel` that has the same layers: with positions
            return super().forward(tokens, **arguments)
        hidden = look_up(tokens, self.weight, None)
        return hidden if self.scale == 1.0 else self.scale * hidden


class MetalionPreTrainedModel(PreTrainedModel):
    """Hold embedding and blocks; a subclass adds the `head`."""

    config_class = MetalionConfig
    base_model_prefix = ""
    supports_gradient_checkpointing = True
    _no_split_modules: ClassVar[list[str]] = ["Block", "ImageBlock"]
    _skip_keys_device_placement: ClassVar[list[str]] = ["past_key_values"]
    _is_stateful = True
    embedding: Any
    head: Any

    def __init__(self, config: MetalionConfig) -> None:
        super().__init__(config)
        self.gradient_checkpointing = False
        model_config = config.model_config()
        self._causal = not model_config.bidirectional_mixers()
        self._specs = {spec.name: spec for spec in layer_specs(model_config)}
        self.embedding = self._specs["embedding"].build()
        if isinstance(self.embedding, Embedding):
            self.embedding.__class__ = TokenEmbedding
        self.blocks = nn.ModuleList(self._specs[f"blocks.{i}"].build() for i in range(config.num_layers))

    def post_init(self) -> None:
        """Save the buffers that the layers built, then run Transformers' `post_init`."""
        self._buffers_built = {n: b.clone() for n, b in self.named_buffers() if b.device.type != "meta"}
        for parameter in self.parameters():
            if parameter.device.type != "meta":
                parameter._is_hf_initialized = True
        super().post_init()

    @torch.no_grad()
    def initialize_weights(self) -> None:
        """Initialise the parameters that a checkpoint lacks, as the layers do when they are built."""
        for name, buffer in self.named_buffers():
            buffer.copy_(self._buffers_built[name])
        for name, spec in self._specs.items():
            layer = self.get_submodule(name)
            missing = {n: p for n, p in layer.named_parameters() if not getattr(p, "_is_hf_initialized", False)}
            if missing and all(parameter.device.type != "meta" for parameter in missing.values()):
                fresh = dict(spec.build().named_parameters())
                for parameter_name, parameter in missing.items():
                    parameter.copy_(fresh[parameter_name])

    def get_input_embeddings(self) -> nn.Module:
        """Return the embedding, whose result may be passed as `inputs_embeds`; its `weight` is [vocab_size, hidden_size]."""
        return self.embedding

    def set_input_embeddings(self, value: nn.Module) -> None:
        """Set the embedding's `weight` [vocab_size, hidden_size] to that of another module."""
        self.embedding.weight = value.weight

    @torch.no_grad()
    def resize_token_embeddings(
        self, new_num_tokens: int | None = None, pad_to_multiple_of: int | None = None, mean_resizing: bool = True
    ) -> nn.Module:
        """Resize the embedding, and the head's matrix if there is one, and return the embedding.

        new_num_tokens: None for the present number. pad_to_multiple_of: the number of rows is rounded up to a multiple.
        Existing rows stay. New rows are their mean, or with mean_resizing False drawn as initial values. Generation never
        samples the rows that only round the number up. Raises ValueError for fewer than one row.
        """
        previous = self.config.vocab_size
        tokens = previous if new_num_tokens is None else new_num_tokens
        multiple = pad_to_multiple_of or 1
        rows = -(-tokens // multiple) * multiple
        if rows < 1:
            raise ValueError(f"new_num_tokens = {new_num_tokens}: must be at least 1")
        std = None if mean_resizing else init_std(self.config.model_config())
        tied = getattr(self.head, "weight", None) is self.embedding.weight
        self.embedding.weight = _resized(self.embedding.weight, rows, std)
        for name in ("weight", "bias"):
            if getattr(self.head, name, None) is not None:
                setattr(self.head, name, _resized(getattr(self.head, name), rows, std))
        if tied:
            self.head.weight = self.embedding.weight
        self.config.vocab_size = rows
        settings = getattr(self, "generation_config", None)
        if settings is not None:
            suppressed = set(settings.suppress_tokens or ())
            end = previous
            while end - 1 in suppressed:  # these padded the embedding
                end -= 1
                suppressed.discard(end)
            settings.suppress_tokens = sorted({t for t in suppressed if t < tokens} | {*range(tokens, rows)}) or None
        return self.embedding

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        # generate() would pass a cache of keys and values to forward, which creates a RecurrentCache instead.
        return False

    def _run(
        self,
        input_ids: Tensor | None,
        attention_mask: Tensor | None,
        inputs_embeds: Tensor | None,
        output_hidden_states: bool | None,
        past_key_values: RecurrentCache | None = None,
        use_cache: bool | None = False,
    ) -> tuple[Tensor, Tensor | None, RecurrentCache | None, tuple[Tensor, ...] | None]:
        """Run embedding and blocks. input_ids: of an image classifier the pixels.

        Returns the hidden states before the last norm, the mask of these positions, the cache, and with
        output_hidden_states the inputs of all blocks and the hidden states after the norm.
        """
        collect = self.config.output_hidden_states if output_hidden_states is None else output_hidden_states
        use_cache = self._uses_cache(use_cache)
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("input_ids and inputs_embeds are both given or both missing: give exactly one of them")
        inputs: Any = input_ids if inputs_embeds is None else inputs_embeds
        cache = past_key_values
        if cache is not None and not isinstance(cache, RecurrentCache):
            raise ValueError(
                f"past_key_values is a {type(cache).__name__}, expected a RecurrentCache: leave it out, or give the "
                "past_key_values that an earlier call of this model returned"
            )
        mask = input_mask = _mask_of(attention_mask, inputs.shape[1], 0 if cache is None else cache.seen)
        order = _real_tokens_first(mask)
        if mask is not None and order is not None:
            rows = torch.arange(len(order), device=order.device)[:, None]
            mask = mask[rows, order]
            if input_ids is not None:
                input_ids = input_ids[rows, order]
            else:
                inputs_embeds = inputs[rows, order]
        if use_cache and cache is None:
            cache = RecurrentCache()
        states = cache.states if cache is not None and cache.states else [None] * (len(self.blocks) + 1)
        hidden, new_state = self._embed(input_ids, inputs_embeds, mask, states[0])
        new_states, collected = [new_state], []
        recompute = self.gradient_checkpointing and self.training
        for block, state in zip(self.blocks, states[1:], strict=True):
            if collect:
                collected.append(hidden[..., : self.config.hidden_size])
            if use_cache:
                hidden, new_state = block(hidden, mask=mask, state=state, return_state=True)
                new_states.append(new_state)
            elif recompute:
                hidden = self._gradient_checkpointing_func(block.__call__, hidden, mask, None, state)
            else:
                hidden = block(hidden, mask=mask, state=state)
        if use_cache and cache is not None:
            cache.states = new_states
            cache.seen += hidden.shape[1]
        if order is not None:
            back = order.argsort(1)
            hidden, *collected = (x[rows.to(x.device), back.to(x.device)] for x in (hidden, *collected))
        hidden_states = (*collected, self.head.norm(hidden)) if collect else None
        return hidden, input_mask, cache if use_cache else None, hidden_states

    def _embed(
        self,
        input_ids: Tensor | None,
        inputs_embeds: Tensor | None,
        mask: Tensor | None,
        state: dict[str, Tensor] | None,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        if not isinstance(self.embedding, TokenEmbedding):  # that of an image's patches, which adds positions
            return self.embedding(input_ids, mask=mask, state=state), {}
        if inputs_embeds is None:
            inputs_embeds = self.embedding(input_ids)
        if self.embedding.positions is None:
            return inputs_embeds, {}
        vectors, end = self.embedding.positions(inputs_embeds, mask, None, (state or {}).get("position"))
        return inputs_embeds + vectors, {"position": end}

    def _uses_cache(self, use_cache: bool | None) -> bool:
        """Return whether the forward pass returns states: by default not in training; never if the model is bidirectional."""
        if use_cache is None:
            use_cache = self.config.use_cache and not self.training
        return bool(use_cache) and not (self.gradient_checkpointing and self.training) and self._causal


def _resized(old: Tensor, rows: int, std: float | None) -> nn.Parameter:
    """Return a parameter [rows, ...] with the rows of `old`. Further rows are its mean, or with `std` random, 0 for a bias."""
    new = old.new_empty(rows, *old.shape[1:])
    new[: len(old)] = old[:rows]
    if std is None:
        new[len(old) :] = old.mean(0)
    else:
        nn.init.normal_(new[len(old) :], std=std if old.dim() > 1 else 0.0)
    return nn.Parameter(new, requires_grad=old.requires_grad)


def _real_tokens_first(mask: Tensor | None) -> Tensor | None:
    """Return an order [batch, length] with the real positions of each row first, then its padding.

    Return None if no padding is between real tokens, where a convolution would read it. torch.compile cannot read the mask's
    values, so there the order is always returned.
    """
    if mask is None:
        return None
    begins = torch.cat([mask[:, :1], mask[:, 1:] & ~mask[:, :-1]], 1)
    if not torch.compiler.is_compiling() and not bool((begins.sum(1) > 1).any()):
        return None
    return (~mask).int().argsort(dim=1, stable=True)


def _mask_of(attention_mask: Tensor | None, length: int, seen: int) -> Tensor | None:
    """Return the mask [batch, length] bool of the inputs, None if all are real. ValueError for another shape.

    seen: positions in the cache, which the mask may also cover.
    """
    if attention_mask is None:
        return None
    if attention_mask.dim() != 2 or attention_mask.shape[1] not in (length, seen + length):
        cached = f", or [batch, {seen + length}] with the {seen} positions of the cache" if seen else ""
        raise ValueError(
            f"attention_mask {list(attention_mask.shape)}: expected [batch, {length}] with 1 for real tokens{cached}"
        )
    mask = attention_mask[:, -length:].bool()
    if not torch.compiler.is_compiling() and bool(mask.all()):
        return None
    return mask


class RecurrentCache(Cache):
    """Hold the states of all layers after `seen` positions, padding included.

    `states` has one dict per layer, with the batch first in every tensor; it is empty before the first forward pass. A
    state cannot go back to an earlier position, so assisted generation is refused.
    """

    def __init__(self) -> None:
        super().__init__(layers=[])
        self.states: list[dict[str, Tensor]] = []
        self.seen = 0

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return the number of positions that the states have seen."""
        return self.seen

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """Return -1: there is no largest length."""
        return -1

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        """Return whether any position was seen."""
        return self.seen > 0

    def reset(self) -> None:
        """Remove all states."""
        self.states, self.seen = [], 0

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Set the state of row b to that of row beam_idx[b]."""
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep these rows, in this order."""
        self._each(lambda state: state.index_select(0, indices.to(state.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row `repeats` times."""
        self._each(lambda state: state.repeat_interleave(repeats, 0))

    def crop(self, tokens_to_remove: int) -> None:
        """Raise ValueError: tokens cannot be removed from a recurrent state. Transformers passes their number below 0."""
        raise ValueError(
            f"cannot remove {abs(tokens_to_remove)} tokens from a recurrent state: run the shorter sequence without a cache"
        )

    @property
    def batch_size(self) -> int:
        """Return the number of rows, -1 before the first forward pass."""
        return next((len(tensor) for state in self.states for tensor in state.values()), -1)

    @property
    def is_compileable(self) -> bool:
        """Return False: generation does not compile the forward pass by itself."""
        return False

    @property
    def is_croppable(self) -> bool:
        """Return False."""
        return False

    def nbytes(self) -> int:
        """Return the memory of the states in bytes."""
        return sum(tensor.nbytes for state in self.states for tensor in state.values())

    def __len__(self) -> int:
        return len(self.states)

    def __repr__(self) -> str:
        return f"RecurrentCache(seen={self.seen}, layers={len(self.states)}, batch_size={self.batch_size})"

    def _each(self, change: Callable[[Tensor], Tensor]) -> None:
        with torch.no_grad():
            self.states = [{name: change(tensor) for name, tensor in state.items()} for state in self.states]
