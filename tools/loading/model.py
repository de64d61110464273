"""Load a checkpoint as a model with its tokenizer, for generation, evaluation and the converters.

The layout that wrote the checkpoint does not matter.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from data.tokenizer import Tokenizer
from megatron_lite.checkpoint.reader import read_config_yaml, read_manifest, read_weights, resolve
from megatron_lite.dtypes import DTYPES
from megatron_lite.fault_tolerance.finite_check import names_not_finite
from models.config import ModelConfig
from models.language_model import LanguageModel
from tools.cli.devices import device_of
from tools.loading.tokenizer import read_tokenizer


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
        """Return the device of the weights."""
        return next(self.model.parameters()).device

    @property
    def step(self) -> int:
        """Return the number of training steps of the weights."""
        return int(self.checkpoint.name.rpartition("_")[2])

    @property
    def num_parameters(self) -> int:
        """Return the number of parameters."""
        return sum(parameter.numel() for parameter in self.model.parameters())


@dataclass(frozen=True)
class LocatedCheckpoint:
    """A checkpoint before its weights are read.

    Attributes:
        checkpoint: the step folder.
        config: the configuration that it was trained with, as plain YAML values.
        manifest: the content of its manifest.
        model: the configuration of the model.
        device, dtype: of the weights when they are loaded.
    """

    checkpoint: Path
    config: dict[str, Any]
    manifest: dict[str, Any]
    model: ModelConfig
    device: torch.device
    dtype: torch.dtype

    @property
    def run(self) -> Path:
        """Return the folder of the run."""
        return run_folder(self.checkpoint, self.config)

    def read_tokenizer(self) -> Tokenizer:
        """Return the run's tokenizer. Raises as `tools.loading.tokenizer.read_tokenizer` and `refuse_images`."""
        self.refuse_images()
        return read_tokenizer(self.run, self.config, self.manifest)

    def refuse_images(self) -> None:
        """Raise ValueError for an image classifier."""
        if self.model.image_size is not None:
            raise ValueError(
                f"{self.checkpoint} is an image classifier, and this command reads text; python -m tools.image_sizes measures "
                "it, and its export classifies other images (python -m tools.convert_hf export)"
            )


def locate_checkpoint(path: Path | str, *, device: str = "auto", dtype: str = "auto") -> LocatedCheckpoint:
    """Find a checkpoint and check all that needs no weights. This takes milliseconds.

    Args:
        path: a run folder, a checkpoints folder or a step folder. The newest of several checkpoints is used.
        device: as `device_of`.
        dtype: "fp32", "bf16", "fp16", "fp64", or "auto": bf16 on a GPU, fp32 on a CPU.

    Raises:
        CheckpointError: there is no checkpoint, its manifest or configuration is damaged, or a file is cut short.
        ValueError: an unknown dtype, a device that does not exist, or as `ModelConfig`.
    """
    place = device_of(device)
    if dtype == "auto":
        dtype = "fp32" if place.type == "cpu" else "bf16"
    if dtype not in DTYPES:
        raise ValueError(f"dtype = {dtype!r}: allowed are auto, {', '.join(DTYPES)}")
    checkpoint = resolve(path)
    config = read_config_yaml(checkpoint)
    manifest = read_manifest(checkpoint)
    return LocatedCheckpoint(checkpoint, config, manifest, model_config(config), place, DTYPES[dtype])


def load_model(path: Path | str, *, device: str = "auto", dtype: str = "auto") -> LoadedModel:
    """Load a checkpoint. Arguments and errors as `locate_checkpoint` and `load_located`."""
    return load_located(locate_checkpoint(path, device=device, dtype=dtype))


