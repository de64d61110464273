"""Plot the curves of one or several runs: `python -m tools.plot runs/a runs/b`.

The figure shows the loss against steps and tokens (faint: raw, solid: smoothed, points: validation), the throughput, the
learning rate and the gradient norm. `--html` writes a report page of one run instead.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from tools.cli.arguments import check_picture, command, command_line
from tools.reporting.run_curves import plot_runs


@command
def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line. Returns the exit status."""
    parser = command_line(
        "python -m tools.plot",
        "Draw the curves of one or several runs: loss, throughput, learning rate, gradient norm.",
        (
            "examples:\n"
            "  python -m tools.plot runs/default                     one run, to runs/default/plot.png\n"
            "  python -m tools.plot runs/metala runs/gla -o both.pdf two runs in one picture\n"
            "  python -m tools.plot runs/default --html              a report page, to runs/default/report.html\n"
        ),
    )
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="folder of a run, or its metrics.jsonl")
    parser.add_argument("-o", "--out", type=Path, help="file to write; its suffix selects the format (png, pdf, svg)")
    parser.add_argument("--html", action="store_true", help="write a self-contained report page of one run instead")
    options = parser.parse_args(arguments)
    if options.html:
        from tools.reporting.run_report import write_report

        if len(options.runs) > 1:
            parser.error("--html is about one run; leave --html out to compare several")
        print(write_report(options.runs[0], options.out))
    else:
        folder = options.runs[0].parent if options.runs[0].is_file() else options.runs[0]
        default = folder / "plot.png" if len(options.runs) == 1 else Path("plot.png")
        if options.out is not None:
            check_picture(options.out, "--out")
        print(plot_runs(options.runs, options.out or default))
    return 0


if __name__ == "__main__":
    sys.exit(main())
