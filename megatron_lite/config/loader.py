"""The configuration of a run: load, include, merge, override, check, dump and explain.

    config = load_config(["configs/default.yml"], ["optimizer.lr=3e-4"], model_type=ModelConfig)

The result is one frozen, typed `Config` that everybody reads. A configuration that cannot run is a `ConfigError` that
lists every problem at once, each with its key, value, what is allowed, and the file and line that it comes from.
"""

from __future__ import annotations

import difflib
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import yaml
from pydantic import ValidationError

from .checks import DERIVED_KEYS, Problem, derived_values, problems_of
from .describe import Key, keys_of, leaves
from .files import ConfigError, KeyPath, Sources, read_sources
from .neox_hints import neox_answer, neox_has_keys_below
from .schema import Config, ModelT

# Keys of earlier versions that have no successor, and the answer to one that is set.
REMOVED_KEYS: dict[KeyPath, str] = {
    ("parallel", "cublaslt"): "was removed: cuBLAS chooses the algorithm of every matmul. Delete this section",
}

__all__ = ["Config", "ConfigError", "dump_config", "explain_config", "load_config"]


def load_config(
    files: Sequence[str | Path],
    overrides: Sequence[str] = (),
    *,
    model_type: type[ModelT],
    world_size: int | None = None,
) -> Config[ModelT]:
    """Read and check a configuration.

    files: YAML files, each laid over the ones before it and over its own `include:` list (names relative to the file,
        or to `configs/`). overrides: `key.sub=value`, laid over the files. A null gives a key its default back.
    model_type: the dataclass of the section `model`; its own ValueErrors are reported like the others.
    world_size: number of processes, for the batch sizes; from the environment variable WORLD_SIZE where it is None.

    Raises ConfigError with all problems.
    """
    return _load(read_sources(files, overrides), model_type, world_size)


def explain_config(
    files: Sequence[str | Path],
    overrides: Sequence[str] = (),
    *,
    model_type: type[ModelT],
    world_size: int | None = None,
) -> str:
    """The resolved configuration as YAML; a comment on each line tells where the value comes from."""
    sources = read_sources(files, overrides)
    config = _load(sources, model_type, world_size)
    return _dump(config, sources)


def dump_config(config: Config[Any]) -> str:
    """The resolved configuration as YAML.

    It loads back to an equal configuration on the same number of processes. Values that follow from others stand in
    comments, so that the file also loads on another number of processes, or under another `run.name`.
    """
    return _dump(config, None)


def _load(sources: Sources, model_type: type[ModelT], world_size: int | None) -> Config[ModelT]:
    schema = cast("type[Config[ModelT]]", Config.__class_getitem__(model_type))
    problems = list(sources.problems)

    def report(problem: Problem) -> None:
        origin = sources.origin(problem.path)
        given = sources.get(problem.path)
        taken_back = isinstance(given, dict) and not any(given.values())
        if sources.problems and (not origin or taken_back):
            return  # a file that cannot be read may have given what is missing
        space = "" if problem.text.startswith((":", ".")) else " "
        problems.append(f"{'.'.join(problem.path)}{space}{problem.text}" + (f" ({origin})" if origin else ""))

    if world_size is None:
        world_size = _world_size(problems)
    tree = _known(sources.tree, schema, report)
    derived, unsolved = derived_values(tree, world_size)
    for problem in unsolved:
        report(problem)
    for (section, key), value in derived.items():
        tree[section][key] = value.value
    try:
        config = schema.model_validate_json(json.dumps(tree))
    except ValidationError as error:
        for problem in _invalid(error, schema, tree):
            report(problem)
    else:
        for problem in problems_of(config):
            report(problem)
        if not problems:
            return config
    raise ConfigError(dict.fromkeys(problems))


def _world_size(problems: list[str]) -> int:
    text = os.environ.get("WORLD_SIZE", "1")
    if text.isdecimal() and int(text) > 0:
        return int(text)
    problems.append(f"the environment variable WORLD_SIZE is {text!r}: a whole number >= 1 is expected")
    return 1


def _known(tree: Mapping[str, Any], schema: type, report: Callable[[Problem], None]) -> dict[str, dict[str, Any]]:
    """The part of `tree` that the schema knows, with every section present; the rest is reported."""

    def walk(tree: Mapping[str, Any], section: type, above: KeyPath) -> dict[str, Any]:
        keys = keys_of(section)
        known: dict[str, Any] = {}
        for name, value in tree.items():
            path = (*above, name)
            if name not in keys:
                if path in REMOVED_KEYS and _says_nothing(value):
                    continue  # a configuration that an earlier version wrote in full
                for problem in _unknown(path, value, section, schema):
                    report(problem)
                continue
            below = keys[name].section
            if below is None:
                # A null where null means nothing gives the default back; in a mapping it takes the entry back.
                entry = keys[name].entry
                if isinstance(value, dict) and entry is not None and not entry.nullable:
                    value = {inner: kept for inner, kept in value.items() if kept is not None}
                if value is not None or keys[name].nullable:
                    known[name] = value
            elif isinstance(value, dict) or value is None:
                known[name] = walk(value or {}, below, path)
            else:
                example = f"{'.'.join(path)}.{next(iter(keys_of(below)))}"
                section_text = f"= {_shown(value)}: it is a section, write its keys below it, such as {example}"
                report(Problem(path, neox_answer(path) or section_text))
        return known

    known = walk(tree, schema, ())
    return {name: known.get(name, {}) for name in keys_of(schema)}


