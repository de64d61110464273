"""The base of every section of a configuration, and types that sections share.

Sections are frozen and refuse unknown keys. Values are strict: text is never read as a number.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

Steps = Annotated[int, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Text = Annotated[str, Field(min_length=1)]


class Section(BaseModel):
    """A frozen group of keys."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)
