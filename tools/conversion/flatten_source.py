"""Copy the model's source into one flat folder, which Transformers can load.

Transformers follows relative imports within one folder only, so `mixers/metala.py` becomes `mixers_metala.py` and every
relative import is rewritten to match. The other changes are:

- The table of mixers keeps only the mixers of the model.
- Triton kernels are omitted if the mixers use none, as softmax attention. `models/backend.py` then selects PyTorch. The C++
  kernels for a CPU are never imported by name, and so never copied.
- The training loss is omitted, because Transformers has its own, and so are the layers of image classifiers in the export of a
  language model.
- Imports of optional packages are in try blocks, which Transformers' check of requirements skips.
- The two files that Transformers opens by name also import their indirect dependencies. Older versions of Transformers copy
  only the files that these two import.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Collection, Mapping
from functools import cache
from pathlib import Path

MODELS = Path(__file__).resolve().parents[2] / "models"
ENTRY = "hf.modeling_metalion"
CONFIG_ENTRY = "hf.configuration_metalion"

_INSTALLED = {"torch", "transformers", *sys.stdlib_module_names}
_TRAINING = ("operators.cross_entropy",)


def flat_source(mixers: Collection[str], *, images: bool = False) -> dict[str, str]:
    """Return file name to text: `modeling_metalion.py` and every file of `models/` that it imports, for these mixers.

    images: the model is an image classifier; the export of a language model omits its layers.
    """
    # The backend only tests whether the kernels can be imported. Rotary positions alone are not worth Triton in an export.
    of_mixers, _ = _follow("mixers", mixers, (*_TRAINING, "backend", "kernels.rotary"))
    kernels = any(module.startswith("kernels.") for module in of_mixers)
    omitted = (*_TRAINING, *(() if kernels else ("kernels",)), *(() if images else ("image_classifier",)))
    texts, imports = _follow(ENTRY, mixers, omitted)
    for entry in (ENTRY, CONFIG_ENTRY):
        texts[entry] += _also_needed(_reached(entry, imports) - {entry, *imports[entry]})
    return {f"{_flat(module)}.py": text for module, text in texts.items()}


def _follow(
    entry: str, mixers: Collection[str], omitted: tuple[str, ...]
) -> tuple[dict[str, str], dict[str, tuple[str, ...]]]:
    """Return the text and the imports of each module that `entry` reaches, except the `omitted` modules and folders."""
    texts: dict[str, str] = {}
    imports: dict[str, tuple[str, ...]] = {}
    waiting = [entry]
    while waiting:
        module = waiting.pop()
        if module in texts:
            continue
        path = _path(module)
        text = path.read_text(encoding="utf-8")
        if module == "mixers":
            text = _only_mixers(text, mixers)
        texts[module], imports[module] = _rewrite(text, module, omitted, package=path.name == "__init__.py")
        waiting += imports[module]
    return texts, imports


def _reached(module: str, imports: Mapping[str, Collection[str]]) -> set[str]:
    reached: set[str] = set()
    waiting = [module]
    while waiting:
        if (name := waiting.pop()) not in reached:
            reached.add(name)
            waiting += imports[name]
    return reached


def _also_needed(modules: Collection[str]) -> str:
    lines = [f"    from .{_flat(module)} import *\n" for module in sorted(modules)]
    return "\n\nif False:  # never executed: names the files that Transformers must copy too\n" + "".join(lines)


def _path(module: str) -> Path:
    path = MODELS.joinpath(*module.split("."))
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def _flat(module: str) -> str:
    return module.removeprefix("hf.").replace(".", "_")


@cache  # the models that one process converts share most files
def _rewrite(text: str, module: str, omitted: tuple[str, ...], *, package: bool) -> tuple[str, tuple[str, ...]]:
    """Return the text with flat imports, and the modules that it imports.

    The import of an omitted module, always inside a function, becomes an ImportError.
    """
    lines = text.splitlines(keepends=True)
    imported = []
    tree = ast.parse(text)
    guarded = {id(node) for block in ast.walk(tree) if isinstance(block, ast.Try) for node in ast.walk(block)}
    # In reverse, so that the line numbers of the remaining nodes stay valid.
    for node in sorted(_imports(tree), key=lambda n: n.lineno, reverse=True):
        first, last = node.lineno - 1, node.end_lineno or node.lineno
        if isinstance(node, ast.ImportFrom) and node.level:
            target = _target(node, module, package=package)
            if any(f"{target}.".startswith(f"{name}.") for name in omitted):
                lines[first:last] = [
                    f"{' ' * node.col_offset}raise ImportError('this export has no {_flat(target)}.py')\n"
                ]
                continue
            imported.append(target)
            lines[first] = re.sub(r"from\s+\.[\w.]*\s+import", f"from .{_flat(target)} import", lines[first], count=1)
        elif _top_level(node) not in _INSTALLED and id(node) not in guarded:
            indent = " " * node.col_offset
            body = ["    " + line for line in lines[first:last]]
            lines[first:last] = [f"{indent}try:\n", *body, f"{indent}except ImportError:\n", f"{indent}    raise\n"]
    return "".join(lines), tuple(imported)


def _imports(tree: ast.Module) -> list[ast.Import | ast.ImportFrom]:
    return [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]


def _top_level(node: ast.Import | ast.ImportFrom) -> str:
    name = node.names[0].name if isinstance(node, ast.Import) else node.module or ""
    return name.partition(".")[0]


def _target(node: ast.ImportFrom, module: str, *, package: bool) -> str:
    """Return the module of a relative import, relative to `models/`. Raises ValueError for `from . import file`."""
    above = module.split(".") if package else module.split(".")[:-1]
    above = above[: len(above) - (node.level - 1)]
    if node.module is None:
        raise ValueError(
            f"{module}: write `from .file import name` instead of `from . import file`, which has no flat form"
        )
    return ".".join([*above, *node.module.split(".")])


def _only_mixers(text: str, mixers: Collection[str]) -> str:
    """Return `mixers/__init__.py` without the imports and the entries of MIXERS that are not used."""
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
