"""Run `python eval.py MODEL --data ...`: perplexity of texts, as a table, a results file and a chart by position."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from data.atomic_io import write_json
from data.corpus.discovery import source_files
from data.indexed import IndexedTokens
from megatron_lite.plural import counted
from tools.evaluation.data_parallel import Processes
from tools.evaluation.loss_by_position import run_positions
from tools.evaluation.open_model import checkpoint_hash, results_file
from tools.evaluation.perplexity import TokenText, perplexity, raw_text, token_file_text, validation_text
from tools.evaluation.request import EvaluationRequest, TextRequest
from tools.evaluation.request_cache import RequestCache
from tools.evaluation.results_file import earlier_results, number_format
from tools.evaluation.run_results import model_facts
from tools.loading.model import LoadedModel, LocatedCheckpoint, load_located
from tools.reporting.tables import plain_table

if TYPE_CHECKING:
    from tools.evaluation.perplexity import TextModel

Metrics = Mapping[str, Any]


def run_texts(request: EvaluationRequest, texts: TextRequest, located: LocatedCheckpoint | None) -> None:
    """Measure the perplexity of texts, print a table, add to the results file.

    located: None for a Hugging Face model. Raises as `load_located`, `load_huggingface_text` and `evaluate_texts`.
    """
    loaded: TextModel
    if located is None:
        from tools.evaluation.huggingface_text import load_huggingface_text

        loaded = load_huggingface_text(request)
    else:
        loaded = load_located(located)
    dtype = number_format(loaded.model)
    print(f"{loaded.checkpoint}: {loaded.num_parameters / 1e6:,.2f} M parameters, {dtype} on {loaded.device}\n")
    out = results_file(request, located, "texts")
    weights = weights_of(loaded)
    cache = open_cache(loaded, out, weights)
    results = evaluate_texts(loaded, texts, out, cache, progress=request.progress)
    # Other texts of the file may have been measured in another number format.
    saved = {name: {**metrics, "dtype": dtype} for name, metrics in results.items()}
    if not texts.by_position:
        print(
            plain_table(["text", "documents", "tokens", "bytes", "loss", "perplexity", "bits per byte"], _rows(results))
        )
        piece = next(iter(results.values()))
        overlap = f", which begin every {piece['stride']:,} tokens" if "stride" in piece else ""
        print(f"\nPieces of {piece['sequence_length']:,} tokens{overlap}.")
    write_results(out, loaded, saved, weights, by_position=texts.by_position)
    cache.remove()
    print(f"\n{out}")


def weights_of(loaded: TextModel) -> str | None:
    """Return the hash of a model's weights, or name and commit of a model of the hub; None without a commit."""
    if isinstance(loaded, LoadedModel):
        return checkpoint_hash(loaded.checkpoint)
    from tools.evaluation.huggingface import folder_hash

    digest = folder_hash(str(loaded.checkpoint))
    return f"{loaded.checkpoint}@{loaded.commit}" if digest is None and loaded.commit else digest


def open_cache(loaded: TextModel, out: Path, weights: str | None) -> RequestCache:
    """Return the cache beside the results file, with the batches that an interrupted measurement of this model has done.

    weights: as from `weights_of`; None for no cache.
    """
    model = f"{weights}/{number_format(loaded.model)}/{loaded.config['batch']['sequence_length']}"
    cache = RequestCache(None if weights is None else out.parent / "perplexity_batches", model, Processes())
    if len(cache):
        print(f"resuming with {counted(len(cache), 'batch', 'batches')} of an interrupted evaluation", file=sys.stderr)
    return cache


def evaluate_texts(
    loaded: TextModel, request: TextRequest, out: Path, cache: RequestCache, *, progress: bool = True
) -> dict[str, Any]:
    """Return metrics by text: of the requested texts, or of the run's validation set.

    out: the results file; a chart is written beside it. cache: as in `perplexity`. Raises FileNotFoundError, ValueError.
    """
    with tempfile.TemporaryDirectory() as folder:
        texts = [_text(loaded, name, Path(folder), request.text_key) for name in request.data]
        if isinstance(loaded, LoadedModel):
            texts = texts or [validation_text(loaded)]
        if request.by_position and isinstance(loaded, LoadedModel):
            picture = out.with_name("perplexity_by_position.png")
            return run_positions(loaded, texts, request, picture, cache, progress=progress)
        return {
            text.name: perplexity(
                loaded,
                text,
                sequence_length=request.sequence_length,
                stride=request.stride,
                batch_size=request.batch_size,
                progress=progress,
                cache=cache,
            )
            for text in texts
        }


def write_results(
    out: Path, loaded: TextModel, metrics: Mapping[str, Metrics], weights: str | None, *, by_position: bool
) -> None:
    """Add metrics by text to a results file. Results of another checkpoint, or of other weights, are dropped.

    weights: as from `weights_of`. by_position: whether the metrics are losses by position, which replace earlier ones.

    Raises ValueError for a file of another kind of results.
    """
    facts = {**model_facts(loaded), "weights": weights}
    earlier = earlier_results(out, "texts")
    if earlier.get("checkpoint") != facts["checkpoint"] or earlier.get("weights", weights) != weights:
        earlier = {}
    content = {"results": {}, **earlier, **facts}
    if by_position:
        content["by_position"] = metrics
    else:
        results = content["results"]
        content["results"] = {**results, "perplexity": {**results.get("perplexity", {}), **metrics}}
    write_json(out, content)


def check_texts(names: tuple[str, ...]) -> None:
    """Raise as `IndexedTokens` and `source_files` for missing texts."""
    for name in names:
        if _is_token_file(name):
            IndexedTokens(name)
        else:
            source_files(name)


def check_huggingface_texts(name: str, request: TextRequest) -> None:
    """Raise ValueError for requests that need a run: its validation set, token files and the loss by position."""
    if not request.data:
        raise ValueError(f"{name} is a Hugging Face model and has no validation set: name a text with --data")
    if request.by_position:
        raise ValueError(f"{name}: --by-position needs a run; python -m tools.convert_hf import FOLDER RUN makes one")
    if files := [text for text in request.data if _is_token_file(text)]:
        raise ValueError(f"--data {files[0]}: token files have another tokenizer than {name}; give raw text")


def _rows(results: Mapping[str, Metrics]) -> list[list[str]]:
    return [
        [
            name,
            *(f"{metrics[key]:,.0f}" for key in ("documents", "tokens", "bytes")),
            f"{metrics['loss']:.4f}",
            f"{metrics['perplexity']:,.3f}",
            f"{metrics['bits_per_byte']:.4f}",
        ]
        for name, metrics in results.items()
    ]


def _text(loaded: TextModel, name: str, folder: Path, text_key: str) -> TokenText:
    if isinstance(loaded, LoadedModel) and _is_token_file(name):
        return token_file_text(Path(name), loaded.tokenizer, name=name)
    return raw_text(name, loaded.tokenizer, folder, text_key=text_key)


def _is_token_file(name: str) -> bool:
    return Path(f"{name}.idx").exists() or Path(f"{name}.bin").exists()
