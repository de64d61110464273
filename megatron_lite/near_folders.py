"""Name the folders beside a path that does not exist."""

from __future__ import annotations

from difflib import SequenceMatcher
from pathlib import Path


def near_folders(path: Path) -> str:
    """Return " (beside it: A, B)" with at most five folders beside a missing path, the most similar name first; else ""."""
    if path.exists() or not path.parent.is_dir():
        return ""
    folders = sorted(other for other in path.parent.iterdir() if other.is_dir() and not other.name.startswith("."))
    folders.sort(key=lambda other: -SequenceMatcher(None, path.name, other.name).ratio())
    return f" (beside it: {', '.join(map(str, folders[:5]))})" if folders else ""
