"""Imports: models, data and megatron_lite do not import one another, and imports have no cycles."""

from __future__ import annotations

import ast
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PARTS = ("models", "data", "megatron_lite")
PROGRAMS = ("tools", "train", "eval")


@cache
def modules() -> dict[str, Path]:
    """Return every module of the project by its dotted name."""
    files = [path for part in (*PARTS, "tools") for path in (ROOT / part).rglob("*.py")]
    files += [ROOT / "train.py", ROOT / "eval.py"]
    return {
        ".".join(p for p in path.relative_to(ROOT).with_suffix("").parts if p != "__init__"): path for path in files
    }


@cache
def imports() -> dict[str, frozenset[str]]:
    """Return the project modules that every module imports anywhere in its code, without imports for types."""
    known = modules()
    return {name: frozenset(_imported(name, path, known) - {name}) for name, path in known.items()}


def _imported(name: str, path: Path, known: dict[str, Path]) -> set[str]:
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    tree = ast.parse(path.read_text())
    for_types = {
        id(node)
        for block in ast.walk(tree)
        if isinstance(block, ast.If) and "TYPE_CHECKING" in ast.unparse(block.test)
        for node in ast.walk(block)
    }
    imported: set[str] = set()
    for node in ast.walk(tree):
        if id(node) in for_types:
            continue
        if isinstance(node, ast.Import):
            imported |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            imported |= {f"{base}.{alias.name}" if f"{base}.{alias.name}" in known else base for alias in node.names}
    return imported & known.keys()


@pytest.mark.parametrize("part", PARTS)
def test_packages_do_not_import_one_another(part):
    others = {other for other in (*PARTS, *PROGRAMS) if other != part}
    wrong = [
        f"{name} imports {other}"
        for name, imported in imports().items()
        if name.partition(".")[0] == part
        for other in sorted(imported)
        if other.partition(".")[0] in others
    ]
    assert not wrong


def test_no_import_cycles():
    graph = dict(imports())
    while leaves := [name for name, imported in graph.items() if not imported & graph.keys()]:
        for name in leaves:
            del graph[name]
    assert not graph, f"modules in an import cycle, or that import one: {sorted(graph)}"


def test_shipped_code_patches_nothing():
    assert [name for name, path in modules().items() if "unittest" in path.read_text()] == []


START = """
import sys
import torch
import megatron_lite.trainer
from megatron_lite.engine.deepspeed import leave_compiler_unloaded
from models.config import ModelConfig
from models.language_model import LanguageModel

with torch.device("meta"):
    LanguageModel(ModelConfig(vocab_size=8, num_layers=1, hidden_size=8, num_heads=1, mixers=("metala",)), seed=0)
leave_compiler_unloaded()
weight = torch.nn.Parameter(torch.ones(2))
optimizer = torch.optim.AdamW([weight], lr=0.5, weight_decay=0.0, fused=True)
weight.sum().backward()
optimizer.step()
optimizer.load_state_dict(optimizer.state_dict())
optimizer.zero_grad()
assert torch.allclose(weight, torch.full((2,), 0.5)) and weight.grad is None
sys.exit("torch._dynamo" in sys.modules)
"""


def test_start_of_a_run_loads_no_compiler() -> None:
    """torch.compile's modules would add a second of processor time to every start, and to commands that read checkpoints."""
    assert subprocess.run([sys.executable, "-c", START], cwd=ROOT).returncode == 0
