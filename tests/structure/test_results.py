"""Every result in docs/results has hardware, a commit and a command."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from docs.figures import draw

from .test_imports import ROOT

FOLDER = ROOT / "docs" / "results"
SUMMARY = (FOLDER / "README.md").read_text()
COMMAND = r"(?:\w+=\S+ )*(?:python|make|compute-sanitizer) "


def test_summary_gives_hardware_commit_and_command_for_every_claim() -> None:
    commands = dict(re.findall(rf"^    ([A-Z]\d?) +({COMMAND}.*)$", SUMMARY, re.MULTILINE))
    rows = [line for line in SUMMARY.splitlines() if line.startswith("| ") and not line.startswith("| claim")]
    assert len(rows) > 30
    for row in rows:
        cells = [cell.strip() for cell in row.strip("|").split("|")]
        assert len(cells) == 5, row
        assert all(cells), row
        assert cells[4] in commands or re.match(rf"`{COMMAND}", cells[4]), row


def test_summary_is_short() -> None:
    assert len(SUMMARY.splitlines()) <= 120


@pytest.mark.parametrize("page", sorted(path.name for path in FOLDER.glob("*.md") if path.name != "README.md"))
def test_section_with_a_table_has_a_command(page: str) -> None:
    for section in re.split(r"^#+ ", (FOLDER / page).read_text(), flags=re.MULTILINE):
        if re.search(r"^\|", section, re.MULTILINE):
            title = section.splitlines()[0]
            assert re.search(rf"(?:^    |`){COMMAND}", section, re.MULTILINE), f"{page}, {title}: no command"


def test_figures_are_those_that_pages_show() -> None:
    pages = "".join(path.read_text() for path in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
    figures = {path.name for path in (ROOT / "docs" / "figures").glob("*.png")}
    assert set(re.findall(r"figures/(\w+\.png)", pages)) == figures


def test_figures_are_drawn_from_the_tables_of_the_pages(tmp_path: Path) -> None:
    draw.main(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == set(draw.FIGURES)
