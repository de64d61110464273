"""The models that Transformers loads: the layers that train, under the names of the checkpoints.

`MetalionForCausalLM`, `MetalionForMaskedLM`, `MetalionForSequenceClassification`, `MetalionForImageClassification` and the
bare `MetalionModel` hold `embedding`, `blocks` and `head` themselves, so a state dict needs no renaming. An export is this
file with the files that it imports, a config and weights. Their base, with cache and padding, is `pretrained.py`.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import GenerationMixin
from transformers.modeling_outputs import (
    BaseModelOutputWithPast,
    CausalLMOutputWithPast,
    ImageClassifierOutput,
    MaskedLMOutput,
    SequenceClassifierOutputWithPast,
)
from transformers.utils import can_return_tuple

from ..language_model import LayerSpec
from ..precision import to_accumulation_dtype
from .configuration_metalion import MetalionConfig
from .pretrained import MetalionPreTrainedModel, RecurrentCache

# Parameters that only a language model's head has.
_PREDICTION = [r"^head\.weight$", r"^head\.bias$", r"^head\.transform\."]


class MetalionModel(MetalionPreTrainedModel):
    """Compute hidden states: embedding, blocks and the last norm."""

    _keys_to_ignore_on_load_unexpected: ClassVar[list[str]] = [*_PREDICTION, r"^score\."]

    def __init__(self, config: MetalionConfig) -> None:
        super().__init__(config)
        self.head = _norm_only(self._specs)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        past_key_values: RecurrentCache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPast:
        """Return the last hidden states after the norm.

        input_ids: [batch, length] int, or inputs_embeds [batch, length, hidden_size]. Other arguments as in
        `MetalionForCausalLM.forward`.
        """
        hidden, _, cache, states = self._run(
            input_ids, attention_mask, inputs_embeds, output_hidden_states, past_key_values, use_cache
        )
        return BaseModelOutputWithPast(
            last_hidden_state=self.head.norm(hidden), past_key_values=cache, hidden_states=states
        )


class _Predicting(MetalionPreTrainedModel):
    """Hold a model with its language-model head."""

    _tied_weights_keys: ClassVar[dict[str, str]] = {"head.weight": "embedding.weight"}
    _keys_to_ignore_on_load_unexpected: ClassVar[list[str]] = [r"^score\."]

    def __init__(self, config: MetalionConfig) -> None:
        super().__init__(config)
        self.head = self._specs["head"].build()
        if config.tie_embeddings:
            self.head.weight = self.embedding.weight
        self.post_init()

    def _loss(self, logits: Tensor, labels: Tensor | None, **kwargs: Any) -> Tensor | None:
        if labels is None:
            return None
        return self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)

    def get_output_embeddings(self) -> nn.Module:
        """Return the head; its `weight` is [vocab_size, hidden_size]."""
        return self.head

    def set_output_embeddings(self, new_embeddings: nn.Module) -> None:
        """Set the head's `weight` [vocab_size, hidden_size] to that of another module."""
        self.head.weight = new_embeddings.weight


class MetalionForCausalLM(_Predicting, GenerationMixin):
    """Compute the logits and the loss of a causal language model."""

    def __init__(self, config: MetalionConfig) -> None:
        super().__init__(config)
        if not self._causal:
            raise ValueError(f"mixers = {config.mixers} is bidirectional: load this model with AutoModelForMaskedLM")

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        past_key_values: RecurrentCache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """Return logits [batch, length, vocab_size] and, with labels, the loss.

        input_ids: [batch, length] int, or inputs_embeds [batch, length, hidden_size].
        attention_mask: [batch, length], or [batch, seen + length] with a cache; 1 for real tokens, padding anywhere.
        past_key_values: the cache that an earlier call returned; it is updated in place. labels: [batch, length] int, not
        shifted, -100 is ignored; `num_items_in_batch` among kwargs divides the summed loss. logits_to_keep: the number of
        last positions, 0 for all. hidden_states are the inputs of all blocks and the last hidden state after the norm.
        """
        hidden, _, cache, states = self._run(
            input_ids, attention_mask, inputs_embeds, output_hidden_states, past_key_values, use_cache
        )
        positions = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.head(hidden[:, positions])
        loss = self._loss(logits, labels, **kwargs)
        return CausalLMOutputWithPast(loss=loss, logits=logits, past_key_values=cache, hidden_states=states)

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
        """Prepare the inputs as Transformers, without a mask after the prompt: generated tokens are never padding."""
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


