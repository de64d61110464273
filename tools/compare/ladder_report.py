"""Report a ladder: mixers by purpose, fits, predicted and trained losses of the largest size, loss by source and position."""

from __future__ import annotations

import html
import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tools.compare.held_out import compressors_of, positions_of, training_tokens_of
from tools.compare.ladder_choices import LatePositions, choices, noise_of_run
from tools.compare.ladder_predictions import (
    Predictions,
    Reasons,
    fits_of,
    merge_predictions,
    points_of,
    predict,
    stored_predictions,
)
from tools.compare.ladder_scores import scores
from tools.compare.results import Result, Row, difference_text, ranked, unstable_note
from tools.compare.rungs import Ladder
from tools.compare.scaling_fit import EXPONENT_BOUNDS, ScalingFit
from tools.compare.spec import Comparison, Run
from tools.compare.tuning import RATES_TITLE, rates_table
from tools.reporting.runs_page import Section, picture_html, table_html, write_page
from tools.reporting.style import label_lines, log_axes, saved_figure, series_style
from tools.reporting.tables import markdown_table

_NEAR = 0.01  # nats, the goal of a prediction
_INTERVAL = "Brackets hold 95 % intervals of a residual bootstrap."


def write_ladder(
    comparison: Comparison,
    ladder: Ladder,
    runs: Sequence[Run],
    results: Sequence[Result],
    rows: Sequence[Row],
    facts: Sequence[str] = (),
) -> tuple[list[Section], list[Path]]:
    """Write ladder.png and ladder.html to the comparison's folder. Return the tables, and the files.

    facts: sentences below the title of the page.
    """
    fits, reasons = fits_of(points_of(results))
    largest = [run for run in runs if ladder.is_largest(run.size)]
    computed, not_predicted = predict(ladder, largest, results)
    labels = {run.model: run.label for run in runs}
    predictions = merge_predictions(computed, stored_predictions(comparison))
    sections = [
        *_largest(comparison, ladder, runs, results, rows, predictions),
        _predictions(
            ladder, largest, rows, predictions, _repeated(comparison, largest), _without_fit(not_predicted, labels)
        ),
        _constants(fits, labels, _without_fit(reasons, labels)),
        rates_table(comparison),
    ]
    sections = [section for section in sections if section.rows or section.note]
    files = [comparison.folder / "ladder.html"]
    parts = [table_html(section) for section in sections]
    if rows:
        picture = _draw(ladder, results, fits, comparison.folder / "ladder.png", comparison.title)
        files.insert(0, picture)
        parts.insert(0, picture_html("Loss over compute", picture.read_bytes(), "png"))
    parts = [*(f'<p class="dim">{html.escape(fact)}</p>' for fact in facts), *parts]
    write_page(files[-1], comparison.title, parts)
    return sections, files


def markdown(sections: Sequence[Section], command: str = "", measures: str = "") -> str:
    """Return the tables as Markdown. command: shown below every title, with `--tune` or the options `measures`."""
    parts = []
    for section in sections:
        parts.append(f"## {section.title}\n")
        options = "--tune" if section.title == RATES_TITLE else measures
        parts += [f"    {command} {options}".rstrip() + "\n"] if command else []
        if section.rows:
            parts.append(
                markdown_table(section.header, section.rows, text_columns=section.text_columns, aligned=True) + "\n"
            )
        parts += [f"{section.note}\n"] if section.note else []
    return "\n".join(parts)


def _without_fit(reasons: Reasons, labels: Mapping[str, str]) -> str:
    """Return a sentence per reason for which models have no fit. labels: of the models."""
    return "".join(
        f" No fit of {', '.join(labels.get(model, model) for model in models)}: {reason}."
        for reason, models in reasons.items()
    )


def _predictions(
    ladder: Ladder,
    largest: Sequence[Run],
    rows: Sequence[Row],
    predictions: Predictions,
    repeated: str,
    without_fit: str,
) -> Section:
    """Return predicted and trained losses. repeated, without_fit: sentences of `_repeated` and `_without_fit`."""
    title = f"Prediction of {ladder.largest}"
    trained = {(row.model, row.size): row for row in rows if math.isfinite(row.mean("loss"))}
    cells, errors, unstable, times = [], [], list[str](), dict[str, list[str]]()
    for (model, rung), run in {(run.model, run.size): run for run in largest}.items():
        if (prediction := predictions.get(model, {}).get(rung)) is None:
            continue
        times.setdefault(prediction.stored, []).append(run.label)
        row = trained.get((model, rung))
        loss, low, high = prediction.mean
        miss = math.nan if row is None else loss - row.mean("loss")
        if row is not None:
            unstable += [row.label] if row.unstable else []
            errors += [] if row.unstable else [abs(miss)]
        cells.append(
            [
                run.label if row is None else row.marked_label,
                rung,
                f"{loss:.4f} [{low:.4f}, {high:.4f}]",
                f"{prediction.loss:.4f}",
                f"{prediction.own:.4f}",
                "-" if row is None else f"{row.mean('loss'):.4f}",
                "-" if row is None else f"{miss:+.4f}",
            ]
        )
    header = [
        "model",
        "rung",
        "predicted loss",
        "common exponents",
        "own exponents",
        "trained",
        "predicted minus trained",
    ]
    if not cells:
        return Section(title, header, [], f"No prediction.{without_fit or ' No smaller run is complete.'}")
    note = f"Predicted loss: the mean of two fits to the sizes below {ladder.largest}, one with exponents a and b that are common"
    note += f" to all models and one with the model's own. {_INTERVAL}{without_fit}{repeated}"
    for time, labels in times.items():
        note += f" {', '.join(labels)}: " + (
            f"stored at {time} UTC, before a run of {ladder.largest} was complete."
            if time
            else "not stored, but computed from the smaller runs that are complete now."
        )
    if errors:
        near = sum(error <= _NEAR for error in errors)
        note += (
            f" Within {_NEAR:g} nats: {near} of {len(errors)}; mean absolute difference {statistics.mean(errors):.4f}."
        )
    if unstable:
        note += f" Not counted, since a run was unstable: {', '.join(unstable)}."
    return Section(title, header, cells, note)


