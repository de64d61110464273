"""Refuse a Hugging Face model that cannot be scored, before data and weights are read."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from data.atomic_io import read_json

_TOKENIZERS = (
    "tokenizer.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "*.bpe.model",
    "spiece.model",
    "*.tiktoken",
)


def check_model(name: str, config: Path) -> None:
    """Check a model's configuration, and the tokenizer of a folder.

    name: a folder, or a name on the hub. config: the model's config.json.

    Raises:
        ValueError: a masked model, an image classifier or a damaged configuration.
        FileNotFoundError: a folder without a tokenizer.
    """
    refuse_unscorable(
        name, read_json(config, "get the model's folder again, or write it with python -m tools.convert_hf export")
    )
    folder = Path(name)
    if folder.is_dir() and not any(any(folder.glob(pattern)) for pattern in _TOKENIZERS):
        raise FileNotFoundError(
            f"{name} holds no tokenizer (looked for {', '.join(_TOKENIZERS)}): copy the model's tokenizer into it; "
            "for an export, python -m tools.convert_hf export RUN FOLDER --tokenizer FILE"
        )


def refuse_image_classifier(name: str, config: Mapping[str, Any]) -> None:
    """Raise ValueError for an image classifier. config: the content of config.json."""
    classes = config.get("architectures") or []
    if any(str(word).endswith("ForImageClassification") for word in classes):
        raise ValueError(f"{name} ({', '.join(map(str, classes))}) is an image classifier, and this command reads text")


def refuse_unscorable(name: str, config: Mapping[str, Any]) -> None:
    """Raise ValueError for a model without a likelihood of a text: one that reads both sides of a token, or images.

    config: the content of config.json.
    """
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_MASKED_LM_MAPPING_NAMES,
        MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    )

    refuse_image_classifier(name, config)
    kind, classes = config.get("model_type"), config.get("architectures") or []
    encoder = kind in MODEL_FOR_MASKED_LM_MAPPING_NAMES and kind not in MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES
    causal = config.get("is_decoder") or config.get("causal")
    if (encoder and not causal) or any(str(word).endswith("ForMaskedLM") for word in classes):
        raise ValueError(
            f"{name} ({', '.join(map(str, classes)) or kind}) is a masked model: it reads both sides of a token and has no "
            "log-likelihood. Masked models of this project are scored from their run, by pseudo-log-likelihood (python -m "
            "tools.convert_hf import FOLDER RUN imports an export)"
        )
