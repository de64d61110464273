"""The model's own source as one folder of files, which is what Transformers can load.

Transformers follows relative imports within one folder only, so `mixers/metala.py` becomes `mixers_metala.py` and every
relative import is rewritten to match; nothing else changes but

- the table of mixers keeps the ones that the model uses, so that a folder holds no file without a purpose;
- imports of optional packages stand in try blocks, where Transformers' check of requirements does not look;
- the two files that Transformers opens by name also name what they reach indirectly: it reads the imports of a file and
  copies those files, and in its older versions not what these import in turn.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Collection, Mapping
from pathlib import Path

MODELS = Path(__file__).resolve().parents[2] / "models"
ENTRY = "hf.modeling_metalion"
CONFIG_ENTRY = "hf.configuration_metalion"

_AT_HAND = {"torch", "transformers", *sys.stdlib_module_names}


def flat_source(mixers: Collection[str]) -> dict[str, str]:
    """Return file name to text: `modeling_metalion.py` and every file of `models/` that it imports, for these mixers."""
    files: dict[str, str] = {}
    imports: dict[str, list[str]] = {}
    waiting = [ENTRY]
    while waiting:
        module = waiting.pop()
        name = f"{_flat(module)}.py"
        if name in files:
            continue
        path = _path(module)
        text = path.read_text(encoding="utf-8")
        if module == "mixers":
            text = _only_mixers(text, mixers)
        text, imported = _rewrite(text, module, package=path.name == "__init__.py")
        files[name] = text
        imports[module] = imported
        waiting += imported
    for entry in (ENTRY, CONFIG_ENTRY):
        files[f"{_flat(entry)}.py"] += _also_needed(_reached(entry, imports) - {entry, *imports[entry]})
    return files


def _reached(module: str, imports: Mapping[str, Collection[str]]) -> set[str]:
    found: set[str] = set()
    waiting = [module]
    while waiting:
        if (name := waiting.pop()) not in found:
            found.add(name)
            waiting += imports[name]
    return found


def _also_needed(modules: Collection[str]) -> str:
    lines = [f"    from .{_flat(module)} import *\n" for module in sorted(modules)]
    return "\n\nif False:  # never run: it names the files that Transformers must copy along with this one\n" + "".join(
        lines
    )


def _path(module: str) -> Path:
    path = MODELS.joinpath(*module.split("."))
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def _flat(module: str) -> str:
    return module.removeprefix("hf.").replace(".", "_")


def _rewrite(text: str, module: str, *, package: bool) -> tuple[str, list[str]]:
    """The text with flat imports, and the modules that it imports."""
    lines = text.splitlines(keepends=True)
    imported = []
    tree = ast.parse(text)
    guarded = {id(node) for block in ast.walk(tree) if isinstance(block, ast.Try) for node in ast.walk(block)}
    # From the last to the first, so that line numbers stay true.
    for node in sorted(_imports(tree), key=lambda n: n.lineno, reverse=True):
        first, last = node.lineno - 1, node.end_lineno or node.lineno
        if isinstance(node, ast.ImportFrom) and node.level:
            target = _target(node, module, package=package)
            imported.append(target)
            lines[first] = re.sub(r"from\s+\.[\w.]*\s+import", f"from .{_flat(target)} import", lines[first], count=1)
        elif _top_level(node) not in _AT_HAND and id(node) not in guarded:
            indent = " " * node.col_offset
            body = ["    " + line for line in lines[first:last]]
            lines[first:last] = [f"{indent}try:\n", *body, f"{indent}except ImportError:\n", f"{indent}    raise\n"]
    return "".join(lines), imported


def _imports(tree: ast.Module) -> list[ast.Import | ast.ImportFrom]:
    return [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]


def _top_level(node: ast.Import | ast.ImportFrom) -> str:
    name = node.names[0].name if isinstance(node, ast.Import) else node.module or ""
    return name.partition(".")[0]


def _target(node: ast.ImportFrom, module: str, *, package: bool) -> str:
    """The module that a relative import means, from the top of `models/`. ValueError for `from . import file`."""
    above = module.split(".") if package else module.split(".")[:-1]
    above = above[: len(above) - (node.level - 1)]
    if node.module is None:
        raise ValueError(
            f"{module}: write `from .file import name` instead of `from . import file`, which cannot be flat"
        )
    return ".".join([*above, *node.module.split(".")])


def _only_mixers(text: str, mixers: Collection[str]) -> str:
    """`mixers/__init__.py` without the imports and the entries of MIXERS that are not used."""
    tree = ast.parse(text)
    table = next(
        node.value for node in tree.body if isinstance(node, ast.AnnAssign) and isinstance(node.value, ast.Dict)
    )
    drop: set[int] = set()
    unused: set[str] = set()
    for key, value in zip(table.keys, table.values, strict=True):
        if isinstance(key, ast.Constant) and isinstance(value, ast.Name) and key.value not in mixers:
            drop.add(key.lineno)
            unused.add(value.id)
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and {alias.name for alias in node.names} <= unused:
            drop.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return "".join(line for number, line in enumerate(text.splitlines(keepends=True), 1) if number not in drop)
