"""Load, check, dump and explain the configuration of a run.

    config = load_config(["configs/default.yml"], ["optimizer.lr=3e-4"], model_type=ModelConfig)

The result is one frozen, typed `Config`. If the configuration cannot run, `ConfigError` lists every problem with its key,
value, allowed values, file and line.
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

from .checks import Problem, problems_of
from .derived_values import DERIVED_KEYS, derived_values
from .describe import Key, keys_of, leaves
from .files import ConfigError, KeyPath, Sources, read_sources
from .neox_hints import neox_answer, neox_has_keys_below
from .other_program import other_program
from .schema import Config, ModelT

# Keys of earlier versions without a successor, and the message if one is set.
REMOVED_KEYS: dict[KeyPath, str] = {
    ("parallel", "cublaslt"): "was removed, because cuBLAS chooses the algorithm of every matmul; delete this section",
}

__all__ = ["Config", "ConfigError", "dump_config", "explain_config", "load_config"]


def load_config(
    files: Sequence[str | Path],
    overrides: Sequence[str] = (),
    *,
    model_type: type[ModelT],
    world_size: int | None = None,
) -> Config[ModelT]:
    """Return the checked configuration of a run.

    files: YAML files. Each overrides the files before it and its own `include:` list (relative to the file or to `configs/`).
    overrides: `key.sub=value`, applied after the files. null restores the default of a key.
    model_type: dataclass of the section `model`; its ValueErrors are reported as problems.
    world_size: number of processes, for the batch sizes; None reads the environment variable WORLD_SIZE.

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
    """Return the resolved configuration as YAML, with the origin of each value as a comment.

    Arguments and errors as in `load_config`.
    """
    sources = read_sources(files, overrides)
    config = _load(sources, model_type, world_size)
    return _dump(config, sources)


def dump_config(config: Config[Any]) -> str:
    """Return the resolved configuration as YAML, which loads to an equal configuration on the same number of processes.

    Derived values are comments, so that the file also loads with another number of processes or another `run.name`.
    """
    return _dump(config, None)


def _load(sources: Sources, model_type: type[ModelT], world_size: int | None) -> Config[ModelT]:
    schema = cast("type[Config[ModelT]]", Config.__class_getitem__(model_type))
    problems = list(sources.problems)

    def report(problem: Problem) -> None:
        origin = sources.origin(problem.path)
        given = sources.get(problem.path)
        reset_to_null = isinstance(given, dict) and not any(given.values())
        if sources.problems and (not origin or reset_to_null):
            return  # the missing value may be in a file that cannot be read
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
    raise ConfigError(other_program(sources, keys_of(schema)) or dict.fromkeys(problems))


def _world_size(problems: list[str]) -> int:
    text = os.environ.get("WORLD_SIZE", "1")
    if text.isdecimal() and int(text) > 0:
        return int(text)
    problems.append(f"the environment variable WORLD_SIZE is {text!r}: a whole number >= 1 is expected")
    return 1


def _known(tree: Mapping[str, Any], schema: type, report: Callable[[Problem], None]) -> dict[str, dict[str, Any]]:
    """Return the part of `tree` that the schema defines, with every section present; report the rest."""

    def walk(tree: Mapping[str, Any], section: type, above: KeyPath) -> dict[str, Any]:
        keys = keys_of(section)
        known: dict[str, Any] = {}
        for name, value in tree.items():
            path = (*above, name)
            if name not in keys:
                if path in REMOVED_KEYS and _is_empty(value):
                    continue  # as in a complete configuration written by an earlier version
                for problem in _unknown(path, value, schema):
                    report(problem)
                continue
            below = keys[name].section
            if below is None:
                # null restores the default unless null is an allowed value; in a mapping it removes the entry.
                entry = keys[name].entry
                if isinstance(value, dict) and entry is not None and not entry.nullable:
                    value = {inner: item for inner, item in value.items() if item is not None}
                if value is not None or keys[name].nullable:
                    known[name] = value
            elif isinstance(value, dict) or value is None:
                known[name] = walk(value or {}, below, path)
            else:
                example = f"{'.'.join(path)}.{next(iter(keys_of(below)))}"
                section_text = f"= {_shown(value)}: this key is a section; set the keys below it, such as {example}"
                report(Problem(path, neox_answer(path) or section_text))
        return known

    known = walk(tree, schema, ())
    return {name: known.get(name, {}) for name in keys_of(schema)}


