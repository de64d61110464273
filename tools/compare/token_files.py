"""Refuse token files that were replaced since the runs of a comparison began: losses on other text cannot be compared."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from data.atomic_io import read_json, write_text
from data.manifest import read_manifest
from megatron_lite.metrics.logger import FILE_NAME
from tools.loading.token_data import PreparedData

FILE = "token_files.json"


def check_token_files(folder: Path, texts: Iterable[PreparedData]) -> None:
    """Write the checksums of the token files to `token_files.json` of a comparison's folder.

    Raises ValueError for checksums that differ from those there, if a run in the folder has begun. Files without checksums in
    their manifest, and those of a cached corpus, are not checked.
    """
    path = folder / FILE
    saved = read_json(path, "remove it; it is written again") if path.is_file() else {}
    prefixes = {prefix for text in texts for prefix in (*text.train, text.validation, text.test) if prefix is not None}
    current = {
        prefix: checksums
        for prefix in sorted(prefixes)
        if (checksums := (read_manifest(prefix) or {}).get("checksums")) is not None
    }
    changed = [prefix for prefix, checksums in current.items() if saved.get(prefix, checksums) != checksums]
    if changed and any(folder.glob(f"*/{FILE_NAME}")):
        raise ValueError(
            f"{changed[0]} has other content than when the runs in {folder} began, so their losses cannot be compared. Restore "
            "the token files, give the comparison another --name, or remove the folder"
        )
    if content := {**saved, **current}:
        write_text(path, json.dumps(content, indent=1) + "\n")
