"""Read YAML files with the tools' schemas like a run's configuration: with overrides, and with errors that name the key."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar, get_args

from pydantic import BaseModel, ValidationError

from megatron_lite.config.describe import Key, keys_of
from megatron_lite.config.files import ConfigError, Sources, read_sources
from megatron_lite.config.other_program import other_program
from models.options import nearest_names

Schema = TypeVar("Schema", bound=BaseModel)


def read_as(schema: type[Schema], path: Path, overrides: Sequence[str] = (), **defaults: Any) -> Schema:
    """Read a file with `key.sub=value` overrides; `defaults` apply to missing keys.

    Raises ConfigError listing all errors: key, value, what is allowed, and file and line.
    """
    sources = read_sources([path.resolve()], overrides)
    problems = list(sources.problems)
    if not problems:
        try:
            return schema.model_validate({**defaults, **sources.tree})
        except ValidationError as error:
            problems = [_problem(detail, schema, sources, path) for detail in error.errors(include_url=False)]
    raise ConfigError(other_program(sources, schema.model_fields) or dict.fromkeys(problems))


def _problem(detail: Any, schema: type[BaseModel], sources: Sources, file: Path) -> str:
    """Return the message for one of pydantic's errors. The path ends at list indices and members of unions."""
    path: tuple[str, ...] = ()
    section: type | None = schema
    entry: Key | None = None
    allowed = ""
    for name in map(str, detail["loc"]):
        known = keys_of(section) if section is not None else {}
        if section is not None and name not in known:
            return _located((*path, name), f"is an unknown key; {nearest_names(name, known)}", sources)
        key = known.get(name, entry)
        if key is None:
            break
        path, section, entry, allowed = (*path, name), _section(key), key.entry, key.allowed
    if detail["type"] == "missing":
        return f"{'.'.join(path)} is missing in {file}: {allowed} is allowed"
    if detail["type"] == "value_error" and section is not None:
        # A check of a whole section names its keys itself.
        origin = sources.origin(path)
        return str(detail["ctx"]["error"]) + (f" ({origin})" if origin else "")
    value = json.dumps(sources.get(path), ensure_ascii=False, default=str)
    reason = str(detail["ctx"]["error"]) if detail["type"] == "value_error" else f"{allowed} is allowed"
    return _located(path, f"= {value}: {reason}", sources)


def _section(key: Key) -> type | None:
    """Return the type of the section under a key, also if the section may be null; None if the key is not a section."""
    sections = [kind for kind in get_args(key.annotation) if isinstance(kind, type) and issubclass(kind, BaseModel)]
    return key.section or (sections[0] if len(sections) == 1 and key.entry is None else None)


def _located(path: tuple[str, ...], words: str, sources: Sources) -> str:
    origin = sources.origin(path)
    return f"{'.'.join(path)} {words}" + (f" ({origin})" if origin else "")
