"""Build command lines: the parser, types of argument values, and exit statuses.

Exit statuses of all programs: 0 success; 1 the work was done with a negative result (different logits, remaining runs) or
the result could not be stored (full disk); 2 invalid input, after one message on stderr, as argparse; 130 after Ctrl-C.
Any other exception is an error of the program and keeps its traceback.
"""

from __future__ import annotations

import argparse
import errno
import functools
import json
import math
import os
import re
import select
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import NoReturn, TypeVar

from tools.cli.help_text import HelpFormatter

FAILED = 1
REFUSED = 2
INTERRUPTED = 130
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)

Number = TypeVar("Number", int, float)
Main = Callable[[Sequence[str] | None], int]


def command(main: Main) -> Callable[..., int]:
    """Wrap a program's `main`: OSError and ValueError mean invalid input and end as `refused`, Ctrl-C as `interrupted`.

    ConfigError and checkpoint errors are ValueErrors.
    """

    @functools.wraps(main)
    def wrapper(arguments: Sequence[str] | None = None) -> int:
        try:
            return main(arguments)
        except (OSError, ValueError) as error:
            return 0 if isinstance(error, BrokenPipeError) and _stdout_is_closed() else refused(error)
        except KeyboardInterrupt:
            return interrupted()

    return wrapper


def _stdout_is_closed() -> bool:
    """Return whether the reader of standard output has ended, as after `| head`. If so, discard further output."""
    output = select.poll()
    output.register(1, 0)
    if not any(event & select.POLLERR for _, event in output.poll(0)):
        return False
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    return True


def interrupted(next_step: str = "") -> int:
    """Print on stderr that Ctrl-C ended the command, and the next step. Returns the exit status."""
    print("\ninterrupted" + (next_step and f": {next_step}"), file=sys.stderr)
    return INTERRUPTED


def refused(error: Exception) -> int:
    """Print on stderr why the input is invalid. Returns the exit status.

    Under torchrun one process per machine prints. The others write the message to their error file, which torchrun shows in
    its report.
    """
    full = any(isinstance(problem, OSError) and problem.errno in FULL for problem in (error, error.__cause__))
    hint = ". Finished work is saved: free disk space and run the same command again" if full else ""
    message = f"error: {_message(error)}{hint}"
    error_file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if error_file and os.environ.get("LOCAL_RANK", "0") != "0":
        report = {"message": message, "extraInfo": {"py_callstack": message, "timestamp": str(int(time.time()))}}
        Path(error_file).write_text(json.dumps({"message": report}))
    else:
        print(message, file=sys.stderr)
    return FAILED if full else REFUSED


def _message(error: Exception) -> str:
    """Return the error's message; for a system error the file, the reason and what is allowed."""
    if not isinstance(error, OSError) or error.strerror is None:
        return str(error)
    if error.filename is None:
        return error.strerror
    remedies = {
        FileNotFoundError: "; give a path that exists",
        IsADirectoryError: "; give a file",
        NotADirectoryError: "; give a folder",
        PermissionError: "; give a path with read and write permission",
        FileExistsError: "; give another path",
    }
    return f"{error.filename}: {error.strerror}{remedies.get(type(error), '')}"


class _Parser(argparse.ArgumentParser):
    """Name the nearest option when an option is unknown, or when key=value is given to a program without keys."""

    def error(self, message: str) -> NoReturn:
        if unknown := re.match(r"unrecognized arguments: (-[^\s=]*|(?:\S*\.)?([\w-]+)=)", message):
            nearest = get_close_matches(f"--{unknown[2]}" if unknown[2] else unknown[1], self.option_names(), 1)
            message += f"; the nearest option is {nearest[0]}" if nearest else "; --help lists the options"
        super().error(message)

    def option_names(self) -> list[str]:
        """Return the options of this parser and of its subcommands."""
        options = []
        for action in self._actions:
            options += action.option_strings
            if isinstance(action, argparse._SubParsersAction):
                options += [name for parser in action.choices.values() for name in parser.option_names()]
        return options


def command_line(command: str, description: str | None, epilog: str = "") -> _Parser:
    """Return a parser of `command` whose --help fits the terminal, by `tools.cli.help_text`."""
    return _Parser(prog=command, description=description, epilog=epilog, formatter_class=HelpFormatter)


