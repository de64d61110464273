"""Let started processes import this project from any working folder."""

from __future__ import annotations

import os
from pathlib import Path

_ROOT = Path(__file__).parents[2]


def worker_environment() -> dict[str, str]:
    """Return the environment of this process with the project's folder first in PYTHONPATH."""
    paths = (str(_ROOT), os.environ.get("PYTHONPATH"))
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
