"""The file that an evaluation writes: looked at before the work, and never taken from results of another kind."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from data.atomic_io import read_json

RESULTS_FILE, NEEDLE_FILE = "results.json", "needle.json"
# Kind of results -> the key that its files alone have, and what they are.
KINDS = {
    "suites": ("metalion", "suites or tasks"),
    "needle": ("cells", "--suite needle"),
    "texts": ("checkpoint", "perplexities of texts"),
}
_BESIDE = (".md", ".tex", ".png")


def check_output(out: Path, kind: str | None = None) -> None:
    """Raise ValueError if a results file cannot be written. Writes nothing.

    A table's suffix, and a file with results of another kind, are refused too.

    kind: of KINDS; None for a file that is no evaluation's.
    """
    mend = "name another file with --out"
    if out.is_dir():
        raise ValueError(f"{out} is a folder: {mend}, for example {out / 'results.json'}")
    folder = next(place for place in out.absolute().parents if place.exists())
    if not folder.is_dir():
        raise ValueError(f"{out} cannot be written, {folder} is no folder: {mend}")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ValueError(f"{out} cannot be written, nothing may be made in {folder}: {mend}")
    if kind in ("suites", "needle") and out.suffix in _BESIDE:
        raise ValueError(
            f"{out}: the results are JSON, and {', '.join(_BESIDE)} are what lies beside them: "
            f"name {out.with_suffix('.json')} with --out"
        )
    if kind is not None:
        earlier_results(out, kind)
    elif out.is_file() and (other := _kind(out)):
        raise ValueError(f"{out} holds results of {KINDS[other][1]}: {mend}")


def earlier_results(out: Path, kind: str) -> dict[str, Any]:
    """Return the results of an earlier evaluation of this kind, or an empty dict if there is no file.

    Raises ValueError for a file of anything else.
    """
    if not out.is_file():
        return {}
    mend = "name another file with --out, or remove it"
    content = read_json(out, mend)
    if (other := _kind(out)) != kind:
        content_words = "no results of eval.py" if other is None else f"results of {KINDS[other][1]}"
        raise ValueError(f"{out} holds {content_words}, where those of {KINDS[kind][1]} would go: {mend}")
    return content


def _kind(out: Path) -> str | None:
    """Return the kind of a file's results, or None for a file of anything else."""
    try:
        content = read_json(out, "")
    except ValueError:
        return None
    return next((name for name, (key, _) in KINDS.items() if key in content), None)


def difference(earlier: Mapping[str, Any], new: Mapping[str, Any]) -> str:
    """Return the first setting in which two evaluations differ, in words; empty if all shared settings are equal.

    earlier, new: settings by their names, such as `suite_settings`.
    """
    return next(
        (f"{name} {earlier[name]}, not {new[name]}" for name in new if name in earlier and earlier[name] != new[name]),
        "",
    )


def refuse_others(out: Path, earlier: Mapping[str, Any], new: Mapping[str, Any]) -> None:
    """Raise ValueError if a file's results have other settings than the new ones."""
    if words := difference(earlier, new):
        raise ValueError(f"{out} holds results of {words}: name another file with --out, or remove it")


def suite_settings(results: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a `results.json`, of the model and of each task; empty for no results."""
    if not results:
        return {}
    ours = results["metalion"]
    found = {
        "weights": weights(ours.get("model", {})),
        "number format": str(results.get("config", {}).get("model_dtype")).removeprefix("torch."),
        "tokens at once": ours.get("max_length"),
        "score": ours.get("score"),
        # Where none are asked for it is what each task says: 0, or as the line below has it.
        **({"examples in the prompt": ours["shots"] or 0} if "shots" in ours else {}),
        **{f"{task}'s examples in the prompt": shots for task, shots in results.get("n-shot", {}).items()},
    }
    for task, files in ours.get("data", {}).items():
        found[f"{task}'s split"] = ours["split"].get(task)
        # Of files their hashes, wherever they lie; what the hub's loader calls its copy is no sign of the content.
        found[f"{task}'s data"] = sorted(held[:12] if len(held) == 64 else place for place, held in files.items())
    return found


def number_format(model: Any) -> str:
    """Return the number format of a module's weights, such as "float32"."""
    return str(next(model.parameters()).dtype).removeprefix("torch.")


def weights(model: Mapping[str, Any]) -> str:
    """Return an identifier of a model's weights: their hash, or the model's name on the hub."""
    return model["sha256"][:16] if model.get("sha256") else str(model.get("name"))


def with_tasks(earlier: Mapping[str, Any], results: dict[str, Any]) -> dict[str, Any]:
    """Return the results with the other tasks of an earlier evaluation of the same settings."""
    old, new = earlier.get("metalion", {}), results["metalion"]
    again = new["split"].keys()
    if not old.get("split", {}).keys() - again:
        return results
    tables = [key for key in earlier if isinstance(earlier[key], dict) and key not in ("metalion", "config")]
    joined = {key: {**earlier[key], **results.get(key, {})} for key in tables}
    ours = {
        key: {**old.get(key, {}), **new.get(key, {})}
        for key in ("split", "data", "chance", "requests", "truncated", "apart", "recut", "documents")
    }
    ours["suites"] = list(dict.fromkeys([*old["suites"], *new["suites"]]))
    ours["other_split"] = sorted({*old["other_split"]} - again | {*new["other_split"]})
    for key in ("requests", "truncated"):
        if "" in ours[key]:  # of all tasks together
            ours[key][""] = old[key].get("", 0) + new[key].get("", 0)
    for key in ("tokens_asked", "tokens_read", "seconds"):
        if old.get(key) is not None and new[key] is not None:
            ours[key] = round(old[key] + new[key], 3)
    if old.get("longest_request") is not None and new["longest_request"] is not None:
        ours["longest_request"] = max(old["longest_request"], new["longest_request"])
    return {**results, **joined, "metalion": {**new, **ours}}
