"""Derive `model.vocab_size` from the tokenizer, or from the classes of images, if the configuration does not set it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from data.tokenizer import load_tokenizer, needed_vocab_size, padded_vocab_size
from megatron_lite.config.data_schema import TokenizerConfig
from megatron_lite.config.files import read_sources


def vocabulary_override(files: Sequence[str | Path], overrides: Sequence[str]) -> list[str]:
    """Return ["model.vocab_size=N"], the entries of the tokenizer padded to a multiple of 128; [] if the size is set.

    For an image classifier N is the number of classes that its training images name; [] without training images.

    Raises as `load_tokenizer` and `number_of_classes`.
    """
    tree = read_sources(files, overrides).tree
    model, data = (section if isinstance(section := tree.get(name), dict) else {} for name in ("model", "data"))
    settings = data.get("tokenizer") or {}
    if not model or model.get("vocab_size") is not None or not isinstance(settings, dict):
        return []
    if data.get("objective") == "classification":
        from tools.loading.image_data import number_of_classes

        classes = number_of_classes(data)
        return [] if classes is None else [f"model.vocab_size={classes}"]
    kind, path = settings.get("type") or "sentencepiece", settings.get("path")
    if kind == "sentencepiece" and path is None:
        entries = settings.get("vocab_size") or TokenizerConfig().vocab_size
    else:
        entries = needed_vocab_size(load_tokenizer(kind, path), masked=data.get("objective") == "masked")
    return [f"model.vocab_size={padded_vocab_size(entries)}"]
