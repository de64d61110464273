"""Open the token files of a run, which are prepared from its corpus or named by its configuration."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data.corpus.discovery import source_files
from data.datasets.sample_index import selected_sequences
from data.indexed import IndexedTokens
from data.manifest import check_tokenizer, read_manifest
from data.preprocessing.prepare_corpus import Prepared, prepare_corpus
from data.tokenizer import Tokenizer, load_tokenizer, needed_vocab_size, padded_vocab_size
from megatron_lite.config.data_schema import DataConfig

_CORPUS_KEYS = {"corpus", "tokenizer", "text_key", "source_key", "validation_fraction"}  # of the section `data`


def data_config(config: dict[str, Any]) -> DataConfig:
    """Return the section `data` of a checkpoint's configuration."""
    return DataConfig.model_validate_json(json.dumps(config["data"]))


def prepare_token_files(data: DataConfig) -> Prepared:
    """Return the token files of `data.corpus`, from the cache if it has them. Raises as `prepare_corpus`."""
    if data.corpus is None:
        raise ValueError("data.corpus is not set: this run was trained on token files (data.train)")
    return prepare_corpus(
        data.corpus,
        tokenizer_type=data.tokenizer.type,
        tokenizer_path=data.tokenizer.path,
        vocab_size=data.tokenizer.vocab_size,
        text_key=data.text_key,
        source_key=data.source_key,
        validation_fraction=data.validation_fraction,
        cache_directory=data.cache_directory,
    )


@dataclass(frozen=True)
class PreparedData:
    """The paths of a run's token files, prepared from a corpus or named by the configuration.

    Attributes:
        train, validation, test: prefixes of token files; validation and test may be None.
        train_tokens: tokens of the training files.
        validation_text, validation_bytes: the raw text of the validation tokens; None if it is unknown.
        corpus: `data.corpus` and the settings that it was prepared with, as JSON; "" for files that the configuration names.
    """

    train: tuple[str, ...]
    validation: str | None
    train_tokens: int
    validation_text: Path | None
    validation_bytes: int | None
    tokenizer_type: str
    tokenizer_path: Path | None
    test: str | None = None
    corpus: str = ""

    @property
    def prefixes(self) -> list[str]:
        """Return the prefixes of training, validation and test, each once."""
        return list(dict.fromkeys(prefix for prefix in (*self.train, self.validation, self.test) if prefix is not None))

    @property
    def files(self) -> list[Path]:
        """Return the files that every process of a run reads."""
        pairs = [Path(f"{prefix}{ending}") for prefix in self.prefixes for ending in (".bin", ".idx")]
        return pairs + ([] if self.tokenizer_path is None else [self.tokenizer_path])

    def load_tokenizer(self) -> Tokenizer:
        """Return the tokenizer of the token files. Raises as `data.tokenizer.load_tokenizer`."""
        return load_tokenizer(self.tokenizer_type, self.tokenizer_path)


def prepared_data(data: DataConfig, vocab_size: int) -> PreparedData:
    """Return the data of a configuration. Prepare its corpus unless the cache has it.

    Args:
        vocab_size: rows of the model's embedding. Every token id must be smaller.

    Raises:
        ValueError, FileNotFoundError: as `prepare_corpus` and `IndexedTokens`, or a tokenizer with more entries than
            `vocab_size`.
    """
    if data.corpus is not None:
        corpus = prepare_token_files(data)
        result = PreparedData(
            train=(str(corpus.train_prefix),),
            validation=None if corpus.validation_prefix is None else str(corpus.validation_prefix),
            train_tokens=IndexedTokens(corpus.train_prefix).num_tokens,
            validation_text=corpus.validation_text_path,
            validation_bytes=corpus.manifest["validation"]["bytes"] if corpus.validation_prefix else None,
            tokenizer_type=corpus.tokenizer_type,
            tokenizer_path=corpus.tokenizer_path,
            corpus=data.model_dump_json(include=_CORPUS_KEYS),
        )
    else:
        if not data.train_files:
            raise ValueError("data.corpus and data.train are both empty: name one of them")
        manifest = read_manifest(data.validation) if data.validation is not None else None
        result = PreparedData(
            train=data.train_files,
            validation=data.validation,
            train_tokens=sum(IndexedTokens(prefix).num_tokens for prefix in set(data.train_files)),
            validation_text=None,
            validation_bytes=None if manifest is None else manifest.get("bytes"),
            tokenizer_type=data.tokenizer.type,
            tokenizer_path=None if data.tokenizer.path is None else Path(data.tokenizer.path),
            test=data.test,
        )
    tokenizer = result.load_tokenizer()
    for prefix in result.prefixes:
        check_tokenizer(prefix, tokenizer)
    _check_vocab_size(data, vocab_size, tokenizer, result.tokenizer_path)
    return result


def check_data(data: DataConfig, vocab_size: int, sequence_length: int) -> None:
    """Raise as `prepared_data`, `check_sequence_length` and `selected_sequences`, without the preparation of a corpus."""
    if data.corpus is None:
        check_sequence_length(prepared_data(data, vocab_size), sequence_length)
        for prefix, min_tokens in zip(data.train_files, data.blend.min_tokens or (), strict=False):
            selected_sequences(IndexedTokens(prefix), min_tokens)
        return
    source_files(data.corpus)
    if data.tokenizer.path is not None or data.tokenizer.type == "bytes":
        tokenizer = load_tokenizer(data.tokenizer.type, data.tokenizer.path)
        _check_vocab_size(data, vocab_size, tokenizer, data.tokenizer.path)


def _check_vocab_size(data: DataConfig, vocab_size: int, tokenizer: Tokenizer, path: Path | str | None) -> None:
    needed = needed_vocab_size(tokenizer, masked=data.objective == "masked")
    if needed > vocab_size:
        entries = f"{tokenizer.vocab_size} entries" + (" and a mask token" if needed > tokenizer.vocab_size else "")
        raise ValueError(
            f"model.vocab_size = {vocab_size} is smaller than the tokenizer's {entries} "
            f"({path or data.tokenizer.type}); set model.vocab_size to {padded_vocab_size(needed)}"
        )


def check_sequence_length(data: PreparedData, sequence_length: int) -> None:
    """Raise ValueError if a training file has fewer tokens than one sample, sequence_length + 1."""
    for prefix in data.train:
        tokens = IndexedTokens(prefix).num_tokens
        if tokens <= sequence_length:
            raise ValueError(
                f"batch.sequence_length = {sequence_length}: the token file {prefix} holds {tokens:,} tokens, fewer than "
                f"one sample of {sequence_length:,} + 1. Set batch.sequence_length to {tokens - 1} or less, or add text"
            )