def _repeated(comparison: Comparison, largest: Sequence[Run]) -> str:
    """Return a sentence about runs that read the training text more than once, else an empty string."""
    available = training_tokens_of(comparison)
    tokens = max((run.config.batch.tokens_of(run.config.schedule.train_steps) for run in largest), default=0)
    if available is None or tokens <= available:
        return ""
    return (
        f" The largest run reads the training text {tokens / available:.1f} times, and the fit takes every token as new, so "
        "losses may be predicted too low."
    )


def _constants(fits: Mapping[str, ScalingFit], labels: Mapping[str, str], without_fit: str) -> Section:
    """Return the constants of every fit. without_fit: sentences of `_without_fit`."""
    title, header = "Fit of all sizes", ["model", "runs", "N0", "D0", "E", "A", "a", "B", "b"]
    if not fits:
        return Section(title, header, [], without_fit.strip())
    rows = []
    for model, fit in fits.items():
        cells = ("{:.3f} [{:.3f}, {:.3f}]".format(*fit.interval(index)) for index in (0, 1, 3, 2, 4))
        rows.append([labels[model], str(len(fit.residuals)), *(f"{center / 1e6:.4g}" for center in fit.center), *cells])
    note = "L(N, D) = E + A (N0 / N)^a + B (D0 / D)^b in nats per token; N without embeddings, N0 and D0 in millions. "
    note += _INTERVAL
    if any(fit.interval(0)[1] < _NEAR for fit in fits.values()):
        note += " Where the interval of E begins at 0, the runs do not tell E from the other terms."
    lowest, highest = EXPONENT_BOUNDS
    exponents = [fit.interval(index)[1:] for fit in fits.values() for index in (3, 4)]
    if any(low <= lowest or high >= highest for low, high in exponents):
        note += f" Exponents are fitted between {lowest:g} and {highest:g}. Where an interval reaches a bound, the runs do not "
        note += "determine the exponent."
    return Section(title, header, rows, note + without_fit)


def _largest(
    comparison: Comparison,
    ladder: Ladder,
    runs: Sequence[Run],
    results: Sequence[Result],
    rows: Sequence[Row],
    predictions: Predictions,
) -> list[Section]:
    """Return the tables of the largest rung with a complete run: choices, loss, bits per byte, by source and position, scores.

    Positions and scores are of the largest rung where they are measured. Unstable runs are left out of the choices.
    """
    complete = {row.size for row in rows}
    reached = [rung for rung in ladder.rungs() if rung in complete]
    if not reached:
        return []
    rung = reached[-1]
    here = ranked(row for row in rows if row.size == rung)
    sources = sorted({metric for row in here for metric in row.values if metric.startswith("loss/")})
    by_source = [[source.removeprefix("loss/"), *(_number(_mean(row, source)) for row in here)] for source in sources]
    steady = [row for row in rows if not row.unstable]
    misses = {
        row.model: predictions[row.model][rung].mean[0] - row.mean("loss")
        for row in steady
        if row.size == rung and rung in predictions.get(row.model, {})
    }
    misses = {model: miss for model, miss in misses.items() if math.isfinite(miss)}
    rungs = ladder.rungs()
    noise = noise_of_run(steady, [other for other in rungs if rungs[other][0] == rungs[rung][0]], misses)
    late, by_position = _positions(reached, rows, runs)
    return [
        choices(rung, steady, runs, noise, late),
        _losses(ladder, rung, here, compressors_of(comparison)),
        Section(
            f"Loss by source at {rung}",
            ["source", *(row.marked_label for row in here)],
            by_source if len(sources) > 1 else [],
        ),
        by_position,
        scores(reached, runs, results),
    ]


