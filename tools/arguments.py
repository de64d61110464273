"""Values on a command line: `type=` of an argparse argument."""

from __future__ import annotations

import argparse


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
