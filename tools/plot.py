"""Plot the curves of one or several runs: `python -m tools.plot runs/a runs/b`.

The figure shows the loss against steps and tokens (faint: raw, solid: smoothed, points: validation), the throughput, the
learning rate and the gradient norm. `--html` writes a report page of one run, or a page that compares several runs.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tools.cli.arguments import check_picture, check_writable, command, command_line
from tools.reporting.run_curves import distinct_names, plot_runs, run_folder

if TYPE_CHECKING:
    from tools.reporting.runs_page import Section

COMPARISON_NOTE = (
    "Paired by document; accuracies in percent. \u2191: higher is better, \u2193: lower is better. \u00b1: standard error of the "
    "difference. p: probability of a difference this large between equal models. p (Holm): corrected for all rows; "
    "below 0.05 the difference is significant."
)


@command
def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line. Returns the exit status."""
    parser = command_line(
        "python -m tools.plot",
        "Draw the curves of one or several runs: loss, throughput, learning rate, gradient norm.",
        (
            "examples:\n"
            "  python -m tools.plot runs/default                      one run, to runs/default/plot.png\n"
            "  python -m tools.plot runs/metala runs/gla -o both.pdf  two runs in one picture\n"
            "  python -m tools.plot runs/default --html               a report page, to runs/default/report.html\n"
            "  python -m tools.plot runs/a runs/b runs/c --html       curves, configurations and scores, to runs.html\n"
        ),
    )
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="folder of a run, or its metrics.jsonl")
    parser.add_argument(
        "-o", "--out", type=Path, help="file to write; its suffix selects a figure's format (png, pdf, svg)"
    )
    parser.add_argument("--html", action="store_true", help="write a page (.html) in one file instead of a figure")
    options = parser.parse_args(arguments)
    if options.out is not None:
        _check_out(options.out, html=options.html)
    if options.html and len(options.runs) > 1:
        from tools.reporting.runs_page import write_runs_page

        print(write_runs_page(options.runs, options.out or Path("runs.html"), _comparison_tables(options.runs)))
    elif options.html:
        from tools.reporting.run_report import write_report

        print(write_report(options.runs[0], options.out))
    else:
        default = run_folder(options.runs[0]) / "plot.png" if len(options.runs) == 1 else Path("plot.png")
        print(plot_runs(options.runs, options.out or default))
    return 0


def _check_out(out: Path, *, html: bool) -> None:
    if not html:
        check_picture(out, "--out")
        return
    check_writable(out, "--out")
    if out.suffix.lower() not in (".html", ".htm"):
        raise ValueError(f"--out {out}: the name of a page must end in .html; without --html a picture is written")


def _comparison_tables(runs: Sequence[Path]) -> list[Section]:
    """Return one table per run with results of suites: its differences from the first of these runs, paired by document."""
    from tools.evaluation.results_file import read_results
    from tools.evaluation.significance import compare, comparison_rows
    from tools.reporting.runs_page import Section

    results = {}
    for name, run in zip(distinct_names(runs), runs, strict=True):
        if files := sorted(run_folder(run).glob("evaluation/step_*/results.json")):
            results[name] = read_results(files[-1])
    names = list(results)
    tables = []
    for name in names[1:]:
        title = f"Evaluation: {name} minus {names[0]}"
        try:
            header, rows = comparison_rows(compare(results[names[0]], results[name]), (names[0], name))
        except ValueError as error:
            tables.append(Section(title, [], [], f"not compared: {error}"))
        else:
            tables.append(Section(title, header, rows, COMPARISON_NOTE, text_columns=2))
    return tables


if __name__ == "__main__":
    sys.exit(main())
