"""The configuration of an exported model: the fields of `ModelConfig` under their own names."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

from transformers.utils.versions import require_version

OLDEST_TRANSFORMERS = "5.6.2"
require_version(
    f"transformers>={OLDEST_TRANSFORMERS}",
    f"This model does not load with an older one: pip install -U 'transformers>={OLDEST_TRANSFORMERS},<6'",
)

from transformers import PreTrainedConfig  # noqa: E402 - an older one has no class of this name

from ..config import ModelConfig  # noqa: E402
from ..mixers import MIXERS  # noqa: E402

# What a configuration without arguments is, which Transformers asks for: the shape of MetaLA 360M, with a mixer that is
# there (an export holds only its own).
_DEFAULTS: dict[str, Any] = {
    "vocab_size": 50304,
    "num_layers": 24,
    "hidden_size": 1024,
    "num_heads": 8,
    "mixers": ("metala",) if "metala" in MIXERS else (next(iter(MIXERS)),),
}


class MetalionConfig(PreTrainedConfig):
    """Shape and mixers as in `ModelConfig`; `use_cache` and `classifier_pooling` are of Transformers' side.

    classifier_pooling: the hidden state that a sequence classifier reads: "last", "first" or "mean" of the real tokens.
    None is "last" for causal models and "first" ([CLS]) for bidirectional ones.

    Raises ValueError as `ModelConfig`, and for another pooling.
    """

    model_type = "metalion"
    keys_to_ignore_at_inference: ClassVar[list[str]] = ["past_key_values"]
    attribute_map: ClassVar[dict[str, str]] = {
        "num_hidden_layers": "num_layers",
        "num_attention_heads": "num_heads",
        "tie_word_embeddings": "tie_embeddings",
    }

    def __init__(self, use_cache: bool = True, classifier_pooling: str | None = None, **kwargs: Any) -> None:
        for standard, own in self.attribute_map.items():
            if standard in kwargs:
                kwargs[own] = kwargs.pop(standard)
        names = [field.name for field in dataclasses.fields(ModelConfig)]
        config = ModelConfig(**(_DEFAULTS | {name: kwargs.pop(name) for name in names if name in kwargs}))
        super().__init__(**kwargs)
        # After the base class, which sets attributes of its own through attribute_map.
        for name in names:
            value = getattr(config, name)
            setattr(self, name, list(value) if isinstance(value, tuple) else value)
        if classifier_pooling not in (None, "last", "first", "mean"):
            raise ValueError(f"classifier_pooling = {classifier_pooling!r}: allowed are null, last, first, mean")
        self.use_cache = use_cache
        self.classifier_pooling = classifier_pooling

    def to_diff_dict(self) -> dict[str, Any]:
        """What is written to config.json: every field of the model, also where it is a default here."""
        return super().to_diff_dict() | dataclasses.asdict(self.model_config()) | {"mixers": list(self.mixers)}

    def model_config(self) -> ModelConfig:
        """The same as the model's own dataclass."""
        return ModelConfig(**{f.name: getattr(self, f.name) for f in dataclasses.fields(ModelConfig)})