def parse_with_overrides(
    parser: _Parser, arguments: Sequence[str] | None, schema: Callable[[], type]
) -> argparse.Namespace:
    """Parse options mixed with `key.sub=value`. Refuse an unknown option such as --lr with the nearest option or key.

    schema: returns the configuration class that has the keys.
    """
    options, unknown = parser.parse_known_intermixed_args(arguments)
    if unknown:
        from megatron_lite.config.loader import nearest_keys

        name = unknown[0].partition("=")[0]
        if nearest_options := get_close_matches(name, parser.option_names(), 1, 0.8):
            parser.error(f"{unknown[0]} is not an option; the nearest option is {nearest_options[0]}")
        path = tuple(name.lstrip("-").replace("-", "_").split("."))
        nearest = nearest_keys(path, schema())
        hint = f"; {nearest}" if nearest.startswith("nearest") else ""
        parser.error(f"{unknown[0]} is not an option. Keys are set without dashes, as optimizer.lr=1e-3{hint}")
    return options


def check_writable(path: Path, flag: str) -> None:
    """Raise ValueError naming the option if the output file cannot be written. Leaves no file behind."""
    folder = path.parent
    while not os.path.lexists(folder):
        folder = folder.parent
    try:
        if path.is_dir():
            raise ValueError(f"{flag} {path}: is a folder; give a file")
        # Permissions do not suffice: root has all of them, but cannot write to /proc or a read-only mount.
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ValueError(f"{flag} {path}: cannot be written ({error.strerror}: {folder}); give another file") from error


def check_not_read(path: Path, flag: str, inputs: Iterable[str | Path]) -> None:
    """Raise ValueError naming the option if the output file is one of the inputs, or lies in a folder among them."""
    resolved = path.resolve()
    if any(Path(given).resolve() in (resolved, *resolved.parents) for given in inputs):
        raise ValueError(f"{flag} {path}: this command reads it, or its folder, as input; give another file")


def check_picture(path: Path, flag: str) -> None:
    """Check as `check_writable`, and that the name ends in one of matplotlib's image formats."""
    from matplotlib.backend_bases import FigureCanvasBase

    check_writable(path, flag)
    if path.suffix[1:].lower() not in FigureCanvasBase.get_supported_filetypes():
        raise ValueError(f"{flag} {path}: the name must end in an image format, such as .png, .pdf or .svg")


def utf8_text(text: str) -> str:
    """Return the text. Raises ArgumentTypeError for bytes of the command line that are no UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise argparse.ArgumentTypeError(f"{text!r}: no UTF-8 at character {error.start}; give UTF-8 text") from error
    return text


def words(text: str) -> list[str]:
    """Split "A,B" into a list. Raises ArgumentTypeError if it is empty."""
    if not (parts := [word for word in text.split(",") if word]):
        raise argparse.ArgumentTypeError(f"{text!r} is an empty list: give one value or more, as A,B")
    return parts


def numbers(text: str) -> list[int]:
    """Split "1,2" into a list of whole numbers >= 0. Raises ArgumentTypeError for other text, as do the functions below."""
    return [from_zero(word) for word in words(text)]


def positive_numbers(text: str) -> list[int]:
    """Split "1,2" into a list of whole numbers >= 1."""
    return [positive(word) for word in words(text)]


def positive(text: str) -> int:
    """Parse a whole number >= 1."""
    return _number(text, int, "a whole number, 1 or more,", lambda value: value >= 1)


def from_zero(text: str) -> int:
    """Parse a whole number >= 0."""
    return _number(text, int, "a whole number, 0 or more,", lambda value: value >= 0)


def seed(text: str) -> int:
    """Parse a seed of PyTorch's generators."""
    return _number(text, int, "a whole number from 0 to 2^63 - 1", lambda value: 0 <= value < 2**63)


def above_zero(text: str) -> float:
    """Parse a finite number > 0."""
    return _number(text, float, "a number above 0", lambda value: 0 < value < math.inf)


def share(text: str) -> float:
    """Parse a number from 0 to 1."""
    return _number(text, float, "a number from 0 to 1", lambda value: 0 <= value <= 1)


def above_zero_to_one(text: str) -> float:
    """Parse a number > 0 and <= 1."""
    return _number(text, float, "a number above 0 and at most 1", lambda value: 0 < value <= 1)


def _number(text: str, kind: type[Number], allowed: str, is_allowed: Callable[[Number], bool]) -> Number:
    try:
        value = kind(text)
    except ValueError:
        value = None
    if value is None or not is_allowed(value):
        raise argparse.ArgumentTypeError(f"{text}: {allowed} is allowed")
    return value