def load_located(located: LocatedCheckpoint, device: str | None = None) -> LoadedModel:
    """Load the weights and the tokenizer of a checkpoint.

    device: None for the device of `located`.

    Raises:
        CheckpointError: damaged weights.
        ValueError: weights that do not fit the stored configuration or overflow the dtype, or a tokenizer that is larger
            than the model's vocabulary.
        FileNotFoundError: the tokenizer is missing.
    """
    checkpoint, tokenizer = located.checkpoint, located.read_tokenizer()
    if tokenizer.vocab_size > located.model.vocab_size:
        raise ValueError(
            f"{checkpoint}: the tokenizer {tokenizer.path or tokenizer.type} has {tokenizer.vocab_size} entries and the "
            f"model {located.model.vocab_size} rows, so the model was trained with another tokenizer. Copy its folder"
            " tokenizer from where the run was made"
        )
    model = build_model(located.model, read_weights(checkpoint), checkpoint)
    model = model.to(device=located.device if device is None else device_of(device), dtype=located.dtype)
    if names := names_not_finite(model.named_parameters()):
        raise ValueError(f"{checkpoint}: too large for {located.dtype}: {', '.join(names[:8])}; set another dtype")
    return LoadedModel(model.eval().requires_grad_(False), tokenizer, located.config, checkpoint, located.run)


def model_config(config: dict[str, Any]) -> ModelConfig:
    """Return the section `model` of a checkpoint's configuration. Raises ValueError as `ModelConfig`."""
    try:
        return ModelConfig(**{key: value for key, value in config["model"].items() if value is not None})
    except TypeError as error:  # a missing or unknown key
        raise ValueError(f"the section model of the configuration: {error}") from error


def build_model(config: ModelConfig, weights: dict[str, Tensor], source: Path | str = "the weights") -> LanguageModel:
    """Return a model with tensors by their canonical names. The weights are not initialised first. Raises as `check_shapes`."""
    check_shapes({name: tuple(tensor.shape) for name, tensor in weights.items()}, config, source)
    with torch.device("meta"):
        model = LanguageModel(config)
    model.load_state_dict(weights, strict=False, assign=True)
    if config.tie_embeddings:
        model.head.weight = model.embedding.weight
    return model


def parameter_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return canonical name -> full shape of a model's parameters."""
    with torch.device("meta"):
        return {name: tuple(p.shape) for name, p in LanguageModel(config).named_parameters()}


def check_shapes(given: Mapping[str, tuple[int, ...]], config: ModelConfig, source: Path | str) -> None:
    """Raise ValueError naming missing and unknown tensors, with the nearest name, and wrong shapes."""
    needed = parameter_shapes(config)
    missing, unknown = needed.keys() - given.keys(), given.keys() - needed.keys()
    problems = [f"{name} is missing{nearest(name, unknown)}" for name in missing]
    problems += [f"{name} is unknown{nearest(name, needed)}" for name in unknown]
    problems += [
        f"{name} is {list(given[name])}, the configuration needs {list(shape)}"
        for name, shape in needed.items()
        if name in given and given[name] != shape
    ]
    if problems:
        raise ValueError(
            f"{source}: {len(problems)} tensors do not fit the configuration: {'; '.join(sorted(problems)[:6])}. Copy it again"
        )


def nearest(name: str, others: Iterable[str]) -> str:
    """Return " (nearest: NAME)", or an empty text if no name is similar."""
    close = difflib.get_close_matches(name, list(others), n=1)
    return f" (nearest: {close[0]})" if close else ""


def run_folder(checkpoint: Path, config: dict[str, Any]) -> Path:
    """Return the folder of the run that wrote a step folder, relative to the working folder if it is in it.

    It is the folder above `checkpoints`, or the configured folder if only that one has metrics.
    """
    parent = checkpoint.absolute().parent.parent
    if Path.cwd() in parent.parents:
        parent = parent.relative_to(Path.cwd())
    configured = Path(config["run"].get("directory") or f"runs/{config['run']['name']}")
    moved = not (parent / "metrics.jsonl").is_file() and (configured / "metrics.jsonl").is_file()
    return configured if moved else parent


def run_of(path: Path | str) -> Path:
    """Return the folder of the run that a path of `load_model` names. Raises CheckpointError as there."""
    checkpoint = resolve(path)
    return run_folder(checkpoint, read_config_yaml(checkpoint))