def _losses(ladder: Ladder, rung: str, here: Sequence[Row], compressors: Mapping[str, float]) -> Section:
    """Return loss, accuracy or bits per byte, and loss on data.test of the models at a rung.

    here: their rows, from `ranked`. compressors: of `compressors_of`.
    """
    base, xz = here[0], compressors.get("xz -9", math.nan)
    masked = "accuracy" in base.values
    cells = []
    for row in here:
        bits = _mean(row, "bits_per_byte")
        shares = [_number(bits), "-" if math.isnan(bits / xz) else f"{1 - bits / xz:.1%}"]
        measured = [f"{row.mean('accuracy'):.2%}"] if masked else shares
        loss, difference = f"{row.mean('loss'):.4f}", difference_text(row, base)
        cells.append([row.marked_label, loss, difference, *measured, _number(_mean(row, "test"))])
    measures = ["masked-token accuracy"] if masked else ["bits per byte", "below xz -9"]
    header = ["model", "loss", f"minus {base.label}", *measures, "loss on data.test"]
    size, ratio = ladder.rungs()[rung]
    parameters = ladder.parameters[size]
    note = f"{rung}: {parameters / 1e6:g} M parameters without embeddings, {ratio * parameters / 1e6:g} M tokens."
    if compressors:
        numbers = ", ".join(f"{name} {bits:.4f}" for name, bits in compressors.items())
        note += f" Compressors on the validation text, bits per byte: {numbers}."
    return Section(f"Loss at {rung}", header, cells, note + unstable_note(here))


def _positions(reached: Sequence[str], rows: Sequence[Row], runs: Sequence[Run]) -> tuple[LatePositions, Section]:
    """Return the losses at the last positions and the table of the largest rung with measured positions.

    reached: the rungs with a complete run. Without measured positions both are of the last of them, and empty.
    """
    rung, bins = reached[-1], dict[str, list[dict[str, Any]]]()
    for other in reversed(reached):
        of_rung = [run for run in reversed(runs) if run.size == other]
        if bins := {run.model: measured for run in of_rung if (measured := positions_of(run))}:
            rung = other
            break
    here = ranked(row for row in rows if row.size == rung)
    measured, missing = ([row for row in here if (row.model in bins) is present] for present in (True, False))
    table = [
        [
            "{from:,.0f} to {to:,.0f}".format(**span) if span["to"] > span["from"] else f"{span['from']:,.0f}",
            *(_number(bins[row.model][i]["loss"]) for row in measured),
        ]
        for i, span in enumerate(bins[measured[0].model] if measured else [])
    ]
    notes = ["Loss of one run per model, the first with measured positions."] if table else []
    if missing and "accuracy" not in here[0].values:
        labels = ", ".join(row.label for row in missing)
        notes.append(
            f"Not measured{f': {labels}' if table else ''}. `--positions` measures runs that have a checkpoint."
        )
    header = ["position", *(row.marked_label for row in measured)]
    late = {row.model: bins[row.model][-1]["loss"] for row in measured if not row.unstable}
    return LatePositions(rung, late), Section(f"Loss by position at {rung}", header, table, " ".join(notes))


def _mean(row: Row, metric: str) -> float:
    return row.mean(metric) if metric in row.values else math.nan


def _number(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.4f}"


def _draw(ladder: Ladder, results: Sequence[Result], fits: Mapping[str, ScalingFit], out: Path, title: str) -> Path:
    """Draw the loss of every rung against compute, 6 N D, and the fit at the largest size's fewest tokens per parameter."""
    rungs = ladder.rungs()
    ratio = min(ladder.tokens_per_parameter[ladder.largest])
    complete = [result for result in results if result.final]
    with saved_figure(out, height=4.6) as (_, axes):
        for index, model in enumerate(dict.fromkeys(result.run.model for result in complete)):
            points: dict[str, list[Result]] = {}
            for result in complete:
                if result.run.model == model:
                    points.setdefault(result.run.size, []).append(result)
            style, label = series_style(index), next(iter(points.values()))[0].run.label
            for rung, of_rung in points.items():
                compute = 6 * of_rung[0].run.body * of_rung[0].tokens
                mean = statistics.mean(result.final["loss"] for result in of_rung if result.final)
                face = style["color"] if rungs[rung][1] == ratio else "none"
                axes.plot([compute], [mean], **{**style, "ls": "", "mfc": face})
                if any(result.unstable for result in of_rung):
                    axes.annotate("unstable ", (compute, mean), ha="right", va="bottom", color=style["color"])
            if model in fits:
                sizes = np.geomspace(*(bound(ladder.parameters.values()) for bound in (min, max)), 40)
                losses = [fits[model].predict(size, ratio * size)[0] for size in sizes]
                axes.plot(6 * ratio * sizes**2, losses, label=label, **{**style, "marker": ""})
            else:
                axes.plot([compute], [mean], label=label, **{**style, "ls": "", "mfc": face})
        log_axes(axes, "x")
        axes.set(
            xlabel="6 N D (floating-point operations without embeddings)", ylabel="validation loss (nats per token)"
        )
        marks = "lines and filled marks" if fits else "filled marks"
        marks += f": {ratio:g} {'token' if ratio == 1 else 'tokens'} per parameter"
        marks += "; open marks: other numbers" if any(rungs[result.run.size][1] != ratio for result in complete) else ""
        axes.set_title(f"{title} ({marks})")
        label_lines(axes)
    return out
