"""Describe a model in results files, and add scores to the results file of its run."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
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


def is_of(checkpoint: Path, content: Mapping[str, Any]) -> bool:
    """Return whether the content of a run's results file is of a checkpoint. The run may have been moved.

    A run that is trained again in its folder writes other weights under the same name. Files of earlier versions lack the hash.
    """
    if Path(str(content.get("checkpoint", ""))).name != checkpoint.name:
        return False
    return "weights" not in content or content["weights"] == checkpoint_hash(checkpoint)


def add_to_run(loaded: LoadedModel, scores: Scores, details: Scores) -> None:
    """Add scores to the run's results file, which its report page and the card of its export show.

    Results that are not of its weights are dropped. details: standard error, chance and number of documents of each score.
    """
    path = loaded.run / RESULTS_FILE
    content = read_json(path, "remove it: python eval.py RUN writes it again") if path.is_file() else {}
    if not is_of(loaded.checkpoint, content):
        content = {}
    content = {**model_facts(loaded), "weights": checkpoint_hash(loaded.checkpoint), **content}
    for key, new in (("results", scores), ("details", details)):
        earlier = content.setdefault(key, {})
        for suite, tasks in new.items():
            earlier.setdefault(suite, {}).update(tasks)
    write_json(path, content)
