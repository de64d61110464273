"""Command lines: a parser whose --help is written as it is to be read, values (`type=` of an argument), and how a command
ends.

Every program here ends with 0 when it did what was asked; with 1 when it did its work and the result is not what was
asked (logits that differ, runs that are left), or could not be kept (a full disk); with 2, as argparse does, when it
refuses its input, after a sentence on stderr; and with 130 after Ctrl-C. Anything else is this program's own mistake and
keeps its traceback.
"""

from __future__ import annotations

import argparse
import errno
import functools
import math
import os
import select
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

FAILED = 1
REFUSED = 2
INTERRUPTED = 130
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)

Number = TypeVar("Number", int, float)
Main = Callable[[Sequence[str] | None], int]


def command(main: Main) -> Callable[..., int]:
    """`main` of a program: an OSError or a ValueError of it (those of configurations and checkpoints are among them) is
    its input's, and ends it as `refused` says; Ctrl-C ends it as `interrupted` does."""

    @functools.wraps(main)
    def answered(arguments: Sequence[str] | None = None) -> int:
        try:
            return main(arguments)
        except (OSError, ValueError) as error:
            return 0 if isinstance(error, BrokenPipeError) and _unread() else refused(error)
        except KeyboardInterrupt:
            return interrupted()

    return answered


def _unread() -> bool:
    """Whether nobody reads the output any more, as after `| head`; then the rest of it goes nowhere, and in silence."""
    output = select.poll()
    output.register(1, 0)
    if not any(event & select.POLLERR for _, event in output.poll(0)):
        return False
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    return True


def interrupted(next_step: str = "") -> int:
    """Says on stderr that Ctrl-C ended the command, and what is to do next; the exit status that goes with it."""
    print("\ninterrupted" + (next_step and f": {next_step}"), file=sys.stderr)
    return INTERRUPTED


def refused(error: Exception) -> int:
    """Says on stderr what cannot be used and why; the exit status that goes with it."""
    full = any(isinstance(problem, OSError) and problem.errno in FULL for problem in (error, error.__cause__))
    hint = ". What is finished is kept: make room and give the same command again" if full else ""
    print(f"error: {_words(error)}{hint}", file=sys.stderr)
    return FAILED if full else REFUSED


def _words(error: Exception) -> str:
    """The error's own sentence; for one of the system, the file first and what may stand there."""
    if not isinstance(error, OSError) or error.strerror is None:
        return str(error)
    if error.filename is None:
        return error.strerror
    wanted = {
        FileNotFoundError: "; name a path that is there",
        IsADirectoryError: "; name a file",
        NotADirectoryError: "; name a folder",
        PermissionError: "; name one that may be read and written",
        FileExistsError: "; name another",
    }
    return f"{error.filename}: {error.strerror}{wanted.get(type(error), '')}"


def command_line(command: str, description: str | None, epilog: str = "") -> argparse.ArgumentParser:
    """A parser of `command`; --help keeps the lines of the description (a module's docstring, say) and of the epilog."""
    return argparse.ArgumentParser(
        prog=command, description=description, epilog=epilog, formatter_class=argparse.RawDescriptionHelpFormatter
    )


def check_writable(path: Path, flag: str) -> None:
    """Before the work: ValueError naming the flag for an output file that cannot be written. Leaves nothing behind."""
    folder = path.parent
    while not os.path.lexists(folder):
        folder = folder.parent
    try:
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        # Rights do not tell: root has them all, and yet there is no writing to /proc or a read-only mount.
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ValueError(f"{flag} {path}: cannot be written ({error.strerror}: {folder}); name another file") from error


def check_picture(path: Path, flag: str) -> None:
    """As `check_writable`, for the file of a plot: its name ends in one of matplotlib's formats."""
    from matplotlib.backend_bases import FigureCanvasBase

    check_writable(path, flag)
    if path.suffix[1:].lower() not in FigureCanvasBase.get_supported_filetypes():
        raise ValueError(f"{flag} {path}: a picture's name ends in its format, such as .png, .pdf or .svg")


def words(text: str) -> list[str]:
    """ "A,B" as a list."""
    return [word for word in text.split(",") if word]


def numbers(text: str) -> list[int]:
    """ "1,2" as a list of whole numbers, none below 0."""
    return [from_zero(word) for word in words(text)]


def positive(text: str) -> int:
    """A whole number from 1 on; argparse's error says so otherwise, and so for those below."""
    return _number(text, int, "a whole number, 1 or more,", lambda value: value >= 1)


def from_zero(text: str) -> int:
    """A whole number from 0 on."""
    return _number(text, int, "a whole number, 0 or more,", lambda value: value >= 0)


def above_zero(text: str) -> float:
    """A number above 0."""
    return _number(text, float, "a number above 0", lambda value: 0 < value < math.inf)


def share(text: str) -> float:
    """A number from 0 to 1."""
    return _number(text, float, "a share from 0 to 1", lambda value: 0 <= value <= 1)


def above_zero_to_one(text: str) -> float:
    """A share that is not nothing."""
    return _number(text, float, "a share above 0 and at most 1", lambda value: 0 < value <= 1)


def _number(text: str, kind: type[Number], allowed: str, holds: Callable[[Number], bool]) -> Number:
    try:
        value = kind(text)
    except ValueError:
        value = None
    if value is None or not holds(value):
        raise argparse.ArgumentTypeError(f"{text}: {allowed} is allowed")
    return value
