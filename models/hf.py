"""The model as Transformers loads it: the layers that train, under the names that checkpoints give them.

`MetalionForCausalLM`, `MetalionForMaskedLM`, `MetalionForSequenceClassification` and the bare `MetalionModel` hold
`embedding`, `blocks` and `head` themselves, so a state dict needs no renaming. An export is this file with the files that
it imports, a config and weights.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import GenerationMixin, PreTrainedModel
from transformers.modeling_outputs import (
    BaseModelOutputWithPast,
    CausalLMOutputWithPast,
    MaskedLMOutput,
    SequenceClassifierOutputWithPast,
)

from .embedding import Embedding
from .hf_cache import RecurrentCache
from .hf_config import MetalionConfig, is_causal
from .lm import LanguageModel, LayerSpec, layer_specs
from .recurrence import leave_out_of_graphs

# What only a language model's head has.
_PREDICTION = [r"^head\.weight$", r"^head\.bias$", r"^head\.transform\."]


class MetalionPreTrainedModel(PreTrainedModel):
    """What the models share: embedding and blocks, padding, cache, gradient checkpointing, loading."""

    config_class = MetalionConfig
    base_model_prefix = ""
    supports_gradient_checkpointing = True
    _no_split_modules: ClassVar[list[str]] = ["Block"]
    _skip_keys_device_placement: ClassVar[list[str]] = ["past_key_values"]
    _is_stateful = True
    embedding: Any
    head: Any

    def __init__(self, config: MetalionConfig) -> None:
        super().__init__(config)
        leave_out_of_graphs()
        self.gradient_checkpointing = False
        model_config = config.model_config()
        self._causal = is_causal(model_config)
        self._specs = {spec.name: spec for spec in layer_specs(model_config)}
        self.embedding = Embedding(model_config)
        self.blocks = nn.ModuleList(self._specs[f"blocks.{i}"].build() for i in range(config.num_layers))

    def post_init(self) -> None:
        """As Transformers', after noting what the layers gave themselves when they were built."""
        self._buffers_built = {n: b.clone() for n, b in self.named_buffers() if b.device.type != "meta"}
        for parameter in self.parameters():
            if parameter.device.type != "meta":
                parameter._is_hf_initialized = True
        super().post_init()

    @torch.no_grad()
    def initialize_weights(self) -> None:
        """Initial values for what a checkpoint did not bring, as the layers draw them when they are built."""
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
        """The embedding; its `weight` is [vocab_size, hidden_size]."""
        return self.embedding

    def set_input_embeddings(self, value: nn.Module) -> None:
        """Exchange the embedding for a module with a `weight` of [vocab_size, hidden_size]."""
        self.embedding.weight = value.weight

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        # generate() would hand a cache of keys and values to forward, which makes its own instead.
        return False

    def _run(
        self,
        input_ids: Tensor | None,
        attention_mask: Tensor | None,
        inputs_embeds: Tensor | None,
        past_key_values: RecurrentCache | None,
        use_cache: bool,
        collect: bool,
    ) -> tuple[Tensor, Tensor | None, RecurrentCache | None, list[Tensor]]:
        """Embedding and blocks: hidden states before the last norm, the mask of these positions, cache, and the inputs of
        all blocks if they are to be collected."""
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("give input_ids or inputs_embeds, one of the two")
        given: Any = input_ids if inputs_embeds is None else inputs_embeds
        mask = _mask_of(attention_mask, given.shape[1])
        cache = past_key_values
        if use_cache and cache is None:
            cache = RecurrentCache()
        before = cache.states if cache is not None and cache.states else [None] * (len(self.blocks) + 1)
        hidden, new_state = self._embed(input_ids, inputs_embeds, mask, before[0], use_cache)
        new_states, collected = [new_state], []
        recompute = self.gradient_checkpointing and self.training
        for block, state in zip(self.blocks, before[1:], strict=True):
            if collect:
                collected.append(hidden)
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
        return hidden, mask, cache if use_cache else None, collected

    def _embed(
        self,
        input_ids: Tensor | None,
        inputs_embeds: Tensor | None,
        mask: Tensor | None,
        state: dict[str, Tensor] | None,
        use_cache: bool,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        if inputs_embeds is None:
            if use_cache:
                return self.embedding(input_ids, mask=mask, state=state, return_state=True)
            # A tensor alone: Transformers and PEFT put hooks on the embedding that expect one.
            return self.embedding(input_ids, mask=mask, state=state), {}
        if self.embedding.positions is None:
            return inputs_embeds, {}
        vectors, end = self.embedding.positions(inputs_embeds, mask, None, (state or {}).get("position"))
        return inputs_embeds + vectors, {"position": end}

    def _caches(self, use_cache: bool | None) -> bool:
        """A model under training keeps no states, and one that sees both directions has none."""
        if use_cache is None:
            use_cache = self.config.use_cache and not self.training
        return bool(use_cache) and not (self.gradient_checkpointing and self.training) and self._causal


class MetalionModel(MetalionPreTrainedModel):
    """Embedding, blocks and the last norm: hidden states."""

    _keys_to_ignore_on_load_unexpected: ClassVar[list[str]] = [*_PREDICTION, r"^score\."]

    def __init__(self, config: MetalionConfig) -> None:
        super().__init__(config)
        self.head = _norm_only(self._specs)
        self.post_init()

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        past_key_values: RecurrentCache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPast | tuple[Any, ...]:
        """input_ids: [batch, length] int, or inputs_embeds [batch, length, hidden_size] -> the last hidden states after
        the norm; arguments as in `MetalionForCausalLM.forward`."""
        collect = _chosen(output_hidden_states, self.config.output_hidden_states)
        hidden, _, cache, collected = self._run(
            input_ids, attention_mask, inputs_embeds, past_key_values, self._caches(use_cache), collect
        )
        hidden = self.head.norm(hidden)
        output = BaseModelOutputWithPast(
            last_hidden_state=hidden,
            past_key_values=cache,
            hidden_states=(*collected, hidden) if collect else None,
        )
        return output if _chosen(return_dict, self.config.return_dict) else output.to_tuple()


class MetalionForCausalLM(MetalionPreTrainedModel, GenerationMixin):
    """The causal language model."""

    _tied_weights_keys: ClassVar[dict[str, str]] = {"head.weight": "embedding.weight"}
    _keys_to_ignore_on_load_unexpected: ClassVar[list[str]] = [r"^score\."]

    def __init__(self, config: MetalionConfig) -> None:
        super().__init__(config)
        if not self._causal:
            raise ValueError(
                f"model.mixers = {config.mixers} sees what comes after a token: load it with AutoModelForMaskedLM"
            )
        self.head = self._specs["head"].build()
        _tie(self)
        self.post_init()

    def get_output_embeddings(self) -> nn.Module:
        """The head; its `weight` is [vocab_size, hidden_size]."""
        return self.head

    def set_output_embeddings(self, new_embeddings: nn.Module) -> None:
        """Exchange the output matrix for that of another module."""
        self.head.weight = new_embeddings.weight

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        past_key_values: RecurrentCache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast | tuple[Any, ...]:
        """input_ids: [batch, length] int, or inputs_embeds [batch, length, hidden_size] -> logits [batch, length, vocab].

        attention_mask: [batch, length], or [batch, seen + length] with a cache; 1 for real tokens, padded on either side.
        past_key_values: what an earlier call returned; it is moved on, not copied. labels: [batch, length] int, not
        shifted, -100 counts nothing; `num_items_in_batch` among kwargs divides the summed loss. logits_to_keep: only the
        last so many positions, 0 for all. hidden_states are the input of every block and the last hidden state after
        the norm.
        """
        collect = _chosen(output_hidden_states, self.config.output_hidden_states)
        hidden, _, cache, collected = self._run(
            input_ids, attention_mask, inputs_embeds, past_key_values, self._caches(use_cache), collect
        )
        if collect:
            collected.append(self.head.norm(hidden))
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.head(hidden[:, kept])
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
        output = CausalLMOutputWithPast(
            loss=loss, logits=logits, past_key_values=cache, hidden_states=tuple(collected) if collect else None
        )
        return output if _chosen(return_dict, self.config.return_dict) else output.to_tuple()

    def prepare_inputs_for_generation(
        self,
        input_ids: Tensor,
        next_sequence_length: int | None = None,
        past_key_values: RecurrentCache | None = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        is_first_iteration: bool | None = False,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """As Transformers'; after the prompt no mask is needed, for what is generated is never padding."""
        if not is_first_iteration and past_key_values is not None and next_sequence_length == 1:
            attention_mask = None
        return super().prepare_inputs_for_generation(
            input_ids,
            next_sequence_length=next_sequence_length,
            past_key_values=past_key_values,
            attention_mask=attention_mask,
            inputs_embeds=inputs_embeds,
            is_first_iteration=is_first_iteration,
            **kwargs,
        )


class MetalionForMaskedLM(MetalionPreTrainedModel):
    """The masked language model."""

    _tied_weights_keys: ClassVar[dict[str, str]] = {"head.weight": "embedding.weight"}
    _keys_to_ignore_on_load_unexpected: ClassVar[list[str]] = [r"^score\."]

    def __init__(self, config: MetalionConfig) -> None:
        super().__init__(config)
        self.head = self._specs["head"].build()
        _tie(self)
        self.post_init()

    def get_output_embeddings(self) -> nn.Module:
        """The head; its `weight` is [vocab_size, hidden_size]."""
        return self.head

    def set_output_embeddings(self, new_embeddings: nn.Module) -> None:
        """Exchange the output matrix for that of another module."""
        self.head.weight = new_embeddings.weight

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        **kwargs: Any,
    ) -> MaskedLMOutput | tuple[Any, ...]:
        """input_ids: [batch, length] int, or inputs_embeds -> logits [batch, length, vocab_size] of the same positions.

        labels: [batch, length] int, the token that belongs there, -100 where nothing is asked.
        """
        collect = _chosen(output_hidden_states, self.config.output_hidden_states)
        hidden, _, _, collected = self._run(input_ids, attention_mask, inputs_embeds, None, False, collect)
        if collect:
            collected.append(self.head.norm(hidden))
        logits = self.head(hidden)
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
        output = MaskedLMOutput(loss=loss, logits=logits, hidden_states=tuple(collected) if collect else None)
        return output if _chosen(return_dict, self.config.return_dict) else output.to_tuple()


class MetalionForSequenceClassification(MetalionPreTrainedModel):
    """A linear map of one pooled hidden state (`config.classifier_pooling`); regression where num_labels is 1."""

    _keys_to_ignore_on_load_unexpected: ClassVar[list[str]] = _PREDICTION

    def __init__(self, config: MetalionConfig) -> None:
        super().__init__(config)
        self.num_labels = config.num_labels
        self.head = _norm_only(self._specs)
        self._specs["score"] = LayerSpec("score", self._new_score)
        self.score = self._new_score()
        self.post_init()

    def _new_score(self) -> nn.Linear:
        score = nn.Linear(self.config.hidden_size, self.config.num_labels, bias=False)
        nn.init.normal_(score.weight, std=0.02)
        return score

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        **kwargs: Any,
    ) -> SequenceClassifierOutputWithPast | tuple[Any, ...]:
        """input_ids: [batch, length] int, or inputs_embeds -> logits [batch, num_labels].

        attention_mask: [batch, length], 1 for real tokens; without it every position is real. labels: [batch] int, or
        float for regression, or [batch, num_labels] for several labels at once.
        """
        collect = _chosen(output_hidden_states, self.config.output_hidden_states)
        hidden, mask, _, collected = self._run(input_ids, attention_mask, inputs_embeds, None, False, collect)
        hidden = self.head.norm(hidden)
        how = self.config.classifier_pooling or ("last" if self._causal else "first")
        logits = self.score(_pool(hidden, mask, how))
        loss = None
        if labels is not None:
            loss = self.loss_function(pooled_logits=logits, labels=labels, config=self.config, **kwargs)
        output = SequenceClassifierOutputWithPast(
            loss=loss, logits=logits, hidden_states=(*collected, hidden) if collect else None
        )
        return output if _chosen(return_dict, self.config.return_dict) else output.to_tuple()


