"""Import a Hugging Face folder as a run: checkpoint, tokenizer and configuration. Weights are copied tensor by tensor."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from data.atomic_io import atomic_folder, write_json
from data.tokenizer import Tokenizer
from megatron_lite.checkpoint.storage import write_weights
from megatron_lite.config.bounded_yaml import BoundedLoader
from megatron_lite.config.loader import ConfigError, dump_config, load_config
from megatron_lite.parallel.sharding_plan import sharding_specs
from models.config import ModelConfig
from models.language_model import LanguageModel
from tools.conversion.export_hf import TRAINING_FOLDER, check_vocabulary
from tools.conversion.export_images import class_names
from tools.conversion.export_source import check_source, limit_progress_bars
from tools.conversion.foreign.mapping import check_names, make
from tools.conversion.foreign.metala_reference import metala_logits
from tools.conversion.foreign.registry import OF_FLA, translate
from tools.conversion.hf_folder import Tensors, check_folder, read_config
from tools.conversion.logit_parity import real_text
from tools.conversion.tokenizer import tokenizer_in
from tools.loading.image_data import CLASSES
from tools.loading.tokenizer import save_tokenizer, saved_tokenizer

_COPY = f"copy it again, or remove {TRAINING_FOLDER}/ to start from default values"


@dataclass(frozen=True)
class Import:
    """Describe an import that was written.

    Attributes:
        run: the run's folder, with a `config.yml` for train.py.
        checkpoint: the step folder.
        kind: `model_type` of the imported folder.
        model: its architecture here.
        config: the whole configuration as plain YAML values.
        tokenizer: None if the folder has none.
        parameters: number of weights.
    """

    run: Path
    checkpoint: Path
    kind: str
    model: ModelConfig
    config: dict[str, Any]
    tokenizer: Tokenizer | None
    parameters: int


def import_folder(
    folder: Path,
    run: Path,
    *,
    overwrite: bool = False,
    text: Path | None = None,
    trust_remote_code: bool = False,
) -> Import:
    """Write the run folder `run` from a Hugging Face folder.

    Args:
        overwrite: replace an existing run folder in which nothing was trained.
        text: file to compare logits on; checked as by `real_text` before anything is written.
        trust_remote_code: accept an export whose source differs from this version's.

    Raises:
        FileExistsError: `run` exists.
        FileNotFoundError: not a Hugging Face folder, or a missing file.
        ValueError: an unknown kind of model or setting, missing, unknown or wrongly shaped tensors, pickles, a tokenizer
            that is larger than the embedding, or an export with other source.
        CheckpointError: the checkpoint could not be written.
    """
    _check_run(run, overwrite)
    if overwrite and folder.resolve().is_relative_to(run.resolve()):
        raise FileExistsError(f"{folder} is inside {run}, which --overwrite would remove: give another run folder")
    theirs = read_config(folder)
    check_folder(folder)
    _check_dtype(theirs, folder / "config.json")
    try:
        foreign = translate(theirs)
    except KeyError as error:
        raise ValueError(
            f"{folder / 'config.json'} has no key {error}, which a {theirs['model_type']} needs: add it"
        ) from error
    except (ArithmeticError, AttributeError, RuntimeError, TypeError) as error:
        raise ValueError(
            f"{folder / 'config.json'} has a value that is not allowed ({error}): copy it again"
        ) from error
    _check_special_ids(theirs, foreign.model.vocab_size, folder / "config.json")
    if theirs["model_type"] == "metalion" and not trust_remote_code:
        check_source(folder, foreign.model.mixers, images=foreign.model.image_size is not None)
    tensors = Tensors(folder)
    check_names(foreign, tensors, str(folder))
    with torch.device("meta"):
        model = LanguageModel(foreign.model)
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    tokenizer = _tokenizer(folder)
    if tokenizer is not None:
        check_vocabulary(tokenizer.vocab_size, foreign.model.vocab_size, str(tokenizer.path or tokenizer.type))
        if text is not None:
            real_text({}, tokenizer, text)
    with atomic_folder(run, overwrite=overwrite) as temporary:
        if tokenizer is not None:
            save_tokenizer(tokenizer, temporary)
        config = _configuration(folder, run, temporary, theirs, foreign.model, tokenizer)
        if foreign.model.image_size is not None:
            write_json(temporary / CLASSES, class_names(folder / TRAINING_FOLDER, foreign.model.vocab_size))

        def read() -> Iterator[tuple[str, Tensor]]:
            from data.progress import ProgressBar

            for name, shape in ProgressBar(shapes.items(), desc="weights"):
                yield name, make(foreign, name, tensors, shape)

        specs = sharding_specs(model)
        written = write_weights(temporary / "checkpoints", read(), shapes, specs=specs, config_yaml=config)
        (temporary / "config.yml").write_text(config, encoding="utf-8")
    checkpoint = run / written.relative_to(temporary)
    import yaml

    parameters = sum(parameter.numel() for parameter in model.parameters())
    kind = str(theirs["model_type"])
    return Import(run, checkpoint, kind, foreign.model, yaml.safe_load(config), tokenizer, parameters)


@torch.no_grad()
def original_logits(
    folder: Path, kind: str, model: ModelConfig, tokens: Tensor, *, trust_remote_code: bool = False
) -> tuple[Tensor | None, str]:
    """Return the original model's float32 logits and the name of its code, or None and the reason.

    trust_remote_code: load an export with the folder's source, not with the project's classes.
    """
    from tools.conversion.logit_parity import exported_logits

    origin = "the original's"
    if kind == "metalion":
        return exported_logits(folder, tokens, model, trust_remote_code=trust_remote_code), origin
    if kind == "metala":
        equations = "those of MetaLA's equations, computed token by token"
        return metala_logits(read_config(folder), Tensors(folder), tokens), equations
    if kind in OF_FLA:
        if not torch.cuda.is_available():
            return None, "flash-linear-attention runs on a GPU only"
        import fla.models  # noqa: F401 - registers its models with transformers
    from transformers import AutoModelForCausalLM

    limit_progress_bars()
    original = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=False, dtype=torch.float32).eval()
    if kind in OF_FLA:
        return original.cuda()(tokens.cuda()).logits.float().cpu(), origin
    return original(tokens).logits.float(), origin


def processes_per_replica(config: Mapping[str, Any]) -> int:
    """Return the number of processes per model replica in the layout of a configuration."""
    parallel = config.get("parallel") or {}
    return math.prod(parallel.get(key) or 1 for key in ("tensor", "pipeline", "context"))


def _check_run(run: Path, overwrite: bool) -> None:
    if not run.exists() or (run.is_dir() and not any(run.iterdir())):
        return
    if not overwrite:
        raise FileExistsError(f"{run} exists: give another run folder, or replace it with --overwrite")
    # With run.directory a run writes its metrics to another folder.
    steps = {path.name for path in run.glob("checkpoints/step_*")}
    if (run / "metrics.jsonl").exists() or not (run / "checkpoints").is_dir() or steps - {"step_00000000"}:
        raise FileExistsError(
            f"{run} holds a trained run, or no run, and --overwrite replaces only untrained imports: give another folder"
        )


def _check_dtype(theirs: Mapping[str, Any], file: Path) -> None:
    for key in ("dtype", "torch_dtype"):
        name = theirs.get(key)
        dtype = getattr(torch, str(name), None)
        if name is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            raise ValueError(
                f"{file}: {key} = {json.dumps(name)}: a floating-point type of torch, such as float32, or null is allowed; "
                "correct it, or copy the file again"
            )


def _check_special_ids(theirs: Mapping[str, Any], vocab_size: int, file: Path) -> None:
    for key in ("bos_token_id", "eos_token_id"):
        given = theirs.get(key)
        for token in given if isinstance(given, list) else [given]:
            if token is not None and (type(token) is not int or not 0 <= token < vocab_size):
                raise ValueError(
                    f"{file}: {key} = {json.dumps(given)}: token ids from 0 to vocab_size - 1 = {vocab_size - 1}, or null, are "
                    "allowed; correct it, or copy the file again"
                )


def _tokenizer(folder: Path) -> Tokenizer | None:
    return saved_tokenizer(folder / TRAINING_FOLDER) or tokenizer_in(folder)


def _configuration(
    folder: Path, run: Path, temporary: Path, theirs: Mapping[str, Any], model: ModelConfig, tokenizer: Tokenizer | None
) -> str:
    """Return the resolved configuration of the imported run: the export's, or default values.

    temporary: folder to which `run` is being written, with its tokenizer.
    """
    import yaml

    exported = folder / TRAINING_FOLDER / "config.yml"
    if exported.is_file():
        try:
            values = yaml.load(exported.read_text(encoding="utf-8"), BoundedLoader)
        except (UnicodeDecodeError, yaml.YAMLError) as error:
            raise ValueError(f"{exported} is no YAML ({' '.join(str(error).split())}): {_COPY}") from error
        sections = (
            [values.get(name, {}) for name in ("run", "data", "checkpoint", "parallel")]
            if isinstance(values, dict)
            else []
        )
        if not sections or "data" not in values or not all(isinstance(section, dict) for section in sections):
            raise ValueError(f"{exported} is no configuration, or a part of one: {_COPY}")
    else:
        length = int(model.max_positions or theirs.get("max_position_embeddings") or 2048)
        values = {
            "data": {"corpus": "stdlib", "objective": "masked" if model.bidirectional_mixers() else "causal"},
            "batch": {"sequence_length": min(length, 2048), "micro_batch_size": 1, "global_batch_size": 8},
            "optimizer": {"lr": 1e-5},
            "schedule": {"train_steps": 1000, "warmup_fraction": 0.01},
        }
    if model.image_size is not None and not exported.is_file():
        values["data"] = {"objective": "classification", "images": {"train": "train.parquet"}}  # a placeholder
        values["batch"] = {"micro_batch_size": 8, "global_batch_size": 8}
    values["run"] = {**values.get("run", {}), "name": run.name, "directory": str(run)}
    values["model"] = {key: list(v) if isinstance(v, tuple) else v for key, v in asdict(model).items() if v is not None}
    checkpoint = {**values.get("checkpoint", {}), "directory": str(run / "checkpoints"), "resume": "auto"}
    values["checkpoint"] = checkpoint
    data = dict(values["data"])
    if tokenizer is not None:
        saved = json.loads((temporary / "tokenizer" / "description.json").read_text(encoding="utf-8"))
        file = str(run / "tokenizer" / saved["file"]) if saved["file"] else None
        data["tokenizer"] = {**(data.get("tokenizer") or {}), "type": tokenizer.type, "path": file}
    elif not exported.is_file() and model.image_size is None:
        data["tokenizer"] = {"type": "bytes"}  # a placeholder that needs no file
    values["data"] = data
    draft = temporary / ".config.yml.writing"
    draft.write_text(yaml.safe_dump(_without_empty(values), sort_keys=False), encoding="utf-8")
    try:
        # The fewest processes for the layout of the exported run.
        processes = processes_per_replica(values)
        return dump_config(load_config([draft], [], model_type=ModelConfig, world_size=processes))
    except ConfigError as error:
        drafts = "|".join(re.escape(name) for name in (str(draft), os.path.relpath(draft)))
        target = str(run / "config.yml")
        problem = ConfigError(re.sub(rf"({drafts}):\d+", lambda _: target, line) for line in error.problems)
        raise (ValueError(f"{exported}: {problem}") if exported.is_file() else problem) from None
    finally:
        draft.unlink()


def _without_empty(values: Any) -> Any:
    if isinstance(values, Mapping):
        return {key: _without_empty(value) for key, value in values.items() if value is not None}
    return values
