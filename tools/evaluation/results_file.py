"""Check, read, write and merge the results files of evaluations."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from data import atomic_io
from data.atomic_io import read_json, write_text

RESULTS_FILE, NEEDLE_FILE, RULER_FILE = "results.json", "needle.json", "ruler.json"
PERPLEXITY_FILE = "perplexity.json"  # of a Hugging Face model, whose folder has the suites' results.json
# Kind of results -> (a key that only its files have, a description).
KINDS = {
    "suites": ("metalion", "suites or tasks"),
    "ruler": ("tasks", "--suite ruler"),
    "needle": ("cells", "--suite needle"),
    "texts": ("checkpoint", "perplexities of texts"),
}
# Returns the settings of results, {} for none.
SettingsOf = Callable[[Mapping[str, Any]], Mapping[str, Any]]
# Keys that tables read: of the harness, and under "metalion".
_TABLES = ("versions", "n-shot", "n-samples", "config")
_TABLES_METALION = ("suites", "chance", "split", "other_split", "truncated", "score", "max_length", "seconds")
# Keys under "metalion" with one entry per task.
_BY_TASK = (
    *("split", "data", "majority", "chance", "requests", "truncated", "apart", "recut", "documents"),
    *("members", "whole_set"),
)
# Settings of prompts and generation -> the words for them in messages.
_PROMPT_SETTINGS = {
    "limit": "limit (--limit)",
    "apply_chat_template": "chat template",
    "system_instruction": "system instruction",
    "fewshot_as_multiturn": "multi-turn examples",
    "gen_kwargs": "generation arguments",
    "seed": "seeds",
}


def check_output(out: Path, kind: str | None = None, *, suffix: str = ".json") -> None:
    """Raise ValueError if a file cannot be written, has another suffix, or holds results of another kind.

    kind: of KINDS; None for a file that is no results file.
    """
    remedy = "name another file with --out"
    if out.is_dir():
        raise ValueError(f"{out} is a folder: {remedy}, for example {out / 'results.json'}")
    folder = next(place for place in out.absolute().parents if place.exists())
    if not folder.is_dir():
        raise ValueError(f"{out} cannot be written, {folder} is no folder: {remedy}")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ValueError(f"{out} cannot be written, no permission to write in {folder}: {remedy}")
    if out.suffix != suffix:
        raise ValueError(f"{out}: the name must end in {suffix}: name {out.with_suffix(suffix)} with --out")
    if kind is not None:
        earlier_results(out, kind)
    elif out.is_file() and (other := _kind(out)):
        raise ValueError(f"{out} holds results of {KINDS[other][1]}: {remedy}")


def earlier_results(out: Path, kind: str) -> dict[str, Any]:
    """Return the results of an earlier evaluation of this kind, or an empty dict without a file.

    Raises ValueError for another kind of file.
    """
    if not out.is_file():
        return {}
    remedy = "name another file with --out, or remove it"
    content = read_json(out, remedy)
    if (other := _kind(out)) != kind:
        actual = "no results of eval.py" if other is None else f"results of {KINDS[other][1]}"
        raise ValueError(f"{out} holds {actual}; allowed are results of {KINDS[kind][1]}: {remedy}")
    return content


def read_results(path: Path, *, tables: bool = False) -> dict[str, Any]:
    """Read a `results.json`, or the one of a folder. Raises FileNotFoundError, or ValueError for another kind of file.

    tables: require the keys that tables show.
    """
    file = path / RESULTS_FILE if path.is_dir() else path
    if not file.is_file():
        raise FileNotFoundError(f"{file} does not exist: python eval.py MODEL --suite ... writes it")
    # The folder of a run holds another results.json, with the scores of all evaluations.
    files = sorted(file.parent.glob(f"evaluation/*/{RESULTS_FILE}"))
    example = files[-1] if files else f"RUN/evaluation/STEP/{RESULTS_FILE}"
    remedy = f"give the file of python eval.py MODEL --suite, such as {example}"
    content = read_json(file, remedy, "metalion", "results", *(_TABLES if tables else ()))
    section, needed = content["metalion"], ("title", "documents", *(_TABLES_METALION if tables else ()))
    if missing := [key for key in needed if not isinstance(section, dict) or key not in section]:
        raise ValueError(f"{file} has no key 'metalion.{missing[0]}': {remedy}")
    return content


def write_json(path: Path, content: Any) -> None:
    """Write JSON as `data.atomic_io.write_json`, including the types of the harness."""
    from lm_eval.utils import handle_non_serializable

    atomic_io.write_json(path, content, handle_non_serializable)


def write_harness_files(
    folder: Path, results: Mapping[str, Any], samples: Mapping[str, Sequence[Mapping[str, Any]]]
) -> list[Path]:
    """Write results_DATE.json and samples_TASK_DATE.jsonl as the harness names and formats them. Return the paths.

    The harness's own writer ignores errors such as a full disk. samples: of the tasks to write.
    """
    from lm_eval.utils import handle_non_serializable, sanitize_list

    date = datetime.now().isoformat().replace(":", "-")
    paths = [folder / f"results_{date}.json"]
    write_json(paths[0], {key: value for key, value in results.items() if key != "metalion"})
    for task, rows in samples.items():
        lines = []
        for row in rows:
            arguments = {
                f"gen_args_{i}": {f"arg_{j}": value for j, value in enumerate(request)}
                for i, request in enumerate(row["arguments"])
            }
            texts = {key: sanitize_list(row[key]) for key in ("resps", "filtered_resps")}
            sample = {**row, **texts, "arguments": arguments, "target": str(row["target"])}
            lines.append(json.dumps(atomic_io.of_json(sample, handle_non_serializable), ensure_ascii=False) + "\n")
        paths.append(folder / f"samples_{task}_{date}.jsonl")
        write_text(paths[-1], "".join(lines))
    return paths


def difference(earlier: Mapping[str, Any], new: Mapping[str, Any]) -> str:
    """Return the first setting in which two evaluations differ, or an empty text if all shared settings are equal.

    earlier, new: settings by name, such as `suite_settings`.
    """
    for name, value in new.items():
        if name in earlier and earlier[name] != value:
            word = "now" if None in (earlier[name], value) else "not"
            previous, current = ("not set" if each is None else each for each in (earlier[name], value))
            return f"{name} {previous}, {word} {current}"
    return ""


def refuse_others(out: Path, kind: str, settings_of: SettingsOf, new: Mapping[str, Any]) -> None:
    """Raise ValueError if a file's results have other settings than the new ones, and as `earlier_results`."""
    if words := difference(settings_of(earlier_results(out, kind)), new):
        raise ValueError(f"{out} holds results of {words}: name another file with --out, or remove it")


