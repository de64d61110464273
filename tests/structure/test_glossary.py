"""docs/reference/glossary.md names symbols and files that the code has."""

from __future__ import annotations

import re

from .test_imports import ROOT

PAGE = (ROOT / "docs" / "reference" / "glossary.md").read_text()
KEYS = (ROOT / "megatron_lite" / "config" / "schema.py").read_text()  # a term may name the key that sets it


def test_symbols_stand_in_the_file_of_their_row() -> None:
    rows = [[cell.strip() for cell in row] for row in re.findall(r"^\| (.+?) \|(.*?)\| `(\S+)` \|", PAGE, re.MULTILINE)]
    assert len(rows) > 50
    missing = []
    for term, symbols, file in rows:
        path = ROOT / file
        assert path.exists(), file
        source = "\n".join(one.read_text() for one in ([path] if path.is_file() else path.rglob("*.py")))
        for symbol in re.findall(r"`([\w.]+)`", symbols):
            name = symbol.rpartition(".")[2]
            if name.isidentifier() and not re.search(rf"\b{name}\b", source + KEYS):
                missing.append(f"{term}: {symbol} is not in {file}")
    assert not missing, "\n".join(missing)
