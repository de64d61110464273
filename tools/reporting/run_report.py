"""Write a self-contained HTML page about a run: curves, samples, evaluation, configuration, environment.

`python -m tools.plot RUN --html`. The page template is `report_page.html`; the data are inserted as JSON. The page shows them
with text functions only, so that generated text is never interpreted as HTML.
"""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from data.atomic_io import write_text
from megatron_lite.checkpoint.reader import CONFIG, exists, read_manifest, resolve
from tools.reporting.image_figures import CONFUSIONS, PREDICTIONS
from tools.reporting.run_curves import read_run, run_folder

PAGE = Path(__file__).with_name("report_page.html")
PLACEHOLDER = '"the data of the run"'
MOST_POINTS = 12_000


def write_report(run: Path, out: Path | None = None) -> Path:
    """Write the page of a run to `out` (default: report.html in its folder).

    Raises FileNotFoundError if there are no metrics, ValueError if they have no training step.
    """
    out = out or run_folder(run) / "report.html"
    data = json.dumps(collect(run), ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    # A script element ends at the first "</script", also inside a string.
    page = PAGE.read_text(encoding="utf-8").replace(PLACEHOLDER, data.replace("<", "\\u003c"), 1)
    write_text(out, page)
    return out


def collect(run: Path) -> dict[str, Any]:
    """Return the data of the page as JSON values; missing data are None or empty. Raises as `write_report`."""
    lines = read_run(run)
    folder, train = run_folder(run), lines.train
    samples = [{key: line.get(key, "") for key in ("step", "prompt", "text")} for line in lines.sample]
    summary = _read_json(folder / "summary.json") or {}
    is_current = summary.get("steps") == train[-1]["step"]  # the summary may be of an earlier, shorter run
    if "sample" in summary and not samples:
        samples = [{"step": summary.get("steps"), "prompt": "", "text": summary["sample"]}]
    config, environment = _checkpoint(folder)
    return {
        "name": folder.resolve().name,
        "written": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "train": columns(train, MOST_POINTS),
        "validation": columns(lines.validation, MOST_POINTS),
        "scores": columns(lines.evaluation, MOST_POINTS),
        "totals": {key: summary.get(key) for key in ("training_seconds", "tokens_per_second")} if is_current else {},
        "steps_per_point": -(-len(train) // MOST_POINTS),
        "samples": samples,
        "pictures": [_embedded(folder / name) for name in (PREDICTIONS, CONFUSIONS) if (folder / name).is_file()],
        "evaluation": _read_json(folder / "results.json"),
        "compressors": summary.get("compressors"),
        "config": config,
        "environment": environment,
    }


def _embedded(picture: Path) -> dict[str, str]:
    """Return title and data URI of a picture, so that the page needs no other file."""
    content = base64.b64encode(picture.read_bytes()).decode()
    return {"title": picture.stem.replace("_", " "), "source": f"data:image/png;base64,{content}"}


def columns(lines: Sequence[dict[str, Any]], most: int) -> dict[str, list[float | None]]:
    """Return the numbers of each key, one per line. More than `most` lines are averaged in groups.

    Step, token count and time of a group are the last ones. Missing and non-finite numbers are None. Keys without numbers are
    left out.
    """
    width = max(1, -(-len(lines) // most))
    groups = [lines[i : i + width] for i in range(0, len(lines), width)]
    keys = dict.fromkeys(key for line in lines for key, value in line.items() if _is_number(value))
    counters = ("step", "tokens", "skipped_steps", "time")
    return {key: [(_last if key in counters else _mean)(group, key) for group in groups] for key in keys}


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _last(group: Sequence[dict[str, Any]], key: str) -> float | None:
    value = group[-1].get(key)
    return value if _is_number(value) else None


def _mean(group: Sequence[dict[str, Any]], key: str) -> float | None:
    values = [line[key] for line in group if _is_number(line.get(key))]
    return float(f"{sum(values) / len(values):.6g}") if values else None


def _checkpoint(folder: Path) -> tuple[str | None, dict[str, Any] | None]:
    """Return the configuration as text and the environment of the newest checkpoint, or None without a checkpoint."""
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
    """Read a JSON object; None if the file does not exist. NaN and Infinity become None. Raises ValueError naming the file."""
    if not path.is_file():
        return None
    try:
        return json.loads(path.read_text(encoding="utf-8"), parse_constant=lambda _: None)
    except ValueError as error:
        raise ValueError(f"{path} is no JSON ({error}): remove it, or write it again") from error