def matching_results(out: Path, kind: str, settings_of: SettingsOf, new: Mapping[str, Any]) -> dict[str, Any]:
    """Return `earlier_results` if they have the new settings, else an empty dict."""
    earlier = earlier_results(out, kind)
    return {} if difference(settings_of(earlier), new) else earlier


def suite_settings(results: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a `results.json`, of the model and of each task; empty for no results."""
    if not results:
        return {}
    section = results["metalion"]
    settings = {
        "weights": weights(section.get("model", {})),
        "number format": str(results.get("config", {}).get("model_dtype")).removeprefix("torch."),
        "tokens at once": section.get("max_length"),
        "score": section.get("score"),
        **{words: _plain(section.get(name)) for name, words in _PROMPT_SETTINGS.items()},
        # Without --shots the number is each task's own: 0, or that of the line below.
        **({"examples in the prompt": section["shots"] or 0} if "shots" in section else {}),
        **{f"{task}'s examples in the prompt": shots for task, shots in results.get("n-shot", {}).items()},
    }
    for task, files in section.get("data", {}).items():
        settings[f"{task}'s split"] = section["split"].get(task)
        # Files are compared by their hash. The fingerprint of a data set of the hub does not identify its content.
        settings[f"{task}'s data"] = sorted(
            digest[:12] if len(digest) == 64 else path for path, digest in files.items()
        )
    return settings


def number_format(model: Any) -> str:
    """Return the number format of a module's weights, such as "float32"."""
    return str(next(model.parameters()).dtype).removeprefix("torch.")


def weights(model: Mapping[str, Any]) -> str:
    """Return an identifier of a model's weights: their hash, or the model's name on the hub."""
    return model["sha256"][:16] if model.get("sha256") else str(model.get("name"))


def with_tasks(earlier: Mapping[str, Any], results: dict[str, Any]) -> dict[str, Any]:
    """Return the results with the other tasks of an earlier evaluation of the same settings."""
    old, new = earlier.get("metalion", {}), results["metalion"]
    repeated = new["split"].keys()
    if not old.get("split", {}).keys() - repeated:
        return results
    tables = [key for key in earlier if isinstance(earlier[key], dict) and key not in ("metalion", "config")]
    joined = {key: {**earlier[key], **results.get(key, {})} for key in tables}
    merged = {key: {**old.get(key, {}), **new.get(key, {})} for key in _BY_TASK}
    merged["suites"] = list(dict.fromkeys([*old["suites"], *new["suites"]]))
    merged["other_split"] = sorted({*old["other_split"]} - repeated | {*new["other_split"]})
    for key in ("requests", "truncated"):
        if "" in merged[key]:  # of all tasks together
            merged[key][""] = old[key].get("", 0) + new[key].get("", 0)
    for key in ("tokens_asked", "tokens_read", "seconds"):
        if old.get(key) is not None and new[key] is not None:
            merged[key] = round(old[key] + new[key], 3)
    if old.get("longest_request") is not None and new["longest_request"] is not None:
        merged["longest_request"] = max(old["longest_request"], new["longest_request"])
    return {**results, **joined, "metalion": {**new, **merged}}


def _kind(out: Path) -> str | None:
    """Return the kind of a file's results, or None for another file."""
    try:
        content = read_json(out, "")
    except ValueError:
        return None
    return next((name for name, (key, _) in KINDS.items() if key in content), None)


def _plain(value: Any) -> Any:
    """Return a setting as JSON reads it back."""
    return list(value) if isinstance(value, tuple) else value
