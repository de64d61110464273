"""Refuse token files and corpora that changed since the runs of a comparison began: their losses cannot be compared."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from data.atomic_io import read_json, write_text
from data.manifest import read_manifest
from megatron_lite.metrics.logger import FILE_NAME
from tools.loading.token_data import PreparedData

FILE = "token_files.json"


def check_token_files(folder: Path, texts: Iterable[PreparedData]) -> None:
    """Raise ValueError for token files whose checksums differ from those in `folder`, if a run in the folder has begun.

    Files without checksums in their manifest are not checked.
    """
    saved = _saved(folder)
    changed = [name for name, checksums in _checksums(texts).items() if saved.get(name, checksums) != checksums]
    if changed and any(folder.glob(f"*/{FILE_NAME}")):
        raise ValueError(
            f"{changed[0]} has other content than when the runs in {folder} began, so their losses cannot be compared. Restore "
            "the text, give the comparison another --name, or remove the folder"
        )


def write_token_files(folder: Path, texts: Iterable[PreparedData]) -> None:
    """Add the checksums of the token files to `token_files.json` of a comparison's folder."""
    if content := {**_saved(folder), **_checksums(texts)}:
        write_text(folder / FILE, json.dumps(content, indent=1) + "\n")


def _saved(folder: Path) -> dict[str, Any]:
    path = folder / FILE
    return read_json(path, "remove it; it is written again") if path.is_file() else {}


def _checksums(texts: Iterable[PreparedData]) -> dict[str, Any]:
    """Return name -> checksums in the manifest. A cached corpus has another prefix after a change, so its settings name it."""
    prefixes = {
        f"the {Path(prefix).name} of data.corpus {text.corpus}" if text.corpus else prefix: prefix
        for text in texts
        for prefix in text.prefixes
    }
    manifests = {name: read_manifest(prefix) or {} for name, prefix in sorted(prefixes.items())}
    return {name: manifest["checksums"] for name, manifest in manifests.items() if "checksums" in manifest}