def _says_nothing(value: Any) -> bool:
    """Return whether a value, or every value of a section, is null or empty."""
    return all(map(_says_nothing, value.values())) if isinstance(value, dict) else value is None


def _unknown(path: KeyPath, value: Any, section: type, schema: type) -> Iterator[Problem]:
    if isinstance(value, dict) and value and neox_has_keys_below(path):
        for name, inner in value.items():
            yield from _unknown((*path, name), inner, section, schema)
        return
    answer = REMOVED_KEYS.get(path) or neox_answer(path)
    yield Problem(path, answer or f"is an unknown key; {_nearest(path, section, schema)}")


def _nearest(path: KeyPath, section: type, schema: type) -> str:
    above, name = path[:-1], path[-1]
    siblings = list(keys_of(section))
    everywhere = [leaf for leaf, _ in leaves(schema)]
    close_names = difflib.get_close_matches(name, [leaf[-1] for leaf in everywhere], n=3, cutoff=0.75)
    found = [leaf for leaf in everywhere if leaf[-1] == name]
    found += [(*above, close) for close in difflib.get_close_matches(name, siblings, n=3)]
    found += [leaf for close in close_names for leaf in everywhere if leaf[-1] == close]
    if found:
        return "nearest: " + ", ".join(dict.fromkeys(".".join(leaf) for leaf in found[:3]))
    return f"allowed {'in ' + '.'.join(above) if above else 'here'} are {', '.join(siblings)}"


def _invalid(error: ValidationError, schema: type, tree: Mapping[str, Any]) -> Iterator[Problem]:
    for detail in error.errors(include_url=False):
        path, key = _key_at(detail["loc"], schema)
        if detail["type"] == "value_error":
            # The model's own check: its message begins with the key.
            message = str(detail["ctx"]["error"])
            name = re.match(r"[\w.]*\w", message)
            named = name is not None and name[0].split(".")[0] == path[0]
            if name is not None and named:
                yield Problem(tuple(name[0].split(".")), message[name.end() :].lstrip())
            else:
                yield Problem(path, f"cannot be built: {message}")
        elif detail["type"] == "missing" and len(path) == len(detail["loc"]):
            # Where a key that follows from others is missing, the reason is reported there.
            if path not in DERIVED_KEYS:
                yield Problem(path, f"is missing: {key.allowed}. {key.doc}")
        else:
            value = _value_at(tree, path)
            yield Problem(path, f"= {_shown(value)}: {key.allowed} is allowed{_quotes_hint(value, key)}")


def _key_at(location: tuple[int | str, ...], schema: type) -> tuple[KeyPath, Key]:
    """The key that a pydantic location lies in: list indices and union members are left off."""
    path: KeyPath = ()
    section: type | None = schema
    for name in map(str, location):
        if section is not None:
            key = keys_of(section)[name]
        elif key.entry is not None:
            key = key.entry
        else:
            break
        path, section = (*path, name), key.section
    return path, key


def _value_at(tree: Any, path: KeyPath) -> Any:
    for name in path:
        tree = tree.get(name) if isinstance(tree, dict) else None
    return tree


def _quotes_hint(value: Any, key: Key) -> str:
    if isinstance(value, int | float) and "text" in key.allowed:
        return f"; in quotes it is text: '{_shown(value)}'"
    if isinstance(value, str) and "number" in key.allowed and re.fullmatch(r"[-+.\deE]+", value):
        return "; without quotes it is a number"
    return ""


def _shown(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 120 else text[:117] + "..."


def _dump(config: Config[Any], sources: Sources | None) -> str:
    tree = config.model_dump(mode="json", serialize_as_any=True)
    # What follows from the other values is a comment, unless it was given and says something else.
    open_tree = {section: dict(keys) for section, keys in tree.items()}
    reasons: dict[KeyPath, str] = {}
    for section, key in DERIVED_KEYS:
        shorter = {**open_tree, section: {k: v for k, v in open_tree[section].items() if k != key}}
        derived, _ = derived_values(shorter, config.batch.data_ranks * config.parallel.model_ranks)
        if (section, key) in derived and derived[section, key].value == tree[section][key]:
            open_tree = shorter
            reasons[section, key] = derived[section, key].reason
    lines: list[str] = []
    _write(tree, (), reasons, sources, lines)
    return "\n".join(lines) + "\n"


def _write(
    tree: Mapping[str, Any], above: KeyPath, reasons: Mapping[KeyPath, str], sources: Sources | None, lines: list[str]
) -> None:
    indent = "  " * len(above)
    for name, value in tree.items():
        path = (*above, name)
        if isinstance(value, dict) and value:
            lines.append(f"{indent}{_scalar(name)}:")
            _write(value, path, reasons, sources, lines)
            continue
        origin = ""
        if path in reasons:
            origin = f"  # follows from {reasons[path]}"
        elif sources is not None:
            given = sources.get(path) is not None or value is None
            origin = f"  # {(given and sources.origins.get(path)) or 'default'}"
        lines.append(f"{indent}{'# ' if path in reasons else ''}{_scalar(name)}: {_inline(value)}{origin}")


def _inline(value: Any) -> str:
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_inline, value)) + "]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_scalar(key)}: {_inline(inner)}" for key, inner in value.items()) + "}"
    return _scalar(value)


def _scalar(value: Any) -> str:
    """One value on one line. Text is quoted unless any reader of YAML takes it for text."""
    plain = not isinstance(value, str) or re.fullmatch(r"[A-Za-z_/][\w./+-]*", value)
    style = None if plain else '"'
    text = yaml.safe_dump(value, default_style=style, width=2**31, allow_unicode=True)
    return text.removesuffix("...\n").strip()
