"""One page about a run, in one file: curves to zoom into, samples, evaluation, configuration, environment.

`python -m tools.plot RUN --html`. The page (`report_page.html`) is static; a run's data go into it as JSON and become
text by the browser's text functions only, so that nothing that a model wrote is ever read as HTML.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from data.atomic_io import write_whole
from megatron_lite.checkpoint.reader import CONFIG, exists, read_manifest, resolve
from megatron_lite.metrics.logger import read_metrics

PAGE = Path(__file__).with_name("report_page.html")
PLACEHOLDER = '"the data of the run"'
MOST_POINTS = 12_000


def write_report(run: Path, out: Path | None = None) -> Path:
    """Writes the page of a run to `out` (default `run/report.html`).

    Raises FileNotFoundError when there are no metrics, ValueError when they hold no training step yet.
    """
    folder = run.parent if run.is_file() else run
    out = out or folder / "report.html"
    data = json.dumps(collect(run), ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    # A script element ends at the first "</script", wherever it stands.
    page = PAGE.read_text(encoding="utf-8").replace(PLACEHOLDER, data.replace("<", "\\u003c"), 1)
    write_whole(out, page)
    return out


def collect(run: Path) -> dict[str, Any]:
    """Everything that the page shows, as JSON values. What a run has not (yet) is null or empty. Raises as above."""
    lines = read_metrics(run)
    folder = run.parent if run.is_file() else run
    train = [line for line in lines if line.get("kind") == "train"]
    if not train:
        raise ValueError(f"{run}: no training step is logged there yet; wait for the first ones")
    validation = [line for line in lines if line.get("kind") == "validation"]
    evaluation = [line for line in lines if line.get("kind") == "evaluation"]
    samples = [
        {k: line.get(k, "") for k in ("step", "prompt", "text")} for line in lines if line.get("kind") == "sample"
    ]
    summary = _read_json(folder / "summary.json") or {}
    if "sample" in summary and not samples:
        samples = [{"step": summary.get("steps"), "prompt": "", "text": summary["sample"]}]
    config, environment = _checkpoint(folder)
    return {
        "name": folder.resolve().name,
        "written": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "train": columns(train, MOST_POINTS),
        "validation": columns(validation, MOST_POINTS),
        "scores": columns(evaluation, MOST_POINTS),
        "steps_a_point": -(-len(train) // MOST_POINTS),
        "samples": samples,
        "evaluation": _read_json(folder / "results.json"),
        "compressors": summary.get("compressors"),
        "config": config,
        "environment": environment,
    }


def columns(lines: Sequence[dict[str, Any]], most: int) -> dict[str, list[float | None]]:
    """Numbers by key, one a line; of more than `most` lines, means of neighbours (the last step and token count).

    Missing and not finite numbers are None. Keys without any number are left out.
    """
    width = max(1, -(-len(lines) // most))
    groups = [lines[i : i + width] for i in range(0, len(lines), width)]
    keys = dict.fromkeys(key for line in lines for key, value in line.items() if _is_number(value))
    found: dict[str, list[float | None]] = {}
    for key in keys:
        last = key in ("step", "tokens", "skipped_steps", "time")
        found[key] = [_last(group, key) if last else _mean(group, key) for group in groups]
    return found


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _last(group: Sequence[dict[str, Any]], key: str) -> float | None:
    value = group[-1].get(key)
    return value if _is_number(value) else None


def _mean(group: Sequence[dict[str, Any]], key: str) -> float | None:
    values = [line[key] for line in group if _is_number(line.get(key))]
    return float(f"{sum(values) / len(values):.6g}") if values else None


def _checkpoint(folder: Path) -> tuple[str | None, dict[str, Any] | None]:
    """Configuration as text, and what the newest checkpoint says of its making; None where there is no checkpoint."""
    if not exists(folder):
        return None, None
    step = resolve(folder)
    manifest = read_manifest(step)
    config = (step / CONFIG).read_text(encoding="utf-8") if (step / CONFIG).is_file() else None
    parameters = sum(math.prod(tensor["shape"]) for tensor in manifest["tensors"].values())
    return config, {
        "checkpoint": step.name,
        "parameters": parameters,
        "command": " ".join(manifest.get("command", [])),
        "layout": manifest["layout"],
        "versions": manifest.get("versions", {}),
    }


def _read_json(path: Path) -> dict[str, Any] | None:
    """None where there is no file. NaN and Infinity, which no browser reads, are None too. Raises ValueError naming the file."""
    if not path.is_file():
        return None
    try:
        return json.loads(path.read_text(encoding="utf-8"), parse_constant=lambda _: None)
    except ValueError as error:
        raise ValueError(f"{path} is no JSON ({error}): remove it, or have it written again") from error
