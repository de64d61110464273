"""Measure time and peak memory on this machine, next to other libraries in the same run: a table, a CSV file and a plot.

Values are medians with random inputs, on CUDA in bfloat16. Kernels have three times:
  replayed  as a CUDA graph: the time of the device
  queued    called repeatedly, as in training: the larger time of host and device
  launched  called once on an idle device: a small problem then waits for the host
The L2 cache is overwritten before every launched or replayed run.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from tools.cli.arguments import command, command_line
from tools.cli.help_text import HelpFormatter

from .commands import COMMANDS


@command
def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line. Returns the exit status."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    options = _parser().parse_args(_overrides_first(words))
    options.output.mkdir(parents=True, exist_ok=True)
    COMMANDS[options.command].run(options)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = command_line(
        "python -m tools.benchmark",
        __doc__,
        "example:\n  python -m tools.benchmark mixers --hidden 64 --heads 4 --length 128 --batch 2    one minute on a CPU\n\n"
        "COMMAND --help describes a command and gives an example.",
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, entry in COMMANDS.items():
        subparser = commands.add_parser(
            name,
            help=entry.text,
            description=entry.text,
            epilog=f"example:\n  python -m tools.benchmark {name} {entry.example}".rstrip() + entry.more_examples,
            formatter_class=HelpFormatter,
        )
        subparser.add_argument(
            "--output", type=Path, default=Path("runs/benchmark"), help="folder for CSV files and plots (%(default)s)"
        )
        entry.arguments(subparser)
    return parser


def _overrides_first(words: Sequence[str]) -> list[str]:
    """Return the words with key=value words before the options: an option with nargs="+" would take them as its values."""
    # Paths may contain "=".
    is_override = [
        "=" in word and not word.startswith("-") and previous not in ("--output", "--config")
        for previous, word in zip(["", *words], words, strict=False)
    ]
    order = sorted(range(1, len(words)), key=lambda index: not is_override[index])
    return [*words[:1], *(words[index] for index in order)]


if __name__ == "__main__":
    sys.exit(main())
