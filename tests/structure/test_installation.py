"""requirements.txt, its lock file, the Dockerfile and the imports of the code agree."""

from __future__ import annotations

import ast
import re
import sys
from importlib.metadata import packages_distributions

from .test_imports import ROOT, modules

# Imported only on a CUDA device; it comes with torch.
WITH_TORCH = {"triton"}


def pins(file: str) -> dict[str, str]:
    """Return package -> version."""
    lines = re.findall(r"^([\w.-]+)(?:\[\w+\])?==([^\s;\\]+)", (ROOT / file).read_text(), re.MULTILINE)
    return {name.lower().replace("_", "-"): version for name, version in lines}


def test_lock_file_holds_every_requirement_with_a_hash_and_no_address():
    text = (ROOT / "requirements.lock").read_text()
    locked = pins("requirements.lock")
    assert pins("requirements.txt").items() <= locked.items(), "run make lock"
    packages = re.split(r"\n(?=\w)", text)
    assert all("--hash=sha256:" in package for package in packages if "==" in package)
    assert "://" not in text
    assert not re.search(r"^--", text, re.MULTILINE)


def test_requirements_hold_every_package_that_is_imported():
    distributions = packages_distributions()
    required = pins("requirements.txt")
    missing = set()
    for name, path in modules().items():
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and not node.level:
                names = [node.module or ""]
            for imported in {name.partition(".")[0] for name in names} - set(sys.stdlib_module_names) - WITH_TORCH:
                if imported not in modules():
                    known = {name.lower().replace("_", "-") for name in distributions.get(imported, [imported])}
                    if not known & required.keys():
                        missing.add(f"{name} imports {imported}")
    assert not missing


def test_image_checks_hashes_and_does_not_run_as_root():
    lines = (ROOT / "Dockerfile").read_text().splitlines()
    assert [line for line in lines if line.startswith("USER ")] == ["USER metalion"]
    assert any("--require-hashes -r requirements.lock" in line for line in lines)
    copied = {path for line in lines if line.startswith("COPY") for path in line.split()[1:-1] if path[0] != "-"}
    assert [path for path in copied if not (ROOT / path).exists()] == []
    assert {"train.py", "eval.py", "configs", "data", "megatron_lite", "models", "tools", "pyproject.toml"} <= copied
