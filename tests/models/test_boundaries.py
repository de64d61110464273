"""The models folder is exported as source: it imports its own files, torch and the standard library, nothing else."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

MODELS = Path(__file__).resolve().parents[2] / "models"
# Imported inside functions, and in files that only such imports reach.
ON_USE = {"fla", "triton", "transformers"}


def imports(tree: ast.Module) -> list[tuple[str, bool]]:
    """Return the top-level names of absolute imports, and whether each is inside a function."""
    inside = {id(n) for f in ast.walk(tree) if isinstance(f, ast.FunctionDef) for n in ast.walk(f)}
    found = []
    for node in ast.walk(tree):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names = [node.module or ""]
        found += [(name.split(".")[0], id(node) in inside) for name in names]
    return found


@pytest.mark.parametrize("path", sorted(MODELS.rglob("*.py")), ids=lambda p: str(p.relative_to(MODELS)))
def test_imports(path):
    allowed = {"torch", *sys.stdlib_module_names}
    folder = path.relative_to(MODELS).parts[0]
    on_use_only = folder in ("kernels", "hf") or path.stem.startswith("fla")
    for name, in_function in imports(ast.parse(path.read_text())):
        assert name in allowed or (name in ON_USE and (in_function or on_use_only)), f"{path.name} imports {name}"
