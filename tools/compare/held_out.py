"""Check the held-out sets of a ladder, measure compressors on them; measure the loss by position and associative recall."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from data.atomic_io import read_json, write_text
from data.manifest import read_manifest
from data.preprocessing.contamination import document_texts, shared_documents
from megatron_lite.plural import counted
from tools.compare.launcher import check_text
from tools.compare.rungs import Ladder
from tools.compare.spec import Comparison, Run
from tools.loading.token_data import PreparedData, prepared_data
from tools.pretraining.text import compressed_bits_per_byte

FILE = "held_out.json"
POSITIONS = "positions.json"
_REMEDY = "remove it; --check writes it again"


def check_held_out(comparison: Comparison, ladder: Ladder, runs: Sequence[Run]) -> None:
    """Check the text of a ladder, and write `held_out.json` once per text: bits per byte of compressors on the held-out text.

    Raises ValueError for too many passes over the training text, and for held-out documents that it holds.
    """
    data = prepared_data(runs[0].config.data, runs[0].config.model.vocab_size)
    for run in runs:
        tokens = run.config.batch.tokens_of(run.config.schedule.train_steps)
        if tokens > ladder.max_passes * data.train_tokens:
            raise ValueError(
                f"{run.name}: {tokens:,} tokens / {data.train_tokens:,} training tokens = "
                f"{tokens / data.train_tokens:.3g} passes over the text; ladder.max_passes = {ladder.max_passes:g} is allowed. "
                "Add text, or lower ladder.tokens_per_parameter"
            )
    held_out = [prefix for prefix in (data.validation, data.test) if prefix is not None]
    made_from = {prefix: (read_manifest(prefix) or {}).get("checksums") for prefix in (*data.train, *held_out)}
    description = hashlib.sha256(json.dumps([made_from, ladder.max_overlap]).encode()).hexdigest()
    path = comparison.folder / FILE
    if path.is_file():
        checked = read_json(path, _REMEDY, "made_from")
        if checked["made_from"] == description and "training_tokens" in checked:
            return
    for prefix in held_out:
        if shared := shared_documents(prefix, data.train, share=ladder.max_overlap):
            raise ValueError(
                f"{prefix} shares {counted(len(shared), 'document')} with the training text (equal ones, or with "
                f"{ladder.max_overlap:.0%} or more of their 13-word n-grams): {'; '.join(map(str, shared[:5]))}. Remove them "
                f"from one of the sets, or raise ladder.max_overlap. To list all: python -m tools.inspect_data {prefix} "
                f"--trained-on {' '.join(data.train)} --overlap {ladder.max_overlap:g}"
            )
    # A masked model does not predict every byte.
    compressors = compressed_bits_per_byte(_validation_text(data)) if runs[0].causal else {}
    content = {"made_from": description, "training_tokens": data.train_tokens, "compressors": compressors}
    write_text(path, json.dumps(content, indent=1) + "\n")


def _validation_text(data: PreparedData) -> bytes:
    if data.validation_text is not None:
        return data.validation_text.read_bytes()
    assert data.validation is not None  # `launcher.check_text` refuses a comparison without one
    return "".join(document_texts(data.validation)).encode()


def compressors_of(comparison: Comparison) -> dict[str, float]:
    """Return the bits per byte of gzip and xz on the validation text; empty before the check."""
    path = comparison.folder / FILE
    compressors = read_json(path, _REMEDY, "compressors")["compressors"] if path.is_file() else {}
    if not isinstance(compressors, dict) or not all(isinstance(bits, float) for bits in compressors.values()):
        raise ValueError(f"{path}: compressors = {compressors}; a number per compressor is allowed: {_REMEDY}")
    return compressors


def training_tokens_of(comparison: Comparison) -> int | None:
    """Return the tokens of the training text; None if `check_held_out` did not write them."""
    path = comparison.folder / FILE
    return read_json(path, _REMEDY, "made_from").get("training_tokens") if path.is_file() else None


def measure_positions(runs: Sequence[Run], device: str) -> None:
    """Write the loss by position on the validation text to the folder of every run that lacks it and can be measured.

    Raises ValueError as `launcher.check_text`, such as for another text than that of the training.
    """
    from tools.evaluation.loss_by_position import loss_by_position
    from tools.evaluation.perplexity import validation_text
    from tools.loading.model import load_model

    unmeasured = [run for run in runs if run.measurable and not (run.folder / POSITIONS).is_file()]
    if unmeasured:
        check_text(unmeasured)
    for run in unmeasured:
        loaded = load_model(run.folder, device=device)
        measured = loss_by_position(loaded, validation_text(loaded), length=run.config.batch.sequence_length)
        write_text(run.folder / POSITIONS, json.dumps({"bins": measured.bins(8)}, indent=1) + "\n")


def measure_recall(runs: Sequence[Run], device: str) -> None:
    """Add the associative recall of every run that can be measured to the run's results file, once.

    Raises ValueError as `measure_positions`.
    """
    from tools.evaluation.associative_recall import SUITE, add_recall
    from tools.evaluation.results_file import RESULTS_FILE
    from tools.loading.model import load_model

    def has_recall(path: Path) -> bool:
        remedy = "remove it; eval.py and --recall write it again"
        return path.is_file() and SUITE in read_json(path, remedy, "results")["results"]

    unmeasured = [run for run in runs if run.measurable and not has_recall(run.folder / RESULTS_FILE)]
    if unmeasured:
        check_text(unmeasured)
    for run in unmeasured:
        add_recall(load_model(run.folder, device=device))


def positions_of(run: Run) -> list[dict[str, Any]]:
    """Return the bins that `measure_positions` wrote; empty if it did not."""
    path = run.folder / POSITIONS
    remedy = "remove it; --positions writes it again"
    bins = read_json(path, remedy, "bins")["bins"] if path.is_file() else []
    if not isinstance(bins, list) or not all(
        isinstance(span, dict) and {"from", "to", "loss"} <= span.keys() for span in bins
    ):
        raise ValueError(f"{path}: a list of bins with from, to and loss is allowed: {remedy}")
    return bins
