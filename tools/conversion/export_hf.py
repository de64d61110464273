"""Export a checkpoint to a Hugging Face folder: weights, configuration, tokenizer, model card, source.

The folder is written under a temporary name and then renamed, so that it is never incomplete.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from data.atomic_io import atomic_folder
from data.tokenizer import Tokenizer
from megatron_lite.checkpoint.checksums import FILE_NAME, checksums_text, file_sha256
from megatron_lite.checkpoint.reader import Weights, read_config_yaml, read_manifest, resolve
from megatron_lite.checkpoint.safetensors_stream import write_tensors
from megatron_lite.dtypes import DTYPES, torch_name
from models.config import ModelConfig
from tools.conversion.export_images import class_names, write_image_description
from tools.conversion.flatten_source import flat_source
from tools.conversion.foreign.fla_delta import fla_config
from tools.conversion.foreign.mapping import Renamed
from tools.conversion.foreign.registry import translate
from tools.conversion.hf_folder import read_config
from tools.conversion.logit_parity import real_text
from tools.conversion.model_card import model_card
from tools.conversion.tokenizer import export_tokenizer, tokenizer_at
from tools.loading.image_data import CLASSES
from tools.loading.model import check_shapes, model_config, run_folder
from tools.loading.tokenizer import has_tokenizer, read_tokenizer, save_tokenizer

# Folder of an export with the run's configuration and tokenizer, which an import needs for further training.
TRAINING_FOLDER = "training"


@dataclass(frozen=True)
class Export:
    """Describe an export that was written.

    Attributes:
        folder: the Hugging Face folder.
        checkpoint: the exported step folder.
        weights: its weights.
        config: the run's configuration as plain YAML values.
        tokenizer: the trainer's; None if the run was imported without one.
        parameters: number of weights; a tied matrix counts once.
        bytes: size of the weights.
        shards: number of weight files.
    """

    folder: Path
    checkpoint: Path
    weights: Weights
    config: dict[str, Any]
    tokenizer: Tokenizer | None
    parameters: int
    bytes: int
    shards: int


def export(
    checkpoint: Path | str,
    folder: Path,
    *,
    dtype: str = "fp32",
    max_shard_bytes: int = 5 * 10**9,
    form: str = "metalion",
    overwrite: bool = False,
    licence: str = "apache-2.0",
    tokenizer_file: Path | None = None,
    text: Path | None = None,
    progress: bool = False,
) -> Export:
    """Write `folder` from a step folder, or from the newest checkpoint of a run.

    Args:
        dtype: "fp32", "bf16" or "fp16" for the stored weights.
        max_shard_bytes: largest size of a weight file; a single larger tensor has its own file.
        form: "metalion" for the project's own format with its source, "fla" for flash-linear-attention's without source.
        overwrite: replace an existing export.
        tokenizer_file: as for `tokenizer_at`; None for the run's tokenizer.
        text: file to compare logits on; checked as by `real_text` before anything is written.

    Raises:
        CheckpointError: a missing or damaged checkpoint.
        FileExistsError: `folder` exists.
        FileNotFoundError: the tokenizer's file is missing.
        ValueError: an unknown dtype, a model that the format cannot hold, weights that do not fit the configuration, or a
            tokenizer that is larger than the embedding or cannot be exported.
    """
    if dtype not in ("fp32", "bf16", "fp16"):
        raise ValueError(f"--dtype {dtype}: allowed are fp32, bf16, fp16")
    check_target(folder, overwrite)
    source = resolve(checkpoint)
    if overwrite and source.resolve().is_relative_to(folder.resolve()):
        raise FileExistsError(f"{source} is inside {folder}, which --overwrite would remove: give another folder")
    config = read_config_yaml(source)
    model = model_config(config)
    fla = fla_config(model) if form == "fla" else None
    weights = Weights(source)
    check_shapes(weights.shapes, model, source)
    run = run_folder(source, config)
    images = model.image_size is not None
    names = class_names(run, model.vocab_size) if images else []
    if images and (tokenizer_file is not None or text is not None):
        raise ValueError(f"{source} is an image classifier, which reads no text: leave --tokenizer and --text out")
    tokenizer = None
    if not images:
        tokenizer = _tokenizer(run, config, source) if tokenizer_file is None else tokenizer_at(tokenizer_file)
    if tokenizer is not None:
        check_vocabulary(tokenizer.vocab_size, model.vocab_size, str(tokenizer.path or tokenizer.type))
        if text is not None:
            real_text(config, tokenizer, text)

    with atomic_folder(folder, overwrite=overwrite) as temporary:
        length = int(config["batch"]["sequence_length"])
        stored: Mapping[str, Tensor] = weights
        shapes = weights.shapes
        if fla is None:
            if images:
                write_image_description(temporary, model, config, torch_name(DTYPES[dtype]), names)
            else:
                write_description(temporary, model, tokenizer, dtype, length)
            write_training_folder(temporary, config, tokenizer, names)
        else:
            write_fla_description(temporary, fla, tokenizer, dtype, length)
            foreign = translate(fla)
            stored = Renamed(foreign, weights)
            with torch.device("meta"):
                of_shapes = {name: torch.empty(shape) for name, shape in weights.shapes.items()}
            shapes = {name: tuple(x.shape) for name, x in Renamed(foreign, of_shapes).items()}
        sizes = write_shards(temporary, stored, shapes, DTYPES[dtype], max_shard_bytes, progress=progress)
        parameters = sum(math.prod(shape) for shape in weights.shapes.values())
        card = model_card(
            config, model, run=run, checkpoint=source, parameters=parameters, dtype=dtype, licence=licence
        )
        files = [path for path in temporary.rglob("*") if path.is_file()]
        checksums = {path.relative_to(temporary).as_posix(): file_sha256(path) for path in files}
        (temporary / FILE_NAME).write_text(checksums_text(checksums), encoding="utf-8")
        if fla is None:
            (temporary / "README.md").write_text(card, encoding="utf-8")  # without a hash, because users edit it
    return Export(folder, source, weights, config, tokenizer, parameters, sum(sizes), len(sizes))


def _tokenizer(run: Path, config: dict[str, Any], checkpoint: Path) -> Tokenizer | None:
    manifest = read_manifest(checkpoint)
    return read_tokenizer(run, config, manifest) if has_tokenizer(run, config, manifest) else None


def check_target(folder: Path, overwrite: bool) -> None:
    """Raise FileExistsError if `folder` exists, or with `overwrite` if it is not an export."""
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return
    if not overwrite:
        raise FileExistsError(f"{folder} exists: give another folder, or replace it with --overwrite")
    try:
        # An export in flash-linear-attention's format is recognised by its hashes.
        is_export = read_config(folder)["model_type"] == "metalion" or (folder / FILE_NAME).is_file()
    except (OSError, ValueError):
        is_export = False
    if not is_export:
        raise FileExistsError(
            f"{folder} is not an export of this project, and --overwrite replaces only exports: give another folder"
        )


def check_vocabulary(entries: int, rows: int, tokenizer: str) -> None:
    """Raise ValueError if the tokenizer has more entries than the embedding has rows."""
    if entries > rows:
        raise ValueError(
            f"the tokenizer {tokenizer} has {entries} entries and the embedding {rows} rows: give the tokenizer that the "
            "model was trained with"
        )


def write_description(
    folder: Path, model: ModelConfig, tokenizer: Tokenizer | None, dtype: str, sequence_length: int
) -> None:
    """Write config.json, generation_config.json, the source files, and the tokenizer if there is one."""
    causal = not model.bidirectional_mixers()
    special, entries = {}, model.vocab_size
    if tokenizer is not None:
        special = export_tokenizer(tokenizer, folder, causal=causal, max_length=sequence_length)
        entries = tokenizer.vocab_size
    main_class = "MetalionForCausalLM" if causal else "MetalionForMaskedLM"
    main_auto = "AutoModelForCausalLM" if causal else "AutoModelForMaskedLM"
    ids = _ids(special)
    config = {
        "architectures": [main_class],
        "auto_map": {
            "AutoConfig": "configuration_metalion.MetalionConfig",
            "AutoModel": "modeling_metalion.MetalionModel",
            main_auto: f"modeling_metalion.{main_class}",
            "AutoModelForSequenceClassification": "modeling_metalion.MetalionForSequenceClassification",
        },
        "model_type": "metalion",
        **dataclasses.asdict(model),
        **ids,
        "dtype": torch_name(DTYPES[dtype]),
        "use_cache": True,
    }
    _write_json(folder / "config.json", config)
    if causal:
        # The padding rows of the embedding have no meaning: never sample them.
        padding = list(range(entries, model.vocab_size))
        _write_json(folder / "generation_config.json", {**ids, **({"suppress_tokens": padding} if padding else {})})
    for name, text in flat_source(model.mixers).items():
        (folder / name).write_text(text, encoding="utf-8")


def write_fla_description(
    folder: Path, config: Mapping[str, Any], tokenizer: Tokenizer | None, dtype: str, sequence_length: int
) -> None:
    """Write config.json of flash-linear-attention's format, and the tokenizer if there is one. config: of `fla_config`."""
    special = {}
    if tokenizer is not None:
        special = export_tokenizer(tokenizer, folder, causal=True, max_length=sequence_length)
    _write_json(folder / "config.json", {**config, **_ids(special), "dtype": torch_name(DTYPES[dtype])})


