"""Describe a model in results files, and add scores to the results file of its run."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from data.atomic_io import read_json, write_json
from megatron_lite.checkpoint.storage import versions
from tools.evaluation.open_model import checkpoint_hash
from tools.evaluation.results_file import RESULTS_FILE
from tools.loading.model import LoadedModel

if TYPE_CHECKING:
    from tools.evaluation.huggingface_text import HuggingFaceText

# Suite -> task -> metric -> value.
Scores = Mapping[str, Mapping[str, Mapping[str, Any]]]


def model_facts(loaded: LoadedModel | HuggingFaceText) -> dict[str, Any]:
    """Return the description of a model, a device and a date in a results file."""
    return {
        "checkpoint": str(loaded.checkpoint.resolve() if isinstance(loaded, LoadedModel) else loaded.checkpoint),
        "step": loaded.step,
        "parameters": loaded.num_parameters,
        "device": str(loaded.device),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": versions(),
    }


def add_to_run(loaded: LoadedModel, scores: Scores, details: Scores) -> None:
    """Add scores to the run's results file, which its report page and the card of its export show.

    Results of another checkpoint, or of other weights, are dropped. details: standard error, chance and number of documents of
    each score.
    """
    path = loaded.run / RESULTS_FILE
    content = read_json(path, "remove it: python eval.py RUN writes it again") if path.is_file() else {}
    facts = {**model_facts(loaded), "weights": checkpoint_hash(loaded.checkpoint)}
    # A run that is trained again in its folder writes other weights under the same name.
    if any(content.get(key, facts[key]) != facts[key] for key in ("checkpoint", "weights")):
        content = {}
    content = {**facts, **content}
    for key, new in (("results", scores), ("details", details)):
        earlier = content.setdefault(key, {})
        for suite, tasks in new.items():
            earlier.setdefault(suite, {}).update(tasks)
    write_json(path, content)
