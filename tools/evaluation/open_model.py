"""The model that `eval.py` was given, ready to answer the harness's requests: a checkpoint, or a Hugging Face model."""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tools.loading.model import FoundModel, LoadedModel


@dataclass(frozen=True)
class OpenedModel:
    """A model as the harness asks it.

    Attributes:
        lm: answers requests. name: what tables call it. out: the results file.
        facts: what results say about the model. loaded: a checkpoint of this project; None for a Hugging Face model.
        finish: removes the answers that were kept in case of an interruption.
        cache: where the answers of a Hugging Face model are kept until then, by a name of this model's own.
    """

    lm: Any
    name: str
    out: Path
    facts: dict[str, Any]
    loaded: LoadedModel | None
    finish: Callable[[], None]
    cache: Path | None = None


def is_huggingface(name: str) -> bool:
    """Whether a command-line word names a Hugging Face model: a folder with its config.json, or owner/name on the hub."""
    path = Path(name)
    if path.is_dir():
        return (path / "config.json").is_file()
    return not path.exists() and name.count("/") == 1 and not name.startswith(("/", ".", "runs/"))


def look_for_model(options: argparse.Namespace) -> FoundModel | None:
    """Refuses an `options.checkpoint` that is not there, without its weights; None for a Hugging Face model.

    Tasks come from the hub, which takes minutes, or many seconds of retries where it is out of reach: this comes before.

    Raises as `tools.loading.model.find_model` and `check_model`; OSError for a name that the hub does not know or cannot be
    asked for.
    """
    from tools.cli.devices import device_of
    from tools.conversion.hf_folder import check_folder
    from tools.evaluation.huggingface_checks import check_model
    from tools.loading.model import find_model

    name = options.checkpoint
    if not is_huggingface(name):
        return find_model(name, device=options.device, dtype=options.dtype)
    device_of(options.device)
    if Path(name).is_dir():
        check_folder(Path(name))
        config = Path(name) / "config.json"
    else:
        from transformers.utils import cached_file

        try:
            config = Path(cached_file(name, "config.json"))  # kept, and read again with the model
        except OSError as error:
            raise OSError(
                f"{name} is no folder here, and as a model of the hub: {' '.join(str(error).split())}"
            ) from error
    check_model(name, config)
    return None


def results_file(options: argparse.Namespace, found: FoundModel | LoadedModel | None, file: str) -> Path:
    """`--out`, or a file of this name where results of this model lie. found: None for a Hugging Face model."""
    if options.out:
        return Path(options.out)
    if found is None:
        return Path("runs") / "evaluation" / _title(options) / file
    from tools.loading.model import run_folder

    return run_folder(found.checkpoint, found.config) / "evaluation" / found.checkpoint.name / file


def _title(options: argparse.Namespace) -> str:
    """Of a Hugging Face model."""
    return str(options.name or options.checkpoint.rstrip("/").rpartition("/")[2])


def open_model(options: argparse.Namespace, file: str, *, max_length: int | None = None) -> OpenedModel:
    """Loads `options.checkpoint`.

    Args:
        file: name of the results file where `--out` does not say. max_length: tokens seen at once; None for
            `--max-length`, or the trained length.

    Raises as `tools.loading.model.load_model` and `HuggingFaceLM`.
    """
    length = max_length or options.max_length
    return _huggingface(options, file, length) if is_huggingface(options.checkpoint) else _own(options, file, length)


def number_format(lm: Any) -> str:
    """Of the weights of a model that the harness asks, "float32"."""
    return str(next(lm.model.parameters()).dtype).removeprefix("torch.")


def checkpoint_hash(checkpoint: Path) -> str:
    """SHA-256 over those of a checkpoint's weight files, as its manifest holds them."""
    from megatron_lite.checkpoint.reader import read_manifest

    files = read_manifest(checkpoint)["files"]
    digest = hashlib.sha256()
    for name in sorted(files):
        if name.startswith("weights"):
            digest.update(f"{name} {files[name]['sha256']}\n".encode())
    return digest.hexdigest()


def _huggingface(options: argparse.Namespace, file: str, length: int | None) -> OpenedModel:
    from tools.cli.devices import device_of
    from tools.evaluation.huggingface import HuggingFaceLM, folder_hash

    name, out = _title(options), results_file(options, None, file)
    lm = HuggingFaceLM(
        options.checkpoint,
        device=str(device_of(options.device)),
        dtype=options.dtype,
        max_length=length,
        trust_remote_code=options.trust_remote_code,
        progress=options.progress,
    )
    digest = folder_hash(options.checkpoint)
    # Folders of different models often have one name ("exported"), and so the same place for their results.
    place = str(Path(options.checkpoint).resolve()) if digest else options.checkpoint
    commit = getattr(lm.model.config, "_commit_hash", None)
    model = json.dumps([place, digest, commit, str(lm.model.dtype), lm.max_length])
    cache = out.parent / "answers" / f"requests-{hashlib.blake2b(model.encode(), digest_size=8).hexdigest()}"

    def finish() -> None:
        for kept in cache.parent.glob(f"{cache.name}*"):
            kept.unlink()
        if cache.parent.is_dir() and not any(cache.parent.iterdir()):
            cache.parent.rmdir()

    return OpenedModel(lm, name, out, {"name": options.checkpoint, "sha256": digest}, None, finish, cache)


def _own(options: argparse.Namespace, file: str, length: int | None) -> OpenedModel:
    from tools.evaluation.adapter import ProjectLM
    from tools.evaluation.data_parallel import join_processes
    from tools.evaluation.request_cache import AnswerFile
    from tools.loading.model import load_model

    processes, device = join_processes(options.device)
    loaded = load_model(options.checkpoint, device=device, dtype=options.dtype)
    name = options.name or f"{loaded.run.name}, step {loaded.step:,}"
    out = results_file(options, loaded, file)
    digest = checkpoint_hash(loaded.checkpoint)
    trained = int(loaded.config["batch"]["sequence_length"])
    length = length or trained
    dtype = str(next(loaded.model.parameters()).dtype)
    answers = AnswerFile(out.parent / "answers", f"{digest}/{dtype}/{length}/{loaded.tokenizer.hash}", processes)
    if len(answers) and processes.is_main:
        print(f"going on with {len(answers):,} answers of an interrupted evaluation", file=sys.stderr)
    lm = ProjectLM(
        loaded.model,
        loaded.tokenizer,
        max_length=length,
        name=name,
        processes=processes,
        answers=answers,
        batch_tokens=options.batch_tokens or 0,
        progress=options.progress and sys.stderr.isatty(),
    )
    facts = {
        "name": str(loaded.checkpoint.resolve()),
        "step": loaded.step,
        "sha256": digest,
        "tokenizer": f"{loaded.tokenizer.type} {loaded.tokenizer.hash}",
        "trained_length": trained,
    }
    return OpenedModel(lm, name, out, facts, loaded, answers.remove)
