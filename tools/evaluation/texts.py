"""Run `python eval.py MODEL --data ...`: perplexity of texts, as a table, a results file and a chart by position."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from data.atomic_io import write_json
from data.corpus.discovery import source_files
from data.indexed import IndexedTokens
from megatron_lite.checkpoint.storage import versions
from tools.evaluation.loss_by_position import run_positions
from tools.evaluation.open_model import results_file
from tools.evaluation.perplexity import TokenText, perplexity, raw_text, token_file_text, validation_text
from tools.evaluation.request import EvaluationRequest, TextRequest
from tools.evaluation.results_file import earlier_results, number_format
from tools.loading.model import LoadedModel, LocatedCheckpoint, load_located
from tools.reporting.tables import plain_table

Metrics = Mapping[str, Any]


def run_texts(request: EvaluationRequest, texts: TextRequest, located: LocatedCheckpoint) -> None:
    """Measure the perplexity of texts, print a table, add to the results file.

    Raises as `load_located` and `evaluate_texts`.
    """
    loaded = load_located(located)
    dtype = number_format(loaded.model)
    print(f"{loaded.checkpoint}: {loaded.num_parameters / 1e6:,.2f} M parameters, {dtype} on {loaded.device}\n")
    out = results_file(request, located, "texts")
    results = evaluate_texts(loaded, texts, out)
    # Other texts of the file may have been measured in another number format.
    saved = {name: {**metrics, "dtype": dtype} for name, metrics in results.items()}
    if texts.by_position:
        write_results(out, loaded, by_position=saved)
    else:
        print(
            plain_table(["text", "documents", "tokens", "bytes", "loss", "perplexity", "bits per byte"], _rows(results))
        )
        write_results(out, loaded, perplexity=saved)
    print(f"\n{out}")


def evaluate_texts(loaded: LoadedModel, request: TextRequest, out: Path) -> dict[str, Any]:
    """Return metrics by text: of the requested texts, or of the run's validation set.

    out: the results file; a chart is written beside it. Raises FileNotFoundError, ValueError.
    """
    with tempfile.TemporaryDirectory() as folder:
        texts = [_text(loaded, name, Path(folder), request.text_key) for name in request.data]
        texts = texts or [validation_text(loaded)]
        if request.by_position:
            return run_positions(loaded, texts, request, out.with_name("perplexity_by_position.png"))
        return {
            text.name: perplexity(
                loaded,
                text,
                sequence_length=request.sequence_length,
                batch_size=request.batch_size,
                progress=sys.stderr.isatty(),
            )
            for text in texts
        }


def write_results(
    out: Path,
    loaded: LoadedModel,
    *,
    perplexity: Mapping[str, Metrics] | None = None,
    by_position: Mapping[str, Metrics] | None = None,
) -> None:
    """Add metrics by text to a results file. Results of another checkpoint are dropped.

    Raises ValueError for a file of another kind of results.
    """
    checkpoint = str(loaded.checkpoint.resolve())
    earlier = earlier_results(out, "texts")
    if earlier.get("checkpoint") != checkpoint:
        earlier = {}
    results = earlier.get("results", {})
    if perplexity is not None:
        results = {**results, "perplexity": {**results.get("perplexity", {}), **perplexity}}
    content = {
        **earlier,
        "checkpoint": checkpoint,
        "step": loaded.step,
        "parameters": loaded.num_parameters,
        "device": str(loaded.device),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": versions(),
        "results": results,
        **({} if by_position is None else {"by_position": by_position}),
    }
    write_json(out, content)


def check_texts(names: tuple[str, ...]) -> None:
    """Raise as `IndexedTokens` and `source_files` for missing texts."""
    for name in names:
        if _is_token_file(name):
            IndexedTokens(name)
        else:
            source_files(name)


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


def _text(loaded: LoadedModel, name: str, folder: Path, text_key: str) -> TokenText:
    if _is_token_file(name):
        return token_file_text(Path(name), loaded.tokenizer, name=name)
    return raw_text(name, loaded.tokenizer, folder, text_key=text_key)


def _is_token_file(name: str) -> bool:
    return Path(f"{name}.idx").exists() or Path(f"{name}.bin").exists()
