"""Who may name whom: three parts that do not know one another, wired by the programs; and no file reaches back to one that it
is reached from."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PARTS = ("models", "data", "megatron_lite")
PROGRAMS = ("tools", "train", "eval")


def modules() -> dict[str, Path]:
    files = [path for part in (*PARTS, "tools") for path in (ROOT / part).rglob("*.py")]
    files += [ROOT / "train.py", ROOT / "eval.py"]
    return {
        ".".join(p for p in path.relative_to(ROOT).with_suffix("").parts if p != "__init__"): path for path in files
    }


@cache
def named_by() -> dict[str, frozenset[str]]:
    """Every module of the project and those that it imports anywhere in its code, but for types alone."""
    known = modules()
    return {name: frozenset(_named(name, path, known) - {name}) for name, path in known.items()}


def _named(name: str, path: Path, known: dict[str, Path]) -> set[str]:
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    tree = ast.parse(path.read_text())
    for_types = {
        id(node)
        for block in ast.walk(tree)
        if isinstance(block, ast.If) and "TYPE_CHECKING" in ast.unparse(block.test)
        for node in ast.walk(block)
    }
    found: set[str] = set()
    for node in ast.walk(tree):
        if id(node) in for_types:
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            found |= {f"{base}.{alias.name}" if f"{base}.{alias.name}" in known else base for alias in node.names}
    return found & known.keys()


@pytest.mark.parametrize("part", PARTS)
def test_the_parts_do_not_know_one_another(part):
    others = {other for other in (*PARTS, *PROGRAMS) if other != part}
    wrong = [
        f"{name} imports {other}"
        for name, named in named_by().items()
        if name.partition(".")[0] == part
        for other in sorted(named)
        if other.partition(".")[0] in others
    ]
    assert not wrong


def test_no_import_cycles():
    graph = {name: set(named) for name, named in named_by().items()}
    while free := [name for name, named in graph.items() if not named & graph.keys()]:
        for name in free:
            del graph[name]
    assert not graph, f"these files import one another, or import files that do: {sorted(graph)}"


def test_shipped_code_patches_nothing():
    assert [name for name, path in modules().items() if "unittest" in path.read_text()] == []
