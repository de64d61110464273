"""docs/design/architecture.md shows the folders and import directions that the code has."""

from __future__ import annotations

import re
from functools import cache

import pytest

from .test_imports import ROOT, imports, modules

PAGE = ROOT / "docs" / "design" / "architecture.md"
PACKAGES = ("megatron_lite", "models", "data", "tools")


def folders() -> set[str]:
    """Return every folder of the packages that holds source, as "models/kernels/gla"."""
    return {
        str(path.parent.relative_to(ROOT))
        for package in PACKAGES
        for path in (ROOT / package).rglob("*")
        if path.is_file() and path.suffix in (".py", ".sbatch")
    }


def documented_paths() -> list[str]:
    """Return the paths of the page's tree."""
    tree = PAGE.read_text().split("## Tree")[1].split("##")[0]
    above: list[str] = []
    paths = []
    for line in re.findall(r"^    ( *\S+) +", tree, re.MULTILINE):
        depth = (len(line) - len(line.lstrip())) // 2
        above[depth:] = [line.strip().rstrip("/")]
        paths.append("/".join(above))
    return paths


def test_tree_names_every_folder_and_nothing_else():
    names = documented_paths()
    assert folders() - set(names) == set()
    assert [name for name in names if not (ROOT / name).exists()] == []


@cache
def layers(package: str) -> list[list[str]]:
    """Return the names of a package from left to right, as the page orders them."""
    (line,) = re.findall(rf"^    {package} +(.*<.*)$", PAGE.read_text(), re.MULTILINE)
    return [names.split(", ") for names in line.split(" < ")]


@pytest.mark.parametrize("package", ["megatron_lite", "models", "data"])
def test_imports_go_in_the_documented_direction(package: str):
    place = {name: index for index, names in enumerate(layers(package)) for name in names}

    def part(module: str) -> str | None:
        names = module.split(".")
        return names[1] if names[0] == package and len(names) > 1 and names[1] in place else None

    wrong = [
        f"{module} imports {name}"
        for module, imported in imports().items()
        for name in imported
        if part(module) and part(name) and place[part(name)] > place[part(module)]
    ]
    assert wrong == []


def test_documented_files_exist():
    known = {str(path.relative_to(ROOT)) for path in modules().values()}
    named = re.findall(r"`([\w/]+\.py)`", PAGE.read_text())
    assert named
    for name in named:
        assert any(path == name or path.endswith(f"/{name}") for path in known), name
