"""Describe the keys of a configuration section in words: type, default, allowed values, meaning.

A section is a pydantic model or a standard dataclass (the section `model`). Error messages and the generated reference
both use this module, so they agree.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Annotated, Any, Literal, Union, cast, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

REQUIRED = object()
_BOUNDS = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}
_WORDS = {
    int: "whole number",
    float: "number",
    bool: "true or false",
    str: "text",
    type(None): "null",
    Any: "any value",
}


@dataclasses.dataclass(frozen=True)
class Key:
    """One key of a section: its type, default (`REQUIRED` if there is none), allowed values and description."""

    annotation: Any
    default: Any
    allowed: str
    doc: str

    @property
    def section(self) -> type | None:
        """Return the type of the section that this key holds; None if it holds a value."""
        kind = self.annotation
        return (
            kind if isinstance(kind, type) and (issubclass(kind, BaseModel) or dataclasses.is_dataclass(kind)) else None
        )

    @property
    def entry(self) -> Key | None:
        """Return the key that describes each value of a mapping with free names; None for any other key."""
        if get_origin(self.annotation) is not dict:
            return None
        kind = get_args(self.annotation)[1]
        return Key(kind, REQUIRED, allowed_values(kind), self.doc)

    @property
    def nullable(self) -> bool:
        """Return whether null is an allowed value."""
        return self.annotation is Any or type(None) in get_args(self.annotation)


@cache
def keys_of(section: type) -> Mapping[str, Key]:
    """Return the keys of a section (a pydantic model or a dataclass) in definition order."""
    if issubclass(section, BaseModel):
        return {name: _pydantic_key(info) for name, info in section.model_fields.items()}
    hints = typing.get_type_hints(section, include_extras=True)
    items = dataclasses.fields(cast(Any, section))
    return {item.name: _dataclass_key(item, hints[item.name]) for item in items}


def leaves(section: type, above: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Key]]:
    """Yield (path, key) of every value below a section, at any depth."""
    for name, key in keys_of(section).items():
        if key.section:
            yield from leaves(key.section, (*above, name))
        else:
            yield (*above, name), key


def allowed_values(annotation: Any, constraints: tuple[Any, ...] = ()) -> str:
    """Return what an annotation allows, in words: "whole number >= 1", "one of auto, cpu, cuda"."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        inner = [part for extra in arguments[1:] for part in getattr(extra, "metadata", [extra])]
        return allowed_values(arguments[0], (*inner, *constraints))
    if origin is Literal:
        return arguments[0] if len(arguments) == 1 else "one of " + ", ".join(map(str, arguments))
    if origin in (Union, types.UnionType):
        return ", or ".join(allowed_values(kind, constraints if kind is not type(None) else ()) for kind in arguments)
    if origin in (tuple, list):
        if origin is tuple and Ellipsis not in arguments:
            return f"list of {len(arguments)}: " + "; ".join(dict.fromkeys(map(allowed_values, arguments)))
        least = max((getattr(part, "min_length", None) or 0 for part in constraints), default=0)
        return f"list of{f' {least} or more' if least else ''}: {allowed_values(arguments[0])}"
    if origin is dict:
        least = max((getattr(part, "min_length", None) or 0 for part in constraints), default=0)
        kind = f"mapping of {least} or more" if least else "mapping"
        return kind if arguments[1] is Any else f"{kind} to: {allowed_values(arguments[1])}"
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return f"section of {', '.join(annotation.model_fields)}"
    word = _WORDS.get(annotation, "mapping" if annotation is dict else getattr(annotation, "__name__", str(annotation)))
    bounds = [
        f"{sign} {value:g}" if isinstance(value, float) else f"{sign} {value}"
        for bound, sign in _BOUNDS.items()
        for part in constraints
        if (value := getattr(part, bound, None)) is not None
    ]
    patterns = [part.pattern for part in constraints if getattr(part, "pattern", None)]
    return " ".join([word, " and ".join(bounds)] if bounds else [word]) + "".join(
        f" like {pattern.strip('^$')}" for pattern in patterns
    )


def _pydantic_key(info: FieldInfo) -> Key:
    default = REQUIRED if info.is_required() else info.get_default(call_default_factory=True, validated_data={})
    allowed = allowed_values(info.annotation, tuple(info.metadata))
    return Key(info.annotation, default, allowed, info.description or "")


def _dataclass_key(item: dataclasses.Field[Any], annotation: Any) -> Key:
    default: Any = REQUIRED
    if item.default is not dataclasses.MISSING:
        default = item.default
    elif item.default_factory is not dataclasses.MISSING:
        default = item.default_factory()
    return Key(annotation, default, allowed_values(annotation), item.metadata.get("doc", ""))
