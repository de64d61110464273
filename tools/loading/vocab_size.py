"""Derive `model.vocab_size` from the tokenizer, or from the classes of images, if the configuration does not set it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from data.tokenizer import load_tokenizer, needed_vocab_size, padded_vocab_size
from megatron_lite.config.data_schema import TokenizerConfig
from megatron_lite.config.files import read_sources
from megatron_lite.config.image_schema import ImagesConfig
from megatron_lite.config.section import Section

SectionT = TypeVar("SectionT", bound=Section)
# With this size the check of a configuration reports the invalid keys of `data` and no problem of the size.
_SIZE_FOR_INVALID_DATA = 2**30


def vocabulary_override(files: Sequence[str | Path], overrides: Sequence[str]) -> list[str]:
    """Return ["model.vocab_size=N"], the entries of the tokenizer padded to a multiple of 128; [] if the size is set.

    For an image classifier N is the number of classes that its training images name.

    Raises as `load_tokenizer` and `number_of_classes`.
    """
    tree = read_sources(files, overrides).tree
    model, data = (section if isinstance(section := tree.get(name), dict) else {} for name in ("model", "data"))
    if not model or model.get("vocab_size") is not None:
        return []
    try:
        if data.get("objective") == "classification":
            from tools.loading.image_data import number_of_classes

            size = number_of_classes(_section(ImagesConfig, data.get("images")))
        else:
            size = _padded_entries(_section(TokenizerConfig, data.get("tokenizer")), data.get("objective") == "masked")
    except ValidationError:
        size = None
    return [f"model.vocab_size={size or _SIZE_FOR_INVALID_DATA}"]


def _section(kind: type[SectionT], raw: Any) -> SectionT:
    """Return a section of the raw configuration, in which null restores a default. Raises ValidationError."""
    keys = {key: value for key, value in raw.items() if value is not None} if isinstance(raw, dict) else raw or {}
    return kind.model_validate_json(json.dumps(keys))


def _padded_entries(settings: TokenizerConfig, masked: bool) -> int:
    if settings.type == "sentencepiece" and settings.path is None:
        return padded_vocab_size(settings.vocab_size)
    return padded_vocab_size(needed_vocab_size(load_tokenizer(settings.type, settings.path), masked=masked))
