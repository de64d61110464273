"""From a checkpoint to a model that can be asked: the one place where weights, model and tokenizer meet.

Generation, evaluation and the converters start here. The layout that wrote the checkpoint does not matter.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from data.atomic_io import read_json, write_whole, written_aside
from data.indexed import IndexedTokens
from data.manifest import check_tokenizer
from data.manifest import read_manifest as read_data_manifest
from data.preprocessing.prepare_corpus import Prepared, prepare_corpus
from data.tokenizer import Tokenizer, load_tokenizer, padded_vocab_size
from megatron_lite.checkpoint.checksums import FILE_NAME, check_files, checksums_text, file_sha256, inside
from megatron_lite.checkpoint.reader import CheckpointError, read_config_yaml, read_manifest, read_weights, resolve
from megatron_lite.config.schema import DataConfig
from megatron_lite.engine.precision import DTYPES
from megatron_lite.fault_tolerance.finite_check import names_not_finite
from models.config import ModelConfig
from models.language_model import LanguageModel
from tools.cli.devices import device_of


@dataclass(frozen=True)
class LoadedModel:
    """A model with its tokenizer.

    Attributes:
        model: in evaluation mode, without gradients, on `device`.
        config: the configuration that it was trained with, as plain YAML values.
        checkpoint: the step folder.
        run: the run's folder.
    """

    model: LanguageModel
    tokenizer: Tokenizer
    config: dict[str, Any]
    checkpoint: Path
    run: Path

    @property
    def device(self) -> torch.device:
        """Where the weights lie."""
        return next(self.model.parameters()).device

    @property
    def step(self) -> int:
        """Training steps behind the weights."""
        return int(self.checkpoint.name.rpartition("_")[2])


@dataclass(frozen=True)
class FoundModel:
    """A checkpoint before its weights are read.

    Attributes:
        model: the configuration of the model.
        config: what it was trained with, as plain YAML values.
        checkpoint: the step folder.
        device, dtype: where its weights would lie, and as what.
    """

    model: ModelConfig
    config: dict[str, Any]
    checkpoint: Path
    device: torch.device
    dtype: torch.dtype


def find_model(path: Path | str, *, device: str = "auto", dtype: str = "auto") -> FoundModel:
    """What `load_model` begins with: milliseconds, so that a refusal comes before slow work. Arguments as there.

    Raises:
        CheckpointError: no checkpoint there, or one with a damaged manifest or configuration, or a file cut short.
        ValueError: an unknown dtype, a device that is not here, or as `ModelConfig`.
    """
    place = device_of(device)
    if dtype == "auto":
        dtype = "fp32" if place.type == "cpu" else "bf16"
    if dtype not in DTYPES:
        raise ValueError(f"dtype = {dtype!r}: allowed are auto, {', '.join(DTYPES)}")
    checkpoint = resolve(path)
    config = read_config_yaml(checkpoint)
    read_manifest(checkpoint)
    return FoundModel(model_config(config), config, checkpoint, place, DTYPES[dtype])


def load_model(path: Path | str, *, device: str = "auto", dtype: str = "auto") -> LoadedModel:
    """Reads the newest checkpoint of a run, or the one that is named.

    Args:
        path: a run folder, a checkpoints folder or a step folder.
        device: as `device_of`.
        dtype: "fp32", "bf16", "fp16", "fp64", or "auto": bf16 on a GPU, fp32 on a CPU.

    Raises:
        CheckpointError: no checkpoint there, or a damaged one.
        ValueError: weights that are not those of the stored configuration, a tokenizer that is larger than the model's
            vocabulary, an unknown dtype, or a device that is not here.
        FileNotFoundError: the tokenizer is gone.
    """
    found = find_model(path, device=device, dtype=dtype)
    checkpoint, config = found.checkpoint, found.config
    run = run_folder(checkpoint, config)
    tokenizer = read_tokenizer(run, config, read_manifest(checkpoint))
    if tokenizer.vocab_size > found.model.vocab_size:
        raise ValueError(
            f"{checkpoint}: the tokenizer {tokenizer.path or tokenizer.type} has {tokenizer.vocab_size} entries and the "
            f"model {found.model.vocab_size} rows: it is not the tokenizer that the model was trained with"
        )
    model = build_model(found.model, read_weights(checkpoint), checkpoint)
    model = model.to(device=found.device, dtype=found.dtype)
    if names := names_not_finite(model.named_parameters()):
        raise ValueError(f"{checkpoint}: too large for {found.dtype}: {', '.join(names[:8])}; take another dtype")
    return LoadedModel(model.eval().requires_grad_(False), tokenizer, config, checkpoint, run)


def model_config(config: dict[str, Any]) -> ModelConfig:
    """The section `model` of a checkpoint's configuration. Raises ValueError as `ModelConfig`."""
    try:
        return ModelConfig(**{key: value for key, value in config["model"].items() if value is not None})
    except TypeError as error:  # a key that is missing or unknown
        raise ValueError(f"the section model of the configuration: {error}") from error


