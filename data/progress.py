"""Show progress as a bar on a terminal, and as a plain line every ten seconds in a file or pipe."""

from __future__ import annotations

import sys
import time
from typing import Any

from tqdm import tqdm

SECONDS_BETWEEN_LINES = 10.0
_LINE = "{desc}: {n_fmt} of {total_fmt}{unit} ({percentage:.0f}%), {elapsed}, {remaining} left{postfix}"


class ProgressBar(tqdm):
    """Show a tqdm bar on a terminal. Elsewhere print plain lines, without control characters. Arguments as tqdm's."""

    disable: bool

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        self._last_line = time.monotonic()
        self._prints_lines = not (settings.get("file") or sys.stderr).isatty()
        if self._prints_lines:
            interval = SECONDS_BETWEEN_LINES
            settings |= {"mininterval": interval, "delay": interval, "miniters": 1, "bar_format": _LINE}
        super().__init__(*arguments, **settings)

    def display(self, msg: str | None = None, pos: int | None = None) -> bool:
        """Draw the bar, or print a line if the last one is old enough."""
        if not self._prints_lines:
            return super().display(msg, pos)
        now = time.monotonic()
        if now - self._last_line < SECONDS_BETWEEN_LINES:
            return False
        self._last_line = now
        print(msg or str(self), file=self.fp, flush=True)
        return True

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