def _ids(special: Mapping[str, int]) -> dict[str, int]:
    return {f"{role}_token_id": special[role] for role in ("bos", "eos", "pad") if role in special}


def write_training_folder(
    folder: Path, config: Mapping[str, Any], tokenizer: Tokenizer | None, names: Sequence[str]
) -> None:
    """Write the folder `training/` with the run's configuration, tokenizer and class names, for a later import.

    names: empty for a language model.
    """
    import yaml

    training = folder / TRAINING_FOLDER
    training.mkdir()
    (training / "config.yml").write_text(
        yaml.safe_dump(dict(config), sort_keys=False, allow_unicode=True), encoding="utf-8"
    )
    if tokenizer is not None:
        save_tokenizer(tokenizer, training)
    if names:
        _write_json(training / CLASSES, names)


def write_shards(
    folder: Path,
    weights: Mapping[str, Tensor],
    shapes: Mapping[str, tuple[int, ...]],
    dtype: torch.dtype,
    max_shard_bytes: int,
    *,
    progress: bool = False,
) -> list[int]:
    """Write one or several safetensors files, with one tensor in memory at a time. Return the bytes of each file."""
    from huggingface_hub import split_state_dict_into_shards_factory

    from data.progress import ProgressBar

    sizes = {name: math.prod(shape) * dtype.itemsize for name, shape in shapes.items()}
    split = split_state_dict_into_shards_factory(
        sizes,
        get_storage_size=lambda size: size,
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=max_shard_bytes,
    )
    total = sum(sizes.values())
    with ProgressBar(total=total, unit="B", unit_scale=True, desc="weights", disable=not progress) as bar:

        def read(names: Sequence[str]) -> Iterator[tuple[str, Tensor]]:
            for name in names:
                yield name, weights[name]
                bar.update(sizes[name])

        for file, names in split.filename_to_tensors.items():
            write_tensors(folder / file, {name: shapes[name] for name in names}, read(names), dtype=dtype)
    if split.is_sharded:
        index = {"metadata": {"total_size": total}, "weight_map": split.tensor_to_filename}
        _write_json(folder / "model.safetensors.index.json", index)
    return [(folder / file).stat().st_size for file in split.filename_to_tensors]


def _write_json(path: Path, values: Any) -> None:
    path.write_text(json.dumps(values, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
