"""Open a checkpoint or a Hugging Face model for the requests of the harness."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tools.evaluation.request import EvaluationRequest
from tools.evaluation.results_file import NEEDLE_FILE, PERPLEXITY_FILE, RESULTS_FILE, RULER_FILE, number_format

if TYPE_CHECKING:
    from tools.loading.model import LoadedModel, LocatedCheckpoint


@dataclass(frozen=True)
class OpenedModel:
    """A model that answers the requests of the harness.

    Attributes:
        lm: the model of the harness.
        name: the model's name in tables.
        out: the results file.
        facts: the description of the model in the results.
        loaded: a checkpoint of this project; None for a Hugging Face model.
        finish: removes the cached answers of an unfinished evaluation.
        cache: the file of the cached answers of a Hugging Face model. Its name depends on the model.
    """

    lm: Any
    name: str
    out: Path
    facts: dict[str, Any]
    loaded: LoadedModel | None
    finish: Callable[[], None]
    cache: Path | None = None

    @property
    def cached_lm(self) -> Any:
        """Return the model with a cache of its answers."""
        from lm_eval.api.model import CachingLM

        return self.lm if self.cache is None else CachingLM(self.lm, str(self.cache))


def is_huggingface(name: str) -> bool:
    """Return whether a name is a Hugging Face model: a folder with a config.json, or owner/name on the hub."""
    path = Path(name)
    if path.is_dir():
        return (path / "config.json").is_file()
    return not path.exists() and name.count("/") == 1 and not name.startswith(("/", ".", "runs/"))


def locate_model(request: EvaluationRequest) -> LocatedCheckpoint | None:
    """Return the located checkpoint, or None for a Hugging Face model. Neither needs its weights.

    Call it before the hub's data are loaded, which takes minutes.

    Raises as `tools.loading.model.locate_checkpoint` and `check_model`; OSError for a name that the hub does not know, or if
    the hub cannot be reached.
    """
    from tools.cli.devices import device_of
    from tools.conversion.hf_folder import check_folder
    from tools.evaluation.huggingface_checks import check_model
    from tools.loading.model import locate_checkpoint

    name = request.checkpoint
    if not is_huggingface(name):
        located = locate_checkpoint(name, device=request.device, dtype=request.dtype)
        located.refuse_images()
        return located
    device_of(request.device)
    if Path(name).is_dir():
        check_folder(Path(name))
        config = Path(name) / "config.json"
    else:
        from transformers.utils import cached_file

        try:
            config = Path(cached_file(name, "config.json"))  # cached for the model
        except OSError as error:
            raise OSError(
                f"{name} is no local folder, and the hub does not provide it: {' '.join(str(error).split())}. Download the "
                "model where the hub can be reached, and name its folder"
            ) from error
    check_model(name, config)
    return None


def results_file(request: EvaluationRequest, located: LocatedCheckpoint | None, kind: str) -> Path:
    """Return `--out`, or the file of the model's results. kind: as `results_file.KINDS`."""
    if request.out:
        return request.out
    file = {"needle": NEEDLE_FILE, "ruler": RULER_FILE}.get(kind, RESULTS_FILE)
    if located is None:
        file = PERPLEXITY_FILE if kind == "texts" else file
        return Path("runs") / "evaluation" / _title(request) / file
    return located.run / file if kind == "texts" else located.run / "evaluation" / located.checkpoint.name / file


def _title(request: EvaluationRequest) -> str:
    """Return the name of a Hugging Face model."""
    return str(request.name or request.checkpoint.rstrip("/").rpartition("/")[2])


def open_model(
    request: EvaluationRequest, located: LocatedCheckpoint | None, kind: str, *, max_length: int | None = None
) -> OpenedModel:
    """Load the model of a request.

    Args:
        located: the result of `locate_model`.
        kind: kind of results, as `results_file.KINDS`.
        max_length: tokens in one request; None for that of the request, or the trained length.

    Raises as `tools.loading.model.load_located` and `HuggingFaceLM`.
    """
    length, out = max_length or request.max_length, results_file(request, located, kind)
    return (
        _open_huggingface(request, out, length) if located is None else _open_checkpoint(request, located, out, length)
    )


def checkpoint_hash(checkpoint: Path) -> str:
    """Return a SHA-256 over the hashes of a checkpoint's weight files, which its manifest holds."""
    from megatron_lite.checkpoint.reader import read_manifest

    files = read_manifest(checkpoint)["files"]
    digest = hashlib.sha256()
    for name in sorted(files):
        if name.startswith("weights"):
            digest.update(f"{name} {files[name]['sha256']}\n".encode())
    return digest.hexdigest()


def _open_huggingface(request: EvaluationRequest, out: Path, length: int | None) -> OpenedModel:
    from lm_eval.models.utils import resolve_max_length

    from tools.cli.devices import device_of
    from tools.evaluation.huggingface import HuggingFaceLM, folder_hash

    lm = HuggingFaceLM(
        request.checkpoint,
        device=str(device_of(request.device)),
        dtype=request.dtype,
        max_length=length,
        trust_remote_code=request.trust_remote_code,
        progress=request.progress,
    )
    digest = folder_hash(request.checkpoint)
    # Folders of different models may have one name ("exported"), and so the same results folder.
    identity = str(Path(request.checkpoint).resolve()) if digest else request.checkpoint
    commit = getattr(lm.model.config, "_commit_hash", None)
    model = json.dumps([identity, digest, commit, str(lm.model.dtype), lm.max_length])
    cache = out.parent / "answers" / f"requests-{hashlib.blake2b(model.encode(), digest_size=8).hexdigest()}"

    def finish() -> None:
        for file in cache.parent.glob(f"{cache.name}*"):
            file.unlink()
        if cache.parent.is_dir() and not any(cache.parent.iterdir()):
            cache.parent.rmdir()

    trained = resolve_max_length(lm.model.config, lm.tokenizer, default=0) or None
    facts = {"name": request.checkpoint, "sha256": digest, "trained_length": trained}
    return OpenedModel(lm, _title(request), out, facts, None, finish, cache)


def _open_checkpoint(
    request: EvaluationRequest, located: LocatedCheckpoint, out: Path, length: int | None
) -> OpenedModel:
    from tools.evaluation.adapter import ProjectLM
    from tools.evaluation.data_parallel import join_processes
    from tools.evaluation.request_cache import RequestCache
    from tools.loading.model import load_located

    processes, device = join_processes(request.device)
    loaded = load_located(located, device)
    name = request.name or f"{loaded.run.name}, step {loaded.step:,}"
    digest = checkpoint_hash(loaded.checkpoint)
    trained = int(loaded.config["batch"]["sequence_length"])
    length = length or trained
    key = f"{digest}/torch.{number_format(loaded.model)}/{length}/{loaded.tokenizer.hash}"
    cache = RequestCache(out.parent / "answers", key, processes)
    if len(cache) and processes.is_main:
        print(f"resuming with {len(cache):,} answers of an interrupted evaluation", file=sys.stderr)
    lm = ProjectLM(
        loaded.model,
        loaded.tokenizer,
        max_length=length,
        name=name,
        processes=processes,
        cache=cache,
        progress=request.progress,
    )
    facts = {
        "name": str(loaded.checkpoint.resolve()),
        "step": loaded.step,
        "sha256": digest,
        "tokenizer": f"{loaded.tokenizer.type} {loaded.tokenizer.hash}",
        "trained_length": trained,
    }
    return OpenedModel(lm, name, out, facts, loaded, cache.remove)
