"""The configuration of an exported model: the fields of `ModelConfig` under their own names."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

from transformers.utils.versions import require_version

OLDEST_TRANSFORMERS = "5.6.2"
require_version(
    f"transformers>={OLDEST_TRANSFORMERS}",
    f"This model needs a newer release of transformers: pip install -U 'transformers>={OLDEST_TRANSFORMERS},<6'",
)

from transformers import PreTrainedConfig  # noqa: E402 - an older one has no class of this name

from ..config import ModelConfig  # noqa: E402
from ..mixers import MIXERS  # noqa: E402

# Transformers needs a configuration without arguments: the shape of MetaLA 360M, with a mixer that the export contains.
_DEFAULTS: dict[str, Any] = {
    "vocab_size": 50304,
    "num_layers": 24,
    "hidden_size": 1024,
    "num_heads": 8,
    "mixers": ("metala",) if "metala" in MIXERS else (next(iter(MIXERS)),),
}


class MetalionConfig(PreTrainedConfig):
    """Hold the fields of `ModelConfig`, and `use_cache` and `classifier_pooling` for Transformers.

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
        for standard, field_name in self.attribute_map.items():
            if standard in kwargs:
                kwargs[field_name] = kwargs.pop(standard)
        names = [field.name for field in dataclasses.fields(ModelConfig)]
        config = ModelConfig(**(_DEFAULTS | {name: kwargs.pop(name) for name in names if name in kwargs}))
        super().__init__(**kwargs)
        # After the base class, which also sets attributes through attribute_map.
        for name in names:
            value = getattr(config, name)
            setattr(self, name, list(value) if isinstance(value, tuple) else value)
        if classifier_pooling not in (None, "last", "first", "mean"):
            raise ValueError(f"classifier_pooling = {classifier_pooling!r}: allowed are null, last, first, mean")
        self.use_cache = use_cache
        self.classifier_pooling = classifier_pooling

    def to_diff_dict(self) -> dict[str, Any]:
        """Return the content of config.json: all fields of the model, defaults included."""
        return super().to_diff_dict() | dataclasses.asdict(self.model_config()) | {"mixers": list(self.mixers)}

    def model_config(self) -> ModelConfig:
        """Return these fields as a `ModelConfig`."""
        return ModelConfig(**{f.name: getattr(self, f.name) for f in dataclasses.fields(ModelConfig)})
