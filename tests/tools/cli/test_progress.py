"""Progress is a bar on a terminal, and lines in redirected output."""

from __future__ import annotations

import io

import pytest

from tools.cli import progress
from tools.cli.progress import ProgressBar


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_redirected_progress_has_lines_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "SECONDS_BETWEEN_LINES", 1e-9)
    out = io.StringIO()
    with ProgressBar(total=3, desc="texts", unit="batch", file=out) as bar:
        for _ in range(3):
            bar.update()
    lines = out.getvalue().splitlines()
    assert "\r" not in out.getvalue()
    assert lines[-1].startswith("texts: 3 of 3 batches in 00:00")
    assert "" not in lines


def test_short_work_prints_no_line() -> None:
    out = io.StringIO()
    assert list(ProgressBar(range(5), file=out)) == [0, 1, 2, 3, 4]
    assert out.getvalue() == ""


def test_terminal_has_a_bar() -> None:
    out = Terminal()
    list(ProgressBar(range(5), desc="texts", file=out))
    assert "\rtexts: 100%" in out.getvalue()
