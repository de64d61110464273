"""Help texts and tables that fit a narrow terminal."""

from __future__ import annotations

import sys

import pytest

from megatron_lite.parallel.layout import Layout
from megatron_lite.planning.memory import GIB
from tools import plan
from tools.cli.help_text import fit_text
from tools.planning.estimate import read_config
from tools.reporting.tables import plain_table, printed_table

HELP = """examples:
  python -m tools.serve out/                       a server
  python train.py --dtype bf16 --prompt "two words" --steps 3    a run
  curl localhost:8000/v1/models -H 'a: b' -d '{"c": "d e"}'

A first sentence. It has more words than the terminal has columns, here.
Short."""


def test_help_fits_the_terminal_and_commands_stay_whole():
    assert fit_text(HELP, 90) == HELP
    narrow = fit_text(HELP, 44)
    assert max(map(len, narrow.splitlines())) <= 44
    assert narrow.splitlines()[1:3] == ["  python -m tools.serve out/", "      a server"]
    assert narrow.splitlines()[3:5] == ["  python train.py --dtype bf16 \\", '      --prompt "two words" --steps 3']
    assert narrow.splitlines()[6:8] == ["  curl localhost:8000/v1/models -H 'a: b' \\", '      -d \'{"c": "d e"}\'']
    assert narrow.endswith("A first sentence. It has more words than the\nterminal has columns, here. Short.")


@pytest.fixture
def terminal(monkeypatch):
    """Return a function that makes standard output a terminal of that many columns."""

    def resize(columns: int) -> None:
        monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
        monkeypatch.setenv("COLUMNS", str(columns))

    return resize


def test_a_wide_table_continues_below_in_a_terminal(terminal):
    header, rows = ["model", "first", "second"], [["a", "1.0", "2.0"], ["b", "3.0", "4.0"]]
    whole = "model  first  second\n-----  -----  ------\na        1.0     2.0\nb        3.0     4.0"
    assert plain_table(header, rows) == whole
    terminal(20)
    assert plain_table(header, rows) == whole
    terminal(19)
    parts = plain_table(header, rows).split("\n\n")
    assert [part.splitlines()[0] for part in parts] == ["model  first", "model  second"]
    assert [part.splitlines()[-1].split() for part in parts] == [["b", "3.0"], ["b", "4.0"]]
    assert printed_table(header, rows) == plain_table(header, rows)
    terminal(3)
    assert len(plain_table(header, rows).split("\n\n")) == 2


def test_a_redirected_table_is_markdown():
    assert printed_table(["model", "first"], [["a", "1.0"]]).splitlines()[-1] == "| a | 1.0 |"


def test_layouts_fit_80_columns(terminal):
    config = read_config(["configs/default.yml", "run.device=cpu"], 1)
    memory = dict.fromkeys(("weights", "gradients", "optimizer", "activations", "workspace"), 100 * GIB)
    row = plan.Row(Layout(), 1, 2, 8, memory, {"compute": 1.5, "data": 0.5})
    terminal(80)
    text = plan.table([row], config, GIB)
    assert "does not fit" in text
    assert max(map(len, text.splitlines())) <= 80
