"""The outcomes of a command on a damaged file, and the record of failed cases."""

from __future__ import annotations

import json
from pathlib import Path

REFUSED = "refused"
HARMLESS = "harmless"
UNHASHED = "accepted: no checksum"
SILENT = "silently accepted"
UNNAMED = "file not named"
TRACEBACK = "traceback"
FAILURES = (SILENT, UNNAMED, TRACEBACK)  # their counts must be 0


def record_failure(folder: Path, **case: object) -> None:
    """Append a case to `failures.jsonl` of the folder."""
    with (folder / "failures.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps(case) + "\n")
