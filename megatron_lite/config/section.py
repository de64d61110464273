"""Define the base class of configuration sections and the types that sections share.

Sections are frozen and refuse unknown keys. Types are strict: text is never converted to a number.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

Steps = Annotated[int, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Text = Annotated[str, Field(min_length=1)]


class Section(BaseModel):
    """A frozen group of keys."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


def changed_keys(section: Section, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield (key, value) of a section at `path`, and of the sections in it, for values that differ from the defaults."""
    for key, field in type(section).model_fields.items():
        value = getattr(section, key)
        if isinstance(value, Section):
            yield from changed_keys(value, (*path, key))
        elif value != field.default:
            yield (*path, key), value


def without_effect(
    section: Section, path: tuple[str, ...], required: str, *, name: str | None = None
) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yield (key, problem) of `changed_keys` of a section that has an effect only with `required`, as "KEY = VALUE".

    name: of the one key that has no effect; None for all.
    """
    for key, value in changed_keys(section, path):
        if name in (None, key[-1]):
            yield key, f"= {json.dumps(value)} requires {required}; set it, or remove this key"