class MetalionForMaskedLM(_Predicting):
    """Compute the logits and the loss of a masked language model."""

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        output_hidden_states: bool | None = None,
        **kwargs: Any,
    ) -> MaskedLMOutput:
        """Return logits [batch, length, vocab_size] of the same positions and, with labels, the loss.

        input_ids: [batch, length] int, or inputs_embeds. labels: [batch, length] int, the original token of each masked
        position, -100 elsewhere.
        """
        hidden, _, _, states = self._run(input_ids, attention_mask, inputs_embeds, output_hidden_states)
        logits = self.head(hidden)
        return MaskedLMOutput(loss=self._loss(logits, labels, **kwargs), logits=logits, hidden_states=states)


class MetalionForSequenceClassification(MetalionPreTrainedModel):
    """Classify by a linear layer on one pooled hidden state (`config.classifier_pooling`); regression if num_labels is 1."""

    _keys_to_ignore_on_load_unexpected: ClassVar[list[str]] = _PREDICTION

    def __init__(self, config: MetalionConfig) -> None:
        super().__init__(config)
        self.num_labels = config.num_labels
        self.head = _norm_only(self._specs)
        self._specs["score"] = LayerSpec("score", len(self._specs), self._new_score)
        self.score = self._new_score()
        self.post_init()

    def _new_score(self) -> nn.Linear:
        score = nn.Linear(self.config.hidden_size, self.config.num_labels, bias=False)
        nn.init.normal_(score.weight, std=0.02)
        return score

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        output_hidden_states: bool | None = None,
        **kwargs: Any,
    ) -> SequenceClassifierOutputWithPast:
        """Return logits [batch, num_labels] and, with labels, the loss.

        input_ids: [batch, length] int, or inputs_embeds. attention_mask: [batch, length], 1 for real tokens; None if all
        are real. labels: [batch] int, float for regression, or [batch, num_labels] for multi-label classification.
        """
        hidden, mask, _, states = self._run(input_ids, attention_mask, inputs_embeds, output_hidden_states)
        pooling = self.config.classifier_pooling or ("last" if self._causal else "first")
        logits = self.score(_pool(self.head.norm(hidden), mask, pooling))
        loss = None
        if labels is not None:
            loss = self.loss_function(pooled_logits=logits, labels=labels, config=self.config, **kwargs)
        return SequenceClassifierOutputWithPast(loss=loss, logits=logits, hidden_states=states)


class MetalionForImageClassification(MetalionPreTrainedModel):
    """Classify images by the layers of `models/image_classifier.py`; the classes are `config.id2label`."""

    main_input_name = "pixel_values"

    def __init__(self, config: MetalionConfig) -> None:
        super().__init__(config)
        if config.image_size is None:
            raise ValueError(
                "image_size = null is a language model: load it with AutoModelForCausalLM or AutoModelForMaskedLM"
            )
        self.num_labels = config.vocab_size
        self.head = self._specs["head"].build()
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        pixel_values: Tensor,
        labels: Tensor | None = None,
        output_hidden_states: bool | None = None,
        **kwargs: Any,
    ) -> ImageClassifierOutput:
        """Return logits [batch, classes] and, with labels [batch] int, the mean loss.

        pixel_values: [batch, 3, image_size, image_size], normalized as by the export's image processor.
        """
        hidden, _, _, states = self._run(pixel_values, None, None, output_hidden_states)
        logits = self.head(hidden)
        loss = None if labels is None else torch.nn.functional.cross_entropy(logits.float(), labels)
        return ImageClassifierOutput(loss=loss, logits=logits, hidden_states=states)


def _norm_only(specs: dict[str, LayerSpec]) -> nn.Module:
    """Return the head's norm alone, in a head without projection and transform."""
    head: Any = specs["head"].build()
    head.weight = head.bias = head.transform = None
    return head


def _pool(hidden: Tensor, mask: Tensor | None, pooling: str) -> Tensor:
    """Return [batch, d] of hidden [batch, length, d]: the last or first real token, or the mean over the real ones."""
    if mask is None:
        return hidden.mean(1) if pooling == "mean" else hidden[:, -1 if pooling == "last" else 0]
    if pooling == "mean":
        hidden, dtype = to_accumulation_dtype(hidden), hidden.dtype  # a sum of float16 may overflow
        weight = mask.unsqueeze(-1).to(hidden.dtype)
        return ((hidden * weight).sum(1) / weight.sum(1).clamp_min(1)).to(dtype)
    position = torch.arange(mask.shape[1], device=mask.device)
    place = (mask * position).amax(1) if pooling == "last" else mask.int().argmax(1)
    return hidden[torch.arange(len(hidden), device=hidden.device), place]
