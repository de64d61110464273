"""Paths, links, options and configuration keys of the documentation exist.

tests/tools/test_commands.py compares the options of whole commands with --help.
"""

from __future__ import annotations

import re
import shlex
import textwrap
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from megatron_lite.config.describe import leaves
from megatron_lite.config.schema import Config
from models.config import ModelConfig

from .test_imports import ROOT, modules

# The log and the changelog also name what was removed.
HISTORY = {ROOT / "CHANGELOG.md", ROOT / "docs" / "dev_log.md"}
PAGES = sorted({*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")} - HISTORY)
CONFIGS = sorted((ROOT / "configs").rglob("*.yml"))
TOP = ("configs", "data", "docs", "megatron_lite", "models", "tests", "tools")
EXPERIMENTS = ("mqar", "mad", "lra")
# Files of the reader, and one of GPT-NeoX.
NOT_HERE = {"models/mixers/decayed.py", "configs/NAME.yml", "tools/datasets/preprocess_data.py"}
LAUNCHER_OPTIONS = {
    "--gpus-per-node",
    "--gpus-per-task",
    "--gres",
    "--hostfile",
    "--local-addr",
    "--nnodes",
    "--no-deps",
    "--nodes",
    "--num",
    "--rdzv-backend",
    "--rdzv-conf",
    "--rdzv-endpoint",
    "--rdzv-id",
    "--requeue",
    "--require-hashes",
    "--shutdown-timeout",
    "--signal",
    "--signals-to-handle",
    "--time",
    "--ignore",
    "--tool",
}


def by_page(paths: list[Path]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("page", paths, ids=[str(path.relative_to(ROOT)) for path in paths])


def code(page: Path) -> str:
    """Return the code of a page: blocks, and inline code one piece per line. A configuration's code is its comments."""
    text = page.read_text()
    if page.suffix == ".yml":
        return "\n".join(line.removeprefix("#").strip() for line in text.splitlines() if line.startswith("#   "))
    lines, fenced = [], False
    for line in text.splitlines():
        if line.startswith("```"):
            fenced = not fenced
        elif fenced or line.startswith("    "):
            lines.append(line.strip())
        else:
            lines += re.findall(r"`([^`]+)`", line)
    return "\n".join(lines)


def commands(page: Path) -> Iterator[list[str]]:
    """Yield the words of every command of this project in a page, from the program on."""
    text = re.sub(r"\\\n\s*", "", code(page))
    for line in text.splitlines():
        line = re.split(r"\s#\s|\s\|\s", re.sub(r"^\$ |^[A-Z]\d? {1,2}(?=python)", "", line))[0]
        match = re.search(r"(?:^|\s)(?:python -m (tools\.\S+|tests\.\S+)|(?:\S*/)?((?:train|eval)\.py))(?=\s|$)", line)
        if match:
            try:
                rest = shlex.split(line[match.end() :])
            except ValueError:  # prose between quotes of a shell
                continue
            yield [match[1] or match[2], *rest]


@cache
def config_keys() -> frozenset[str]:
    """Return every key and section of the configuration, as "batch.ramp"."""
    paths = [path for path, _ in leaves(Config[ModelConfig])]
    return frozenset(".".join(path[:end]) for path in paths for end in range(1, len(path) + 1))


SECTIONS = frozenset(key for key in config_keys() if "." not in key)


def is_key(name: str) -> bool:
    return name in config_keys() or name.startswith("model.mixer_options")


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub forms them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@by_page(sorted({*PAGES, *HISTORY}))
def test_links_lead_to_files_and_headings(page: Path) -> None:
    wrong = []
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if target.startswith(("http", "mailto")):
            continue
        file, _, anchor = target.partition("#")
        path = (page.parent / file).resolve() if file else page
        if not path.exists() or (anchor and anchor not in anchors(path)):
            wrong.append(target)
    assert not wrong


@by_page([*PAGES, *CONFIGS])
def test_named_paths_exist(page: Path) -> None:
    names = re.findall(rf"(?:^|[\s`'=\[(])((?:{'|'.join(TOP)})/[\w./*-]+)", code(page), re.MULTILINE)
    bases = (ROOT, ROOT / "configs")
    wrong = [
        name for name in names if not any(list(base.glob(name.rstrip("/."))) for base in bases) and name not in NOT_HERE
    ]
    assert not wrong


@cache
def all_options() -> set[str]:
    files = [*modules().values(), *(ROOT / "tests").rglob("*.py")]
    return {option for path in files for option in re.findall(r"--[a-z][a-z-]+", path.read_text())} | LAUNCHER_OPTIONS


@by_page(PAGES)
def test_options_outside_commands_exist(page: Path) -> None:
    assert set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", code(page))) - all_options() == set()


@cache
def loaded(config: str) -> dict[str, Any]:
    return yaml.safe_load((ROOT / "configs" / config).read_text())


@by_page([*PAGES, *CONFIGS])
def test_values_of_commands_are_keys(page: Path) -> None:
    wrong = []
    for program, *words in commands(page):
        suite = words[words.index("--suite") + 1] if "--suite" in words[:-1] else ""
        for word in words:
            key, equals, _ = word.partition("=")
            if not equals or key.startswith("-") or not re.fullmatch(r"[a-z0-9_.]+", key):
                continue
            if suite in EXPERIMENTS:
                known = key.partition(".")[0] in loaded(f"experiments/{suite}.yml")
            elif program == "tools.finetune_glue":
                value = loaded("finetune/glue.yml")
                for part in key.split("."):
                    value = (value or {}).get(part)
                known = value is not None
            else:
                known = is_key(key)
            if not known:
                wrong.append(f"{program} {word}")
    assert not wrong


@by_page(PAGES)
def test_named_keys_exist(page: Path) -> None:
    names = re.findall(rf"`((?:{'|'.join(SECTIONS)})\.[a-z_.]+)(?=[`:=])", page.read_text())
    assert not [name for name in names if not is_key(name) and not name.endswith((".yml", ".safetensors"))]


@by_page(PAGES)
def test_keys_of_yaml_blocks_exist(page: Path) -> None:
    blocks = re.findall(
        rf"(?:^(?: {{4}})?(?:(?:{'|'.join(SECTIONS)}|include):.*| {{2,}}.*)\n)+", page.read_text(), re.MULTILINE
    )
    wrong = []
    for block in blocks:
        try:
            tree = yaml.safe_load(textwrap.dedent(block))
        except yaml.YAMLError:
            continue
        for section, keys in (tree if isinstance(tree, dict) else {}).items():
            if section in SECTIONS and isinstance(keys, dict):
                wrong += [f"{section}.{key}" for key in keys if not is_key(f"{section}.{key}")]
    assert not wrong


@by_page(PAGES)
def test_make_targets_exist(page: Path) -> None:
    targets = re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert set(re.findall(r"(?:^|&& )make ([a-z0-9-]+)", code(page), re.MULTILINE)) <= set(targets)


def test_readme_lists_every_run_with_its_parameters() -> None:
    rows = re.findall(
        r"^\| (`\w[\w.]*\.yml`.*?) \| .* \| ([\d.]+ M.*?) \|.*\|$", (ROOT / "README.md").read_text(), re.MULTILINE
    )
    listed: dict[str, str] = {}
    for files, sizes in rows:
        names = re.findall(r"`(.*?)`", files)
        listed |= zip(names, sizes.split(", ") * len(names), strict=False)
    assert set(listed) == {path.name for path in (ROOT / "configs").glob("*.yml")}
    for file, size in listed.items():
        model = ROOT / "configs" / "model" / file
        if model.exists():
            assert f"{size} parameters" in model.read_text().splitlines()[0], file
