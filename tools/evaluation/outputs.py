"""The file that an evaluation writes: looked at before the work, and never taken from results of another kind."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from data.files import read_json

# Kind of results -> the key that its files alone have, and what they are.
KINDS = {
    "suites": ("metalion", "suites or tasks"),
    "needle": ("cells", "--suite needle"),
    "texts": ("checkpoint", "perplexities of texts"),
}
_BESIDE = (".md", ".tex", ".png")


def check_output(out: Path, kind: str | None = None) -> None:
    """Raises ValueError where no file can be written, where a table beside the results has their name, or where results of
    another kind lie. Writes nothing.

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
    elif out.is_file() and (found := _kind(out)):
        raise ValueError(f"{out} holds results of {KINDS[found][1]}: {mend}")


def earlier_results(out: Path, kind: str) -> dict[str, Any]:
    """What an earlier evaluation of this kind left in the file; empty where there is none.

    Raises ValueError for a file of anything else.
    """
    if not out.is_file():
        return {}
    mend = "name another file with --out, or remove it"
    content = read_json(out, mend)
    if (found := _kind(out)) != kind:
        held = "no results of eval.py" if found is None else f"results of {KINDS[found][1]}"
        raise ValueError(f"{out} holds {held}, where those of {KINDS[kind][1]} would go: {mend}")
    return content


def _kind(out: Path) -> str | None:
    """Of KINDS; None for a file of anything else."""
    try:
        content = read_json(out, "")
    except ValueError:
        return None
    return next((name for name, (key, _) in KINDS.items() if key in content), None)
