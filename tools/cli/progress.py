"""Show progress: a bar on a terminal, a line now and then in redirected output."""

from __future__ import annotations

import sys
from typing import Any

from tqdm import tqdm

SECONDS_BETWEEN_LINES = 10.0


class ProgressBar(tqdm):
    """Extend tqdm's bar for output that is no terminal: one line every ten seconds, and none for shorter work."""

    lines = False

    def __init__(self, *args: Any, **options: Any) -> None:
        if not (options.get("file") or sys.stderr).isatty():
            self.lines = True
            unit = str(options.get("unit", "step"))
            unit += "es" if unit.endswith("ch") else "s"
            options |= {
                "delay": SECONDS_BETWEEN_LINES,
                "mininterval": SECONDS_BETWEEN_LINES,
                "miniters": 1,
                "leave": False,
                "bar_format": "{desc}: {n_fmt} of {total_fmt} " + unit + " in {elapsed}, {remaining} left",
            }
        super().__init__(*args, **options)

    def display(self, msg: str | None = None, pos: int | None = None) -> bool:
        """Draw the bar, or print a line. Returns whether tqdm must return the cursor."""
        if not self.lines:
            return bool(super().display(msg, pos))
        if text := str(self) if msg is None else msg:
            print(text, file=self.fp, flush=True)
        return False