def _is_empty(value: Any) -> bool:
    """Return whether a value, or every value of a section, is null or empty."""
    return all(map(_is_empty, value.values())) if isinstance(value, dict) else value is None


def _unknown(path: KeyPath, value: Any, schema: type) -> Iterator[Problem]:
    if isinstance(value, dict) and value and neox_has_keys_below(path):
        for name, inner in value.items():
            yield from _unknown((*path, name), inner, schema)
        return
    answer = REMOVED_KEYS.get(path) or neox_answer(path)
    yield Problem(path, answer or f"is an unknown key; {nearest_keys(path, schema)}")


def nearest_keys(path: KeyPath, schema: type) -> str:
    """Return "nearest: ..." with up to three keys that resemble an unknown one, else the keys of the section that exists."""
    above: KeyPath = ()
    section, name = schema, path[-1]
    for part in path[:-1]:
        if part not in keys_of(section) or (below := keys_of(section)[part].section) is None:
            break
        above, section = (*above, part), below
    siblings = list(keys_of(section))
    everywhere = [leaf for leaf, _ in leaves(schema)]
    close_names = difflib.get_close_matches(name, [leaf[-1] for leaf in everywhere], n=3, cutoff=0.75)
    candidates = [leaf for leaf in everywhere if leaf[-1] == name]
    candidates += [(*above, close) for close in difflib.get_close_matches(name, siblings, n=3)]
    candidates += [leaf for close in close_names for leaf in everywhere if leaf[-1] == close]
    if candidates:
        return "nearest: " + ", ".join(dict.fromkeys(".".join(leaf) for leaf in candidates[:3]))
    return f"allowed {'in ' + '.'.join(above) if above else 'here'} are {', '.join(siblings)}"


def _invalid(error: ValidationError, schema: type, tree: Mapping[str, Any]) -> Iterator[Problem]:
    for detail in error.errors(include_url=False):
        path, key = _key_at(detail["loc"], schema)
        if detail["type"] == "value_error":
            # A check of the model dataclass: its message begins with the key.
            message = str(detail["ctx"]["error"])
            name = re.match(r"[\w.]*\w", message)
            named = name is not None and name[0].split(".")[0] == path[0]
            if name is not None and named:
                yield Problem(tuple(name[0].split(".")), message[name.end() :].lstrip())
            else:
                yield Problem(path, f"cannot be built: {message}")
        elif detail["type"] == "missing" and len(path) == len(detail["loc"]):
            # `derived_values` reports the reason for a missing derived key.
            if path not in DERIVED_KEYS:
                yield Problem(path, f"is missing: {key.allowed}. {key.doc}")
        else:
            value = _value_at(tree, path)
            yield Problem(path, f"= {_shown(value)}: {key.allowed} is allowed{_quotes_hint(value, key)}")


def _key_at(location: tuple[int | str, ...], schema: type) -> tuple[KeyPath, Key]:
    """Return the key of a pydantic error location, without list indices and union members."""
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
    if isinstance(value, int | float) and key.allowed.startswith("text"):
        return f"; in quotes it is text: '{_shown(value)}'"
    if isinstance(value, str) and "number" in key.allowed and re.fullmatch(r"[-+.\deE]+", value):
        return "; without quotes it is a number"
    if isinstance(value, str) and key.allowed == "list of: text":
        return f"; in brackets it is a list: [{value}]"
    return ""


def _shown(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 120 else text[:117] + "..."


def _dump(config: Config[Any], sources: Sources | None) -> str:
    tree = config.model_dump(mode="json", serialize_as_any=True)
    # Derived values become comments, unless the configuration sets another value.
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
    """Return a value on one line. Text is quoted unless every YAML reader takes it for text."""
    plain = not isinstance(value, str) or re.fullmatch(r"[A-Za-z_/][\w./+-]*", value)
    style = None if plain else '"'
    text = yaml.safe_dump(value, default_style=style, width=2**31, allow_unicode=True)
    return text.removesuffix("...\n").strip()
