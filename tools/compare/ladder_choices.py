"""Choose mixers by purpose from the losses of a ladder."""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from models.config import ModelConfig
from tools.compare.results import FEW_RUNS, Row
from tools.compare.spec import Run
from tools.reporting.runs_page import Section

_HEADER = ["purpose", "mixer", "as good within the noise", "loss", "next mixer", "difference ± standard error"]
# Names of equally good mixers in a cell.
_SHOWN = 3


class Noise(NamedTuple):
    """Hold the standard deviation of one run's loss, nan if nothing shows it, and where it comes from."""

    deviation: float
    source: str


class LatePositions(NamedTuple):
    """Hold model -> loss of one run at the last positions of a text, in nats per token, and the rung of these runs.

    `losses` is empty if nothing was measured.
    """

    rung: str
    losses: Mapping[str, float]


def choices(rung: str, rows: Sequence[Row], runs: Sequence[Run], noise: Noise, late: LatePositions) -> Section:
    """Return one row per purpose: the best mixer, those as good within the noise, and the next mixer.

    rows: of all rungs. noise: of a run of the rung's size.
    """
    here = [row for row in rows if row.size == rung and math.isfinite(row.mean("loss"))]
    growing = {run.model for run in runs if _grows(run.config.model)}
    constant = [row for row in here if row.model not in growing]
    # The seeds of a rung share the noise.
    error = noise.deviation * math.sqrt(2 / min((len(row.values["loss"]) for row in here), default=1))
    cells = []
    for purpose, among, metric in (
        ("lowest loss", here, "loss"),
        ("lowest loss with a state of constant size", constant if growing else [], "loss"),
        ("text of an unseen source", here, "test"),
    ):
        values = {row.label: row.mean(metric) for row in among if metric in row.values}
        if len(values) > 1:
            cells.append([purpose, *_best(values, error)])
    labels = {row.model: row.label for row in rows}
    if len(positions := {labels[model]: loss for model, loss in late.losses.items() if model in labels}) > 1:
        mixers = {row.model for row in rows if row.size == late.rung}
        where = f" at {late.rung}" if late.rung != rung else ""
        where += "" if len(positions) == len(mixers) else f" ({len(positions)} of {len(mixers)} mixers measured)"
        cells.append([f"last positions of a text{where}", *_best(positions, noise.deviation * math.sqrt(2))])
    cells += _by_source(here)
    note = "Loss in nats per token. "
    if not cells:
        note = f"A choice needs at least two mixers with a complete run of {rung}."
    elif math.isnan(error):
        note += "No rung has two mixers with several complete seeds, so the noise of a difference is unknown."
    else:
        note += (
            "As good: within two standard errors of the best. The standard error is that of a difference of validation "
        )
        note += f"losses, for all purposes. It comes from {noise.source}."
    return Section(f"Which mixer for which purpose, at {rung}", _HEADER, cells, note, text_columns=3)


def _grows(model: ModelConfig) -> bool:
    """Return whether the state grows with the context: softmax attention that reads all earlier tokens, in some layer."""
    if "attention" not in model.mixers:
        return False
    options = model.options_of("attention")
    return options.window is None or bool(options.full_layers)


def noise_of_run(rows: Sequence[Row], same_size: Collection[str], misses: Mapping[str, float]) -> Noise:
    """Return the noise of the loss of one run at a size.

    Seeds of the same size come first. Without them two numbers bound it from above, and the smaller one is returned: the noise
    of other sizes, which are smaller and so have more noise, and the scatter of the predictions.

    Args:
        rows: of all rungs.
        same_size: the rungs of this size.
        misses: model -> predicted minus trained loss at one rung of this size.
    """
    of_size, others = _noise_of_seeds([row for row in rows if row.size in same_size]), _noise_of_seeds(rows)
    if not math.isnan(of_size.deviation):
        return of_size
    bounds = [others._replace(source=f"{others.source}, taken as an upper bound, since noise falls with the size")]
    if len(misses) >= FEW_RUNS:
        source = f"the scatter of predicted minus trained loss of {len(misses)} mixers"
        source += ", an upper bound: it also holds the errors of the predictions"
        bounds.append(Noise(statistics.stdev(misses.values()), source))
    return min((bound for bound in bounds if not math.isnan(bound.deviation)), default=others)


def _noise_of_seeds(rows: Sequence[Row]) -> Noise:
    """Return the noise of a run's loss, pooled over the rungs with several seeds.

    The means of every model and every seed are subtracted, since the order of samples of a seed is that of all models.
    """
    squares, freedom, rungs = 0.0, 0, []
    for size in dict.fromkeys(row.size for row in rows):
        of_size = [row.values["loss"] for row in rows if row.size == size and len(row.values["loss"]) > 1]
        seeds = sorted(set[int].intersection(*(set(values) for values in of_size))) if of_size else []
        table = np.array([[values[seed] for seed in seeds] for values in of_size])
        table = table[np.isfinite(table).all(1)] if seeds else table
        if min(table.shape) > 1:
            rest = table - table.mean(0) - table.mean(1, keepdims=True) + table.mean()
            squares, freedom = squares + float((rest**2).sum()), freedom + (table.shape[0] - 1) * (table.shape[1] - 1)
            rungs.append(size)
    source = f"the seeds at {', '.join(rungs)} ({freedom} degrees of freedom)"
    return Noise(math.sqrt(squares / freedom), source) if freedom else Noise(math.nan, "")


def _best(values: Mapping[str, float], error: float) -> list[str]:
    """Return the cells of a purpose. error: standard error of a difference."""
    best, *others = sorted(values, key=lambda label: values[label])
    equal = [label for label in others if values[label] - values[best] <= 2 * error]
    rest = others[len(equal) :]
    shown = ", ".join(equal[:_SHOWN]) + (f" and {len(equal) - _SHOWN} more" if len(equal) > _SHOWN else "")
    written = "" if math.isnan(error) else f" ± {error:.4f}"
    difference = f"{values[rest[0]] - values[best]:+.4f}{written}" if rest else "-"
    return [best, shown or "-", f"{values[best]:.4f}", rest[0] if rest else "-", difference]


def _by_source(here: Sequence[Row]) -> list[list[str]]:
    """Return the row of the mixer that has the lowest loss in most sources."""
    sources = sorted({metric for row in here for metric in row.values if metric.startswith("loss/")})
    with_all = [row for row in here if all(source in row.values for source in sources)]
    if len(sources) < 2 or len(with_all) < 2:
        return []
    firsts = [min(with_all, key=lambda row: row.mean(source)).label for source in sources]
    first, *others = sorted(set(firsts), key=lambda label: (-firsts.count(label), label))
    counts = [f"{firsts.count(label)} of {len(sources)}" for label in (first, *others)]
    after = [others[0], counts[1]] if others else ["-", "-"]
    return [["lowest loss in most sources", first, "-", counts[0], *after]]
