"""Write numbers with their nouns."""

from __future__ import annotations


def counted(number: int, noun: str, plural: str = "") -> str:
    """Return a number and its noun: "1 run", "2,000 runs", "2 processes".

    plural: of a noun that gets more than an "s".
    """
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"
