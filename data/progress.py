"""Show progress as a bar on a terminal, and as a plain line every ten seconds in a file or pipe."""

from __future__ import annotations

import sys
import time
from typing import Any

from tqdm import tqdm

SECONDS_BETWEEN_LINES = 10.0


class ProgressBar(tqdm):
    """Show a tqdm bar on a terminal. Elsewhere print plain lines, without control characters. Arguments as tqdm's."""

    # tqdm closes a bar whose __init__ was interrupted.
    disable = True
    _prints_lines = False

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        self._last_line = time.monotonic()
        self._prints_lines = not (settings.get("file") or sys.stderr).isatty()
        if self._prints_lines:
            unit = str(settings.get("unit", "step"))
            units = unit if unit == "B" else unit + ("es" if unit.endswith("ch") else "s")
            settings |= {
                "mininterval": SECONDS_BETWEEN_LINES,
                "delay": SECONDS_BETWEEN_LINES,
                "miniters": 1,
                "bar_format": "{desc}: {n_fmt} of {total_fmt} " + units + " in {elapsed}, {remaining} left{postfix}",
            }
        super().__init__(*arguments, **settings)

    def display(self, msg: str | None = None, pos: int | None = None) -> bool:
        """Draw the bar, or print a line if the last one is old enough. Returns whether tqdm must return the cursor."""
        if not self._prints_lines:
            return bool(super().display(msg, pos))
        now = time.monotonic()
        if now - self._last_line >= SECONDS_BETWEEN_LINES:
            self._last_line = now
            print(str(self) if msg is None else msg, file=self.fp, flush=True)
        return False

    def clear(self, *arguments: Any, **settings: Any) -> None:
        """Remove the bar from a terminal."""
        if not self._prints_lines:
            super().clear(*arguments, **settings)

    def close(self) -> None:
        """End the display."""
        if self._prints_lines and not self.disable:
            self.disable = True
            self._decr_instances(self)
        else:
            super().close()
