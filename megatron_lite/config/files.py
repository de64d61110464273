"""Merge YAML files, their includes and `key.sub=value` overrides into one tree.

The origin of every value (`configs/default.yml:12`) is kept for error messages and `--print-config`.

YAML is read by the core schema of YAML 1.2: `3e-4` is a number, `100_000` too, and only `true` and `false` are
booleans (`no` and `off` are text).
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Iterable, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import yaml

from megatron_lite.config.bounded_yaml import BoundedLoader

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
KeyPath = tuple[str, ...]


class ConfigError(ValueError):
    """Report a configuration that cannot run. `problems` holds one line per problem; the message lists them all."""

    def __init__(self, problems: Iterable[str]) -> None:
        self.problems = tuple(problems)
        count = "a problem" if len(self.problems) == 1 else f"{len(self.problems)} problems"
        super().__init__(f"The configuration has {count}:\n" + "\n".join(f"  - {line}" for line in self.problems))


@dataclass
class Sources:
    """Hold the merged tree, the origin of each key, and one line per problem."""

    tree: dict[str, Any] = field(default_factory=dict)
    origins: dict[KeyPath, str] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    def origin(self, path: KeyPath) -> str | None:
        """Return the origin of a key, or else of the first key below it, or else of the nearest section above it."""
        if path in self.origins:
            return self.origins[path]
        below = (origin for known, origin in self.origins.items() if known[: len(path)] == path)
        above = (self.origins[path[:end]] for end in range(len(path) - 1, 0, -1) if path[:end] in self.origins)
        return next(below, None) or next(above, None)

    def get(self, path: KeyPath) -> Any:
        """Return the value of a key; None if it is not set."""
        node: Any = self.tree
        for name in path:
            node = node.get(name) if isinstance(node, dict) else None
        return node

    def set(self, path: KeyPath, value: Any, origin: str) -> None:
        """Set a value. A mapping is merged into an existing mapping; any other value replaces the existing one."""
        above = self.tree
        for depth, name in enumerate(path[:-1], start=1):
            if not isinstance(above.get(name), dict):
                self.origins.pop(path[:depth], None)
                above[name] = {}
            above = above[name]
        if not isinstance(value, dict):
            if isinstance(above.get(path[-1]), dict):
                self._remove_origins(path)
            self.origins[path] = origin
            above[path[-1]] = value
            return
        self.origins[path] = origin
        if not isinstance(above.get(path[-1]), dict):
            above[path[-1]] = {}
        for name, inner in value.items():
            self.set((*path, name), inner, origin)

    def merge(self, other: Sources) -> None:
        """Merge another tree into this one; its values override these."""
        self.problems.extend(other.problems)

        def override(path: KeyPath, value: Any) -> None:
            origin = other.origin(path) or ""
            if not isinstance(value, dict):
                self.set(path, value, origin)
                return
            self.set(path, {}, origin)
            for name, inner in value.items():
                override((*path, name), inner)

        for name, value in other.tree.items():
            override((name,), value)

    def _remove_origins(self, path: KeyPath) -> None:
        for known in [known for known in self.origins if known[: len(path)] == path]:
            del self.origins[known]


def read_sources(files: Sequence[str | Path], overrides: Sequence[str] = ()) -> Sources:
    """Return the merge of `files` from left to right, each over its own includes, and then of the overrides.

    Raises nothing: missing files and bad values become lines of `problems`.
    """
    sources = Sources()
    for file in files:
        sources.merge(_read_file(_find(Path(file), Path()), f"{file}", ()))
    for override in overrides:
        _apply_override(sources, override)
    return sources


def _find(path: Path, folder: Path) -> Path | None:
    """Return the first existing path of `folder`/`path` and `configs/`/`path`, or None."""
    for candidate in (folder / path, CONFIGS / path):
        if candidate.exists():
            return candidate
    return None


def _read_file(path: Path | None, name: str, including: tuple[Path, ...]) -> Sources:
    sources = Sources()
    where = f" (included from {_shown(including[-1])})" if including else ""
    if path is None:
        problem = f"no such file{where}{_nearest_files(name)}"
        if re.fullmatch(r"[a-z]\w*(\.\w+)+", name) and not name.endswith((".yml", ".yaml")):
            problem = f"has no value: write {name}=VALUE, without spaces"
        sources.problems.append(f"{name}: {problem}")
        return sources
    if path.is_dir():
        inside = ", ".join(_shown(file) for file in sorted(path.glob("*.y*ml"))[:3])
        sources.problems.append(f"{_shown(path)}: is a folder{where}; name a file{inside and f', such as {inside}'}")
        return sources
    resolved = path.resolve()
    if resolved in including:
        circle = " -> ".join(_shown(file) for file in (*including[including.index(resolved) :], resolved))
        sources.problems.append(f"{_shown(path)}: includes itself: {circle}")
        return sources
    try:
        document = parse_yaml(path.read_text(encoding="utf-8"), _shown(path))
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not UTF-8 text"
        sources.problems.append(f"{_shown(path)}: cannot be read{where}: {reason}")
        return sources
    includes = document.tree.pop("include", None) or []
    origin = document.origins.pop(("include",), "")
    if isinstance(includes, str):
        includes = [includes]
    if not isinstance(includes, list) or not all(isinstance(include, str) for include in includes):
        sources.problems.append(f"include: a file name or a list of them is allowed ({origin})")
        includes = []
    for include in includes:
        sources.merge(_read_file(_find(Path(include), path.parent), include, (*including, resolved)))
    sources.merge(document)
    return sources


def parse_yaml(text: str, name: str) -> Sources:
    """Return one YAML document of nested mappings with its origins. name: of the file, for origins and problems."""
    parsed = _parse_yaml(text, name)
    return Sources(deepcopy(parsed.tree), dict(parsed.origins), list(parsed.problems))


@lru_cache(maxsize=64)  # the planner reads the same files once per layout
def _parse_yaml(text: str, name: str) -> Sources:
    sources = Sources()
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        if node is None:
            return sources
        if not isinstance(node, yaml.MappingNode):
            sources.problems.append(f"{name}:1: sections (`batch:`) and keys (`micro_batch_size: 8`) are expected")
            return sources
        sources.tree = _build(loader, node, (), name, sources)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = mark.line + 1 if mark else 1
        sources.problems.append(f"{name}:{line}: YAML syntax: {error.problem or error.context}")
        sources.tree = {}
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        sources.problems.append(f"{name}:{line}: YAML syntax: {error.reason}")
    return sources


def _build(loader: _Loader, node: yaml.Node, path: KeyPath, name: str, sources: Sources) -> Any:
    """Return the Python value of a YAML node, and record the line of each key in `sources.origins`."""
    if isinstance(node, yaml.SequenceNode):
        return [_build(loader, item, (*path, "[]"), name, sources) for item in node.value]
    if not isinstance(node, yaml.MappingNode):
        value = loader.construct_object(node)
        if value is None or isinstance(value, str | int | float):
            return value
        raise yaml.constructor.ConstructorError(None, None, f"the tag {node.tag} is not allowed", node.start_mark)
    written: dict[str, int] = {}
    for key, _ in node.value:
        line = key.start_mark.line + 1
        if not isinstance(key, yaml.ScalarNode):
            raise yaml.constructor.ConstructorError(None, None, "a key must be a name", key.start_mark)
        if key.value in written:
            lines = f"{name}:{written[key.value]} and {name}:{line}"
            sources.problems.append(f"{'.'.join((*path, key.value))}: written twice ({lines})")
        written[key.value] = line
    loader.flatten_mapping(node)
    tree: dict[str, Any] = {}
    for key, value in node.value:
        inner = (*path, key.value)
        sources.origins[inner] = f"{name}:{key.start_mark.line + 1}"
        tree[key.value] = _build(loader, value, inner, name, sources)
    return tree


def _apply_override(sources: Sources, override: str) -> None:
    key, equals, raw = override.partition("=")
    path = tuple(key.strip().split("."))
    if not equals or not all(path):
        sources.problems.append(f"override {override!r}: write key.sub=value, for example optimizer.lr=3e-4")
        return
    origin = f"override {' '.join(override.splitlines())}"
    if raw[:1] in ("[", "{", '"', "'"):
        parsed = parse_yaml(f"value: {raw}", origin)
        if parsed.problems:
            reason = parsed.problems[0].partition("YAML syntax: ")[2] or "one value is expected"
            sources.problems.append(f"{origin}: not a YAML value: {reason}")
            return
        value = parsed.tree["value"]
    else:
        # A plain scalar is not parsed as YAML: a prompt may end in a space or hold ": " and "#".
        loader = _Loader("")
        tag = loader.resolve(yaml.ScalarNode, raw.strip(), (True, False))
        value = loader.construct_object(yaml.ScalarNode(tag, raw.strip()))
        if isinstance(value, str):
            value = raw
    sources.set(path, value, origin)


def _shown(path: Path) -> str:
    """Return the path relative to the working folder if it is inside, else unchanged."""
    relative = os.path.relpath(path)
    return str(path) if relative.startswith("..") else relative


def _nearest_files(name: str) -> str:
    folder = Path(name).parent
    nearby = list(folder.glob("*.y*ml")) if folder.is_dir() else []
    names = {_shown(path) for path in [*nearby, *CONFIGS.rglob("*.yml")]}
    stems = {file: Path(file).stem for file in names}
    close = difflib.get_close_matches(Path(name).stem, sorted(set(stems.values())), n=3, cutoff=0.6)
    matches = [file for stem in close for file in sorted(names) if stems[file] == stem][:3]
    return f"; nearest: {', '.join(matches)}" if matches else "; configs/README.md lists the files of this project"


class _Loader(BoundedLoader):
    """Load YAML by the core schema of YAML 1.2, with underscores allowed in integers."""

    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012 (the parent's own table)


def _construct_int(loader: _Loader, node: yaml.ScalarNode) -> int:
    return int(node.value.replace("_", ""))


def _construct_float(loader: _Loader, node: yaml.ScalarNode) -> float | int:
    text = node.value.lower()
    value = float(text.replace(".inf", "inf").replace(".nan", "nan"))
    # 1e5 steps are a whole number.
    whole = "e" in text and "." not in text and abs(value) < 2**53 and value == int(value)
    return int(value) if whole else value


for _tag, _pattern, _first in (
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    ("int", r"[-+]?[0-9][0-9_]*", list("-+0123456789")),
    ("float", r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
     list("-+0123456789.")),
    ("merge", r"<<", ["<"]),
):  # fmt: skip
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(f"^(?:{_pattern})$"), _first)
_Loader.add_constructor("tag:yaml.org,2002:int", _construct_int)
_Loader.add_constructor("tag:yaml.org,2002:float", _construct_float)
