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

from data.atomic_io import atomic_folder
from data.tokenizer import Tokenizer
from megatron_lite.checkpoint.storage import write_weights
from megatron_lite.config.bounded_yaml import BoundedLoader
from megatron_lite.config.loader import ConfigError, dump_config, load_config
from megatron_lite.parallel.sharding_plan import sharding_specs
from models.config import ModelConfig
from models.language_model import LanguageModel
from tools.conversion.export_hf import TRAINING_FOLDER, check_vocabulary
from tools.conversion.export_source import check_source
from tools.conversion.foreign.mapping import check_names, make
from tools.conversion.foreign.metala_reference import metala_logits
from tools.conversion.foreign.registry import OF_FLA, translate
from tools.conversion.hf_folder import Tensors, check_folder, read_config
from tools.conversion.logit_parity import real_text
from tools.conversion.tokenizer import tokenizer_in
from tools.loading.tokenizer import save_tokenizer, saved_tokenizer

_COPY = f"copy it again, or remove {TRAINING_FOLDER}/ to begin with placeholders"


@dataclass(frozen=True)
class Import:
    """Describe an import that was written.

    Attributes:
        run: the run's folder, with a `config.yml` for train.py.
        checkpoint: the step folder.
        kind: `model_type` of the folder that was read.
        model: its architecture here.
        config: the whole configuration as plain YAML values.
        tokenizer: None where the folder has none.
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
    progress: bool = False,
    trust_remote_code: bool = False,
) -> Import:
    """Write the run folder `run` from a Hugging Face folder.

    Args:
        overwrite: replace a run folder that is there, if nothing was trained in it.
        text: what logits are to be compared on; refused as by `real_text` before anything is written.
        trust_remote_code: take an export whose source is not this version's.

    Raises:
        FileExistsError: `run` is there already.
        FileNotFoundError: no Hugging Face folder, or a file of it is missing.
        ValueError: another kind of model, a setting without counterpart, tensors that are missing, too many or of another
            shape, pickles, a tokenizer that is larger than the embedding, or an export with other source.
        CheckpointError: the checkpoint could not be written.
    """
    _check_run(run, overwrite)
    if overwrite and folder.resolve().is_relative_to(run.resolve()):
        raise FileExistsError(f"{folder} lies in {run}, which --overwrite would remove: name another run folder")
    theirs = read_config(folder)
    check_folder(folder)
    try:
        foreign = translate(theirs)
    except KeyError as error:
        raise ValueError(
            f"{folder / 'config.json'} has no key {error}, which a {theirs['model_type']} needs: write it there"
        ) from error
    except (ArithmeticError, AttributeError, TypeError) as error:
        raise ValueError(
            f"{folder / 'config.json'} holds a value of the wrong kind ({error}): copy it again"
        ) from error
    if theirs["model_type"] == "metalion" and not trust_remote_code:
        check_source(folder, foreign.model.mixers)
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
    with atomic_folder(run, overwrite=overwrite) as aside:
        if tokenizer is not None:
            save_tokenizer(tokenizer, aside)
        config = _configuration(folder, run, aside, theirs, foreign.model, tokenizer)

        def read() -> Iterator[tuple[str, Tensor]]:
            from tqdm import tqdm

            for name, shape in tqdm(shapes.items(), desc="weights", disable=not progress):
                yield name, make(foreign, name, tensors, shape)

        written = write_weights(aside / "checkpoints", read(), shapes, specs=sharding_specs(model), config_yaml=config)
        (aside / "config.yml").write_text(config, encoding="utf-8")
    checkpoint = run / written.relative_to(aside)
    import yaml

    parameters = sum(parameter.numel() for parameter in model.parameters())
    kind = str(theirs["model_type"])
    return Import(run, checkpoint, kind, foreign.model, yaml.safe_load(config), tokenizer, parameters)


@torch.no_grad()
def original_logits(
    folder: Path, kind: str, model: ModelConfig, tokens: Tensor, *, trust_remote_code: bool = False
) -> tuple[Tensor | None, str]:
    """Return the original model's float32 logits and the name of its code, or None and the reason.

    trust_remote_code: of an export, run the folder's own source; else the project's own classes load its weights.
    """
    from tools.conversion.logit_parity import exported_logits

    whose = "the original's"
    if kind == "metalion":
        return exported_logits(folder, tokens, model, trust_remote_code=trust_remote_code), whose
    if kind == "metala":
        equations = "those of MetaLA's equations, computed token by token"
        return metala_logits(read_config(folder), Tensors(folder), tokens), equations
    if kind in OF_FLA:
        if not torch.cuda.is_available():
            return None, "flash-linear-attention runs on a GPU only"
        import fla.models  # noqa: F401 - registers its models with transformers
    from transformers import AutoModelForCausalLM

    original = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=False, dtype=torch.float32).eval()
    if kind in OF_FLA:
        return original.cuda()(tokens.cuda()).logits.float().cpu(), whose
    return original(tokens).logits.float(), whose


def processes_of_a_copy(config: Mapping[str, Any]) -> int:
    """Return the number of processes per copy of the model in the layout of a configuration."""
    parallel = config.get("parallel") or {}
    return math.prod(parallel.get(key) or 1 for key in ("tensor", "pipeline", "context"))


def _check_run(run: Path, overwrite: bool) -> None:
    if not run.exists() or (run.is_dir() and not any(run.iterdir())):
        return
    if not overwrite:
        raise FileExistsError(f"{run} exists: name another run folder, or replace it with --overwrite")
    # A run may write its metrics elsewhere (run.directory) and its checkpoints still here.
    steps = {path.name for path in run.glob("checkpoints/step_*")}
    if (run / "metrics.jsonl").exists() or not (run / "checkpoints").is_dir() or steps - {"step_00000000"}:
        raise FileExistsError(f"{run} was trained in, or is no run, so --overwrite leaves it alone: name another")


def _tokenizer(folder: Path) -> Tokenizer | None:
    if (kept := saved_tokenizer(folder / TRAINING_FOLDER)) is not None:
        return kept
    return tokenizer_in(folder)


def _configuration(
    folder: Path, run: Path, aside: Path, theirs: Mapping[str, Any], model: ModelConfig, tokenizer: Tokenizer | None
) -> str:
    """Return the resolved configuration of the imported run: the export's, or defaults to be adapted.

    Args:
        aside: where `run` is being written, with its tokenizer.
    """
    import yaml

    side = folder / TRAINING_FOLDER / "config.yml"
    if side.is_file():
        try:
            values = yaml.load(side.read_text(encoding="utf-8"), BoundedLoader)
        except (UnicodeDecodeError, yaml.YAMLError) as error:
            raise ValueError(f"{side} is no YAML ({' '.join(str(error).split())}): {_COPY}") from error
        sections = (
            [values.get(name, {}) for name in ("run", "data", "checkpoint", "parallel")]
            if isinstance(values, dict)
            else []
        )
        if not sections or "data" not in values or not all(isinstance(section, dict) for section in sections):
            raise ValueError(f"{side} is no configuration, or a part of one: {_COPY}")
    else:
        length = int(model.max_positions or theirs.get("max_position_embeddings") or 2048)
        values = {
            "data": {"corpus": "stdlib", "objective": "masked" if model.bidirectional_mixers() else "causal"},
            "batch": {"sequence_length": min(length, 2048), "micro_batch_size": 1, "global_batch_size": 8},
            "optimizer": {"lr": 1e-5},
            "schedule": {"train_steps": 1000, "warmup_fraction": 0.01},
        }
    values["run"] = {**values.get("run", {}), "name": run.name, "directory": str(run)}
    values["model"] = {key: list(v) if isinstance(v, tuple) else v for key, v in asdict(model).items() if v is not None}
    checkpoint = {**values.get("checkpoint", {}), "directory": str(run / "checkpoints"), "resume": "auto"}
    values["checkpoint"] = checkpoint
    data = dict(values["data"])
    if tokenizer is not None:
        kept = json.loads((aside / "tokenizer" / "description.json").read_text(encoding="utf-8"))
        file = str(run / "tokenizer" / kept["file"]) if kept["file"] else None
        data["tokenizer"] = {**(data.get("tokenizer") or {}), "type": tokenizer.type, "path": file}
    elif not side.is_file():
        data["tokenizer"] = {"type": "bytes"}  # there is none: a placeholder that asks for no file
    values["data"] = data
    draft = aside / ".config.yml.writing"
    draft.write_text(yaml.safe_dump(_without_empty(values), sort_keys=False), encoding="utf-8")
    try:
        # As few processes as the layout of an export's run can have.
        processes = processes_of_a_copy(values)
        return dump_config(load_config([draft], [], model_type=ModelConfig, world_size=processes))
    except ConfigError as error:
        drafts = "|".join(re.escape(name) for name in (str(draft), os.path.relpath(draft)))
        own = str(run / "config.yml")
        problem = ConfigError(re.sub(rf"({drafts}):\d+", lambda _: own, line) for line in error.problems)
        raise (ValueError(f"{side}: {problem}") if side.is_file() else problem) from None
    finally:
        draft.unlink()


def _without_empty(values: Any) -> Any:
    if isinstance(values, Mapping):
        return {key: _without_empty(value) for key, value in values.items() if value is not None}
    return values