def from_language_model(model: LanguageModel, **config: Any) -> MetalionForCausalLM | MetalionForMaskedLM:
    """The same layers as a Transformers model that shares their weights; `config` as `MetalionConfig` takes it."""
    fields = {f.name: getattr(model.config, f.name) for f in dataclasses.fields(model.config)}
    hf_config = MetalionConfig(**fields, **config)
    with torch.device("meta"):
        hf_model = (MetalionForCausalLM if is_causal(model.config) else MetalionForMaskedLM)(hf_config)
    hf_model.embedding, hf_model.blocks, hf_model.head = model.embedding, model.blocks, model.head
    return hf_model.train(model.training)


def _norm_only(specs: dict[str, LayerSpec]) -> nn.Module:
    """A head without its projection and what BERT's has before it."""
    head: Any = specs["head"].build()
    head.weight = head.bias = head.transform = None
    return head


def _tie(model: Any) -> None:
    if model.config.tie_embeddings:
        model.head.weight = model.embedding.weight


def _mask_of(attention_mask: Tensor | None, length: int) -> Tensor | None:
    """[batch, length] bool of the last positions, None where all are real. ValueError for another shape."""
    if attention_mask is None:
        return None
    if attention_mask.dim() != 2 or attention_mask.shape[1] < length:
        raise ValueError(
            f"attention_mask {list(attention_mask.shape)}: expected [batch, {length}] with 1 for real tokens, or longer by "
            "what the cache has seen"
        )
    mask = attention_mask[:, -length:].bool()
    if not torch.compiler.is_compiling() and bool(mask.all()):
        return None
    return mask


def _pool(hidden: Tensor, mask: Tensor | None, how: str) -> Tensor:
    """hidden: [batch, length, d] -> [batch, d]: the last or first real token, or the mean over the real ones."""
    if mask is None:
        return {"last": hidden[:, -1], "first": hidden[:, 0]}[how] if how != "mean" else hidden.mean(1)
    if how == "mean":
        weight = mask.unsqueeze(-1).to(hidden.dtype)
        return (hidden * weight).sum(1) / weight.sum(1).clamp_min(1)
    position = torch.arange(mask.shape[1], device=mask.device)
    place = (mask * position).amax(1) if how == "last" else mask.int().argmax(1)
    return hidden[torch.arange(len(hidden), device=hidden.device), place]


def _chosen(value: bool | None, default: bool | None) -> bool:
    return bool(default if value is None else value)
