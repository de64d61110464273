"""Name the folders beside a path that does not exist."""

from __future__ import annotations

import os
from difflib import SequenceMatcher
from pathlib import Path


def near_folders(path: Path, *files: str) -> str:
    """Return " (beside it: A, B)" with at most five folders beside a missing path, the most similar name first; else "".

    files: a folder is named if it holds one of them.
    """
    if path.exists() or not path.parent.is_dir():
        return ""
    # Unlike Path.is_file, os.path.isfile raises no error for a folder that cannot be read.
    folders = [other for other in sorted(path.parent.iterdir()) if any(os.path.isfile(other / file) for file in files)]
    folders.sort(key=lambda other: -SequenceMatcher(None, path.name, other.name).ratio())
    return f" (beside it: {', '.join(map(str, folders[:5]))})" if folders else ""
