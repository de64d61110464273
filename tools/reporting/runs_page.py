"""Write a self-contained HTML page that compares several runs: `python -m tools.plot RUN RUN --html`."""

from __future__ import annotations

import base64
import html
import math
import re
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import yaml

from data.atomic_io import write_text
from tools.reporting.run_curves import distinct_names, plot_runs, smooth
from tools.reporting.run_report import PAGE, collect
from tools.reporting.tables import FEW_DOCUMENTS, NO_METRICS

# Keys that name a run, and so differ always.
_NAMES = ("run.name", "run.directory", "checkpoint.directory")
RESULTS_NOTE = (
    "Losses in nats per token, of image classifiers per image. Accuracy: of masked tokens or images, from 0 to 1. "
    "Validation: the last one of the run. -: not measured."
)


class Section(NamedTuple):
    """Hold a titled table of the page, with a note below it. The first `text_columns` hold text, the others numbers."""

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""
    text_columns: int = 1


def write_runs_page(runs: Sequence[Path], out: Path, comparisons: Sequence[Section] = ()) -> Path:
    """Write curves, results and configuration differences of several runs, and the given comparisons, to `out`.

    Raises FileNotFoundError and ValueError as `run_report.collect`.
    """
    names = distinct_names(runs)
    data = {name: collect(run) for name, run in zip(names, runs, strict=True)}
    with tempfile.TemporaryDirectory() as folder:
        picture = plot_runs(runs, Path(folder) / "curves.svg").read_bytes()
    parts = [table_html(Section("Results", *_results(data), RESULTS_NOTE)), picture_html("Curves", picture, "svg+xml")]
    sections = [
        _scores(data),
        *comparisons,
        Section("Configuration differences", ["key", *names], config_differences(data)),
    ]
    parts += [table_html(section) for section in sections if section.rows or section.note]
    write_page(out, ", ".join(names), parts)
    return out


def write_page(out: Path, title: str, parts: Sequence[str]) -> None:
    """Write a page in the style of the report page. parts: HTML below the title."""
    title = html.escape(title)
    template = PAGE.read_text(encoding="utf-8")
    (policy,) = re.findall(r'<meta http-equiv="Content-Security-Policy"[^>]*>', template)
    (style,) = re.findall(r"<style>.*?</style>", template, re.DOTALL)
    write_text(
        out,
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8">{policy}<title>{title}</title>{style}'
        "<style>img { width: 100%; background: white; border-radius: 6px; }</style></head>\n"
        f"<body><main><header><h1>{title}</h1></header>\n" + "\n".join(parts) + "\n</main></body></html>\n",
    )


def config_differences(data: Mapping[str, Mapping[str, Any]]) -> list[list[str]]:
    """Return [key, value of each run] for the keys whose values differ. A missing key or configuration is a dash.

    data: run name -> `run_report.collect`.
    """
    trees = [_flat(yaml.safe_load(run["config"]) if run["config"] else {}) for run in data.values()]
    keys = dict.fromkeys(key for tree in trees for key in tree if key not in _NAMES)
    rows = [[key, *(tree.get(key, "-") for tree in trees)] for key in keys]
    return [row for row in rows if len(set(row[1:])) > 1]


def _flat(node: Any, path: str = "") -> dict[str, str]:
    if isinstance(node, dict) and node:
        return {key: value for name, below in node.items() for key, value in _flat(below, f"{path}.{name}").items()}
    # A list of one value prints it as configurations write it, without the end mark of a document.
    text = yaml.safe_dump([node], default_flow_style=True, allow_unicode=True, width=math.inf)
    return {path[1:]: text.strip()[1:-1]} if path else {}


def _results(data: Mapping[str, Mapping[str, Any]]) -> tuple[list[str], list[list[str]]]:
    header = ["run", "parameters", "steps", "tokens"]
    header += ["validation loss", "bits per byte", "accuracy", "training loss, smoothed"]
    rows = []
    for name, run in data.items():
        train, validation, environment = run["train"], run["validation"], run["environment"]
        losses = smooth(np.array(train.get("loss", [None]), np.float64))
        rows.append(
            [
                name,
                "-" if environment is None else f"{environment['parameters']:,}",
                f"{train['step'][-1]:,.0f}",
                f"{train['tokens'][-1]:,.0f}" if "tokens" in train else "-",
                *(_last(validation, key, 4) for key in ("loss", "bits_per_byte", "accuracy")),
                "-" if math.isnan(losses[-1]) else f"{losses[-1]:.4f}",
            ]
        )
    return header, rows


def _scores(data: Mapping[str, Mapping[str, Any]]) -> Section:
    """Return the scores of each run's results.json with their standard errors."""
    evaluations = {name: run["evaluation"] or {"results": {}} for name, run in data.items()}
    keys = {
        (suite, task, metric): None
        for evaluation in evaluations.values()
        for suite, tasks in evaluation["results"].items()
        for task, metrics in tasks.items()
        for metric, value in metrics.items()
        if isinstance(value, int | float) and metric not in NO_METRICS
    }
    rows = []
    for suite, task, metric in keys:
        cells = []
        for evaluation in evaluations.values():
            value = evaluation["results"].get(suite, {}).get(task, {}).get(metric)
            detail = evaluation.get("details", {}).get(suite, {}).get(task, {}).get(metric) or {}
            error = f" ± {detail['stderr']:.2g}" if detail.get("stderr") is not None else ""
            documents = detail.get("documents")
            few = f", n = {documents}" if documents is not None and documents < FEW_DOCUMENTS else ""
            # No-break spaces: a narrow page scrolls.
            cells.append("-" if value is None else f"{value:.4g}{error}{few}".replace(" ", "\u00a0"))
        rows.append([suite, Path(task).name, metric, *cells])
    note = "Accuracies from 0 to 1. ±: standard error. -: not evaluated." if rows else ""
    if any(",\u00a0n" in cell for row in rows for cell in row):
        note += f" n: documents. Scores on fewer than {FEW_DOCUMENTS} show only that the task runs."
    return Section("Evaluation", ["suite", "task", "metric", *data], rows, note, text_columns=3)


def _last(columns: Mapping[str, Sequence[float | None]], key: str, digits: int) -> str:
    value = (columns.get(key) or [None])[-1]
    return "-" if value is None else f"{value:.{digits}f}"


def picture_html(title: str, picture: bytes, kind: str) -> str:
    """Return a card with an embedded picture. kind: MIME subtype, such as png."""
    source = f"data:image/{kind};base64,{base64.b64encode(picture).decode()}"
    return f'<h2>{html.escape(title)}</h2><div class="card"><img src="{source}" alt="{html.escape(title)}"></div>'


def table_html(section: Section) -> str:
    """Return a section as a card with a table."""
    title, header, rows, note, text_columns = section

    def line(tag: str, row: Sequence[str]) -> str:
        """Return the cells of a row; the style sheet sets the first one to the left."""
        starts = (f'<{tag} class="text">' if 0 < i < text_columns else f"<{tag}>" for i in range(len(row)))
        return "".join(f"{start}{html.escape(str(cell))}</{tag}>" for start, cell in zip(starts, row, strict=True))

    head = line("th", header)
    body = "\n".join(f"<tr>{line('td', row)}</tr>" for row in rows)
    table = f'<table class="data"><thead><tr>{head}</tr></thead><tbody>\n{body}\n</tbody></table>' if rows else ""
    text = f'<p class="dim">{html.escape(note)}</p>' if note else ""
    return f'<h2>{html.escape(title)}</h2><div class="card scroll">{table}{text}</div>'