def build_model(config: ModelConfig, weights: dict[str, Tensor], source: Path | str = "the weights") -> LanguageModel:
    """A model that takes over the given tensors by their canonical names; nothing is initialised before.

    Raises ValueError naming the first tensors that differ from what the configuration needs.
    """
    with torch.device("meta"):
        model = LanguageModel(config)
    needed = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    given = {name: tuple(tensor.shape) for name, tensor in weights.items()}
    differing = [
        f"{name}: {given.get(name, 'absent')} there, {needed.get(name, 'absent')} in the model"
        for name in sorted(needed.keys() | given.keys())
        if needed.get(name) != given.get(name)
    ]
    if differing:
        raise ValueError(f"{source}: {len(differing)} tensors do not fit its configuration: {'; '.join(differing[:3])}")
    model.load_state_dict(weights, strict=False, assign=True)
    if config.tie_embeddings:
        model.head.weight = model.embedding.weight
    return model


def run_folder(checkpoint: Path, config: dict[str, Any]) -> Path:
    """The folder of the run that wrote a step folder: above its checkpoints, or where the configuration says."""
    above = checkpoint.absolute().parent.parent
    said = Path(config["run"].get("directory") or f"runs/{config['run']['name']}")
    return said if not (above / "metrics.jsonl").is_file() and (said / "metrics.jsonl").is_file() else above


def run_of(path: Path | str) -> Path:
    """The folder of the run that a path of `load_model` names. Raises CheckpointError as there."""
    checkpoint = resolve(path)
    return run_folder(checkpoint, read_config_yaml(checkpoint))


def keep_tokenizer(tokenizer: Tokenizer, run: Path) -> None:
    """Copies the tokenizer's file to `run/tokenizer`, so that a run can be moved and read without its corpus."""
    folder = run / "tokenizer"
    folder.mkdir(parents=True, exist_ok=True)
    if tokenizer.path is not None and Path(tokenizer.path).resolve().parent == folder.resolve():
        kept_tokenizer(run)  # is what was put there
    description = {"type": tokenizer.type, "file": None, "hash": tokenizer.hash}
    if tokenizer.path is not None:
        source = Path(tokenizer.path)
        description["file"] = source.name
        for path in (source, source.with_name("tokenizer_config.json")):
            if path.is_file() and path.resolve() != (folder / path.name).resolve():
                with written_aside(folder / path.name) as file:
                    file.write(path.read_bytes())
    write_whole(folder / "description.json", json.dumps(description, indent=1) + "\n")
    names = ["description.json"]
    if tokenizer.path is not None:
        names += [name for name in (source.name, "tokenizer_config.json") if (folder / name).is_file()]
    write_whole(folder / FILE_NAME, checksums_text({name: file_sha256(folder / name) for name in names}))


def read_tokenizer(run: Path, config: dict[str, Any], manifest: Mapping[str, Any]) -> Tokenizer:
    """Return the tokenizer that the run keeps, else the one that its configuration names.

    manifest: of the checkpoint, which holds the hash of its tokenizer (those of earlier versions do not).

    Raises:
        FileNotFoundError: neither is there. No tokenizer is trained anew: it would give other ids.
        ValueError: the tokenizer is not the one of the weights.
    """
    folder = run / "tokenizer"
    tokenizer = kept_tokenizer(run)
    if tokenizer is None:
        data = data_config(config)
        if data.tokenizer.type != "bytes" and data.tokenizer.path is None:
            raise FileNotFoundError(
                f"{folder} is missing: it holds the tokenizer that the run trained. Copy it from where the run was made, "
                "or from the folder training/tokenizer of an export"
            )
        tokenizer = load_tokenizer(data.tokenizer.type, data.tokenizer.path)
    expected = manifest["state"].get("tokenizer")
    if expected is not None and tokenizer.hash != expected:
        raise ValueError(
            f"{tokenizer.path or tokenizer.type} is not the tokenizer that the checkpoint was trained with: its hash is "
            f"{tokenizer.hash}, not {expected}. Copy {folder} from where the run was made"
        )
    return tokenizer


def check_same_tokenizer(tokenizer: Tokenizer, run: Path, manifest: Mapping[str, Any]) -> None:
    """Raises ValueError where a run would go on with another tokenizer than its checkpoint's: its ids mean other text."""
    kept = kept_tokenizer(run)
    expected = manifest["state"].get("tokenizer") or (kept and kept.hash)
    if expected and tokenizer.hash != expected:
        own = f"data.tokenizer.path={kept.path}" if kept and kept.path and kept.hash == expected else "that tokenizer"
        raise ValueError(
            f"{run}: its checkpoint was trained with another tokenizer (hash {expected}) than the data have now "
            f"({tokenizer.path or tokenizer.type}, {tokenizer.hash}). Go on with {own}, or begin anew with "
            "checkpoint.resume=never"
        )


