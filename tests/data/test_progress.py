import io

import pytest
from tqdm import tqdm

from data import progress
from data.progress import ProgressBar


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_redirected_progress_is_plain_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "SECONDS_BETWEEN_LINES", 0.0)
    out = io.StringIO()
    with ProgressBar(total=4, desc="reading", unit="file", file=out, leave=False) as bar:
        bar.update(2)
        tqdm.write("a message", file=out)
        bar.update(2)
    lines = out.getvalue().splitlines()
    assert lines[0].startswith("reading: 0 of 4 files in 00:00, ")
    assert "reading: 2 of 4 files in 00:00, 00:00 left" in lines
    assert "\r" not in out.getvalue()
    assert "\x1b" not in out.getvalue()


def test_short_work_prints_no_line() -> None:
    out = io.StringIO()
    for _ in ProgressBar(range(1000), file=out):
        pass
    assert out.getvalue() == ""


def test_terminal_shows_a_bar() -> None:
    out = Terminal()
    for _ in ProgressBar(range(3), desc="reading", file=out):
        pass
    assert out.getvalue().startswith("\rreading:   0%|")


def test_bar_whose_start_was_interrupted_closes() -> None:
    ProgressBar.__new__(ProgressBar).close()
