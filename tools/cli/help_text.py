"""Format help texts to fit the terminal."""

from __future__ import annotations

import argparse
import re
import textwrap
from itertools import groupby
from typing import Any

PROGRAMS = ("python ", "torchrun ", "metalion ", "curl ")
# An option with its value, or a word. Quoted text stays whole, because a break inside would change it.
_WORD = r"""(?:[^\s"']|"[^"]*"|'[^']*')+"""
_COMMAND_PART = re.compile(rf"--\S+ (?!-){_WORD}|{_WORD}")


class HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Format --help: description and epilog keep their line breaks where the terminal is wide enough."""

    def _format_usage(self, *parts: Any) -> str:
        usage = super()._format_usage(*parts)
        return usage if _fits(usage, self._width) else re.sub(r"(?m)^ +", " " * 4, usage)

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return fit_text(text, width)


def fit_text(text: str, width: int) -> str:
    """Return the text in lines of at most `width` characters. A block without blank lines that fits stays as it is.

    In other blocks prose is filled again, "  command    meaning" takes two lines, and a long command gets backslashes.
    """
    blocks = re.split(r"(\n{2,})", text.strip("\n"))
    return "".join(block if _fits(block, width) else _fit_block(block, width) for block in blocks)


def _fits(block: str, width: int) -> bool:
    return all(len(line) <= width for line in block.splitlines())


def _fit_block(block: str, width: int) -> str:
    lines = re.sub(r" \\\n\s*", " ", block).splitlines()
    parts = []
    for prose, group in groupby(lines, lambda line: re.search(r"^ |\S {2,}", line) is None):
        rows = list(group)
        parts.extend([_fill(" ".join(rows), width, "")] if prose else [_fit_row(row, width) for row in rows])
    return "\n".join(parts)


def _fit_row(line: str, width: int) -> str:
    """Return an indented line: a command or a term, then two spaces or more, then its meaning."""
    text = line.lstrip()
    indent = " " * (len(line) - len(text))
    if len(indent) > 12:  # the meaning of the line above
        return _fill(text, width, " " * 6)
    term, *meaning = re.split(r" {2,}", text, maxsplit=1)
    fit = _fit_command if term.startswith(PROGRAMS) else _fill
    return "\n".join([fit(term, width, indent), *(_fill(part, width, f"{indent}    ") for part in meaning)])


def _fill(text: str, width: int, indent: str) -> str:
    return textwrap.fill(text, width, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False)


def _fit_command(command: str, width: int, indent: str) -> str:
    lines = [indent]
    for part in _COMMAND_PART.findall(command):
        if len(lines[-1]) + len(part) > width - 2 and lines[-1].strip():
            lines.append(f"{indent}    ")
        lines[-1] += f"{part} "
    return "\\\n".join(lines).rstrip()