def kept_tokenizer(run: Path) -> Tokenizer | None:
    """What `keep_tokenizer` put into the folder; None where nothing was. Raises as `read_tokenizer`."""
    kept, mend = run / "tokenizer" / "description.json", "copy it again, or remove its folder to take data.tokenizer"
    if not check_files(kept.parent, mend) and not kept.is_file():
        return None
    description = read_json(kept, mend, "type", "file", "hash")
    file = None if description["file"] is None else inside(kept.parent, description["file"], kept)
    tokenizer = load_tokenizer(description["type"], file)
    if tokenizer.hash != description["hash"]:
        raise ValueError(f"{file} was changed after training: its hash is {tokenizer.hash}, not {description['hash']}")
    return tokenizer


def data_config(config: dict[str, Any]) -> DataConfig:
    """The section `data` of a checkpoint's configuration."""
    return DataConfig.model_validate_json(json.dumps(config["data"]))


def prepare(data: DataConfig) -> Prepared:
    """The token files of `data.corpus`, from the cache where they are. Raises as `data.prepare.prepare_corpus`."""
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
    """Where the token files of a run lie, prepared from a corpus or named by the configuration.

    Attributes:
        train, validation, test: prefixes of token files; validation and test are None where there is none.
        train_tokens: tokens of the training files.
        validation_text, validation_bytes: the raw text behind the validation tokens, where it is known.
    """

    train: tuple[str, ...]
    validation: str | None
    train_tokens: int
    validation_text: Path | None
    validation_bytes: int | None
    tokenizer_type: str
    tokenizer_path: Path | None
    test: str | None = None

    @property
    def files(self) -> list[Path]:
        """The files that every process of a run reads."""
        prefixes = [prefix for prefix in (*self.train, self.validation, self.test) if prefix is not None]
        pairs = [Path(f"{prefix}{ending}") for prefix in prefixes for ending in (".bin", ".idx")]
        return pairs + ([] if self.tokenizer_path is None else [self.tokenizer_path])

    def load_tokenizer(self) -> Tokenizer:
        """The tokenizer that made the token files. Raises as `data.tokenizer.load_tokenizer`."""
        return load_tokenizer(self.tokenizer_type, self.tokenizer_path)


def prepared_data(data: DataConfig, vocab_size: int) -> PreparedData:
    """The data of a configuration, prepared if need be.

    Args:
        vocab_size: rows of the model's embedding, which every token id must be under.

    Raises:
        ValueError, FileNotFoundError: as `prepare_corpus` and `IndexedTokens`, or a tokenizer with more entries than the
            model has.
    """
    if data.corpus is not None:
        corpus = prepare(data)
        result = PreparedData(
            train=(str(corpus.train_prefix),),
            validation=None if corpus.validation_prefix is None else str(corpus.validation_prefix),
            train_tokens=IndexedTokens(corpus.train_prefix).num_tokens,
            validation_text=corpus.validation_text_path,
            validation_bytes=corpus.manifest["validation"]["bytes"] if corpus.validation_prefix else None,
            tokenizer_type=corpus.tokenizer_type,
            tokenizer_path=corpus.tokenizer_path,
        )
    else:
        if not data.train_files:
            raise ValueError("data.corpus and data.train are both empty: name one of them")
        manifest = read_data_manifest(data.validation) if data.validation is not None else None
        result = PreparedData(
            train=data.train_files,
            validation=data.validation,
            train_tokens=sum(IndexedTokens(prefix).num_tokens for prefix in data.train_files),
            validation_text=None,
            validation_bytes=None if manifest is None else manifest.get("bytes"),
            tokenizer_type=data.tokenizer.type,
            tokenizer_path=None if data.tokenizer.path is None else Path(data.tokenizer.path),
            test=data.test,
        )
    tokenizer = result.load_tokenizer()
    for prefix in (*result.train, result.validation, result.test):
        if prefix is not None:
            check_tokenizer(prefix, tokenizer)
    needed = max(tokenizer.vocab_size, tokenizer.mask_id + 1) if data.objective == "masked" else tokenizer.vocab_size
    if needed > vocab_size:
        entries = f"{tokenizer.vocab_size} entries" + (" and a mask token" if needed > tokenizer.vocab_size else "")
        raise ValueError(
            f"model.vocab_size = {vocab_size} is smaller than the tokenizer's {entries} "
            f"({result.tokenizer_path or result.tokenizer_type}); set model.vocab_size to {padded_vocab_size(needed)}"
        )
    return result


__all__ = [
    "CheckpointError",
    "FoundModel",
    "LoadedModel",
    "PreparedData",
    "build_model",
    "check_same_tokenizer",
    "data_config",
    "find_model",
    "keep_tokenizer",
    "load_model",
    "model_config",
    "prepare",
    "prepared_data",
    "read_tokenizer",
    "run_folder",
    "run_of",
]
