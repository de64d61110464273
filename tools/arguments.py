"""Command lines: a parser whose --help is written as it is to be read, and values, `type=` of an argument."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pydantic import ValidationError


def command_line(command: str, description: str | None, epilog: str = "") -> argparse.ArgumentParser:
    """A parser of `command`; --help keeps the lines of the description (a module's docstring, say) and of the epilog."""
    return argparse.ArgumentParser(
        prog=command, description=description, epilog=epilog, formatter_class=argparse.RawDescriptionHelpFormatter
    )


def first_problem(error: ValidationError) -> str:
    """The first key that a schema refuses, its value and why: "seeds = []: ..." or "name is missing: give it a value"."""
    first = error.errors(include_url=False)[0]
    key = ".".join(map(str, first["loc"]))
    missing = first["type"] == "missing"
    return f"{key} is missing: give it a value" if missing else f"{key} = {first['input']!r}: {first['msg']}"


def words(text: str) -> list[str]:
    """ "A,B" as a list."""
    return [word for word in text.split(",") if word]


def numbers(text: str) -> list[int]:
    """ "1,2" as a list."""
    return [int(word) for word in words(text)]


def positive(text: str) -> int:
    """A whole number from 1 on; argparse's error says so otherwise."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value}: 1 or more is allowed")
    return value
