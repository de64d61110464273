"""Tune the learning rate of a ladder's sizes: a small comparison of rates, whose result the ladder's recipes take."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Collection, Sequence
from typing import Any

from data.atomic_io import read_json, write_text
from tools.compare.results import read_results
from tools.compare.rungs import Ladder, Tuning
from tools.compare.spec import Comparison, Run
from tools.reporting.runs_page import Section

FILE = "learning_rates.json"
RATES_TITLE = "Learning rates"
_REMEDY = "remove it; --tune writes it again"
# Size -> factor -> model -> loss; None if the run diverged.
Losses = dict[str, dict[str, dict[str, float | None]]]


def tuning_comparison(comparison: Comparison) -> Comparison:
    """Return the comparison of the rates in `ladder.tuning`. A name of its sizes is a size and a factor, such as 600k_2lr.

    Raises ValueError without the section, and for a size without its own rate, also one that is not tried.
    """
    ladder, tuning = _sections(comparison)
    for size in ladder.parameters:
        _rate(comparison, size)
    names = {(size, factor): _name(size, factor) for size in tuning.sizes for factor in tuning.factors}
    update = {
        "parameters": {name: ladder.parameters[size] for (size, _), name in names.items()},
        "tokens_per_parameter": {name: (min(ladder.tokens_per_parameter[size]),) for (size, _), name in names.items()},
        "seeds": {},
        "tuning": None,
    }
    return comparison.model_copy(
        update={
            "name": f"{comparison.name}_tuning",
            "title": f"{comparison.title}: learning rates",
            "sizes": {name: _scaled(comparison, size, factor) for (size, factor), name in names.items()},
            "seeds": comparison.seeds[:1],
            "models": {name: comparison.models[name] for name in tuning.models},
            "ladder": ladder.model_copy(update=update),
        }
    )


def tuned_sizes(comparison: Comparison, sizes: Sequence[str]) -> list[str]:
    """Return the sizes of `tuning_comparison` for `--sizes`, which may also name sizes of the ladder.

    Raises ValueError for a size of the ladder that `ladder.tuning` does not try.
    """
    ladder, tuning = _sections(comparison)
    if missing := [size for size in sizes if size in ladder.parameters and size not in tuning.sizes]:
        raise ValueError(
            f"--tune --sizes {missing[0]}: ladder.tuning.sizes allows {', '.join(tuning.sizes)}; add {missing[0]} to it"
        )
    names = {size: [_name(size, factor) for factor in tuning.factors] for size in tuning.sizes}
    return [name for size in sizes for name in names.get(size, [size])]


def _name(size: str, factor: float) -> str:
    return f"{size}_{factor:g}lr"


def check_rates(runs: Sequence[Run]) -> None:
    """Raise ValueError if a model has one learning rate with two factors. runs: of `tuning_comparison`."""
    known: set[tuple[str, str, int, float]] = set()
    for run in runs:
        size, _ = _size_and_factor(run)
        key = size, run.model, run.seed, run.config.optimizer.lr
        if key in known:
            raise ValueError(
                f"--tune: {run.model} has optimizer.lr = {key[-1]:g} with several factors of {size}: leave the key out of the "
                f"command line and of models.{run.model}, and give factors that differ"
            )
        known.add(key)


def write_rates(comparison: Comparison, runs: Sequence[Run], failed: Collection[str]) -> Section | None:
    """Write the best factor once all runs are complete or failed. Return the table, or None before that.

    comparison: the ladder. runs: all of `tuning_comparison`.
    """
    if not all(run.complete or run.name in failed for run in runs):
        return None
    losses: Losses = {}
    diverged = []
    for run in runs:
        size, factor = _size_and_factor(run)
        final = [result.final["loss"] for result in read_results([run]) if result.final]
        loss = final[0] if final and math.isfinite(final[0]) else None
        losses.setdefault(size, {}).setdefault(factor, {})[run.model] = loss
        diverged += [run.name] if loss is None else []
    factors = next(iter(losses.values()))
    means = {factor: statistics.mean(_mean(of_size[factor]) for of_size in losses.values()) for factor in factors}
    best = min(means, key=lambda factor: means[factor])
    if not math.isfinite(means[best]):
        raise ValueError(
            f"ladder.tuning: with every factor a run failed or diverged ({', '.join(diverged[:3])}; each has a train.log in "
            f"{runs[0].folder.parent}). Remove the cause that the logs name; for diverged runs, lower ladder.tuning.factors"
        )
    rates = {size: _rate(comparison, size) for size in losses}
    content = {"factor": float(best), "rates": rates, "losses": losses}
    write_text(comparison.folder / FILE, json.dumps(content, indent=1) + "\n")
    return rates_table(with_tuned_rates(comparison))


def _size_and_factor(run: Run) -> tuple[str, str]:
    size, _, factor = run.size.rpartition("-")[0].removesuffix("lr").rpartition("_")
    return size, factor


def with_tuned_rates(comparison: Comparison) -> Comparison:
    """Return the comparison with the learning rates that `write_rates` found; unchanged before that.

    Raises ValueError if a rate in `sizes` has changed since.
    """
    path = comparison.folder / FILE
    if comparison.ladder is None or comparison.ladder.tuning is None or not path.is_file():
        return comparison
    saved = _saved(comparison)
    factor = saved["factor"]
    for size, rate in saved.get("rates", {}).items():
        if rate != _rate(comparison, size):
            raise ValueError(
                f"{path}: the factor {factor:g} was measured with sizes.{size}.optimizer.lr = {rate:g}, which is "
                f"{_rate(comparison, size):g} now: {_REMEDY}"
            )
    sizes = {
        size: _scaled(comparison, size, factor) if size in comparison.ladder.parameters else tree
        for size, tree in comparison.sizes.items()
    }
    return comparison.model_copy(update={"sizes": sizes})


def rates_table(comparison: Comparison) -> Section:
    """Return the losses of every rate; without rows before `write_rates`. comparison: a ladder, from `with_tuned_rates`."""
    path = comparison.folder / FILE
    if not path.is_file():
        return Section(
            RATES_TITLE, [], [], "The rates are those of `sizes` in the file, not tuned. `--tune` tries others first."
        )
    ladder, tuning = _sections(comparison)
    saved = _saved(comparison)
    losses: Losses = saved["losses"]
    rows = []
    for size, of_size in losses.items():
        for factor, of_factor in of_size.items():
            mark = "chosen" if float(factor) == saved["factor"] else ""
            cells = ["-" if loss is None else f"{loss:.4f}" for loss in of_factor.values()]
            rate = _rate(comparison, size) / saved["factor"] * float(factor)
            mean = f"{_mean(of_factor):.4f}" if math.isfinite(_mean(of_factor)) else "-"
            rows.append([size, f"{rate:.3g}", mean, *cells, mark])
    models = next(iter(next(iter(losses.values())).values()))
    labels = [model.label or name if (model := comparison.models.get(name)) else name for name in models]
    note = "One factor scales the rates of all sizes, that with the lowest mean loss of all models and sizes, measured at the "
    note += "fewest tokens per parameter." + _worse_than_own(losses, saved["factor"], labels)
    rates = ", ".join(f"{size} {_rate(comparison, size):.3g}" for size in ladder.parameters)
    note += f" Rates: {rates}."
    note += _remedies(losses, saved["factor"])
    if _tried(losses) != (set(tuning.sizes), set(tuning.models), {float(f"{factor:g}") for factor in tuning.factors}):
        note += " `ladder.tuning` has other sizes, models or factors now: give `--tune` again."
    return Section(RATES_TITLE, ["size", "learning rate", "mean loss", *labels, ""], rows, note)


def _remedies(losses: Losses, best: float) -> str:
    """Return a sentence if the best factor is at an end of the grid, and one if the sizes have different best factors."""
    _, _, factors = _tried(losses)
    note = ""
    for end, side in ((min(factors), "lower"), (max(factors), "higher")):
        if best == end:
            note += f" The best factor is at the {side} end of the grid: add a {side} one to `ladder.tuning.factors`."
    of_sizes = {size: min(of_size, key=lambda factor: _mean(of_size[factor])) for size, of_size in losses.items()}
    if len(set(of_sizes.values())) > 1:
        words = ", ".join(f"{size} {factor}" for size, factor in of_sizes.items())
        note += f" The sizes alone have different best factors ({words}): add a larger size to `ladder.tuning.sizes`."
    return note


def _tried(losses: Losses) -> tuple[set[str], set[str], set[float]]:
    """Return the sizes, models and factors that were tried."""
    factors = next(iter(losses.values()))
    return set(losses), set(next(iter(factors.values()))), {float(factor) for factor in factors}


def _worse_than_own(losses: Losses, best: float, labels: Sequence[str]) -> str:
    """Return a sentence per tuned size on the models whose own best rate is another one."""
    note = ""
    for size, of_size in losses.items():
        chosen = next(of_factor for factor, of_factor in of_size.items() if float(factor) == best)
        words = []
        for model, label in zip(chosen, labels, strict=True):
            finite = [loss for of_factor in of_size.values() if (loss := of_factor.get(model)) is not None]
            if finite and (loss := chosen[model]) is not None and loss > min(finite):
                words.append(f"{label} +{loss - min(finite):.4f}")
        note += f" {size}: loss above that of the model's own best rate: {', '.join(words)}." if words else ""
    return note


def _sections(comparison: Comparison) -> tuple[Ladder, Tuning]:
    ladder = comparison.ladder
    if ladder is None or ladder.tuning is None:
        raise ValueError(
            f"--tune: {comparison.name} has no section ladder.tuning; give its sizes, models and factors "
            "(docs/guide/comparing.md)"
        )
    return ladder, ladder.tuning


def _saved(comparison: Comparison) -> dict[str, Any]:
    """Return what `write_rates` wrote. Raises ValueError for a size that is not one of the ladder."""
    path, (ladder, _) = comparison.folder / FILE, _sections(comparison)
    content = read_json(path, _REMEDY, "factor", "losses")
    factor, losses = content["factor"], content["losses"]
    if isinstance(factor, bool) or not isinstance(factor, int | float) or not 0 < factor < math.inf:
        raise ValueError(f"{path} has the factor {factor!r}; a number > 0 is allowed: {_REMEDY}")
    if not isinstance(losses, dict) or not losses:
        raise ValueError(f"{path} holds no losses of sizes: {_REMEDY}")
    if unknown := sorted(content["losses"].keys() - ladder.parameters.keys()):
        raise ValueError(f"{path} has the size {unknown[0]}, which ladder.parameters lacks: {_REMEDY}")
    return content


def _rate(comparison: Comparison, size: str) -> float:
    section = comparison.sizes[size].get("optimizer")
    rate = section.get("lr") if isinstance(section, dict) else None
    if rate is None:
        raise ValueError(f"ladder.tuning scales sizes.{size}.optimizer.lr, which is missing: give a rate")
    if isinstance(rate, bool) or not isinstance(rate, int | float) or not 0 < rate < math.inf:
        raise ValueError(f"ladder.tuning scales sizes.{size}.optimizer.lr = {rate}: a number > 0 is allowed")
    return float(rate)


def _scaled(comparison: Comparison, size: str, factor: float) -> dict[str, Any]:
    """Return the keys of a size with its rate times a factor."""
    tree = comparison.sizes[size]
    return {**tree, "optimizer": {**tree.get("optimizer", {}), "lr": float(f"{factor * _rate(comparison, size):.4g}")}}


def _mean(losses: dict[str, float | None]) -> float:
    return statistics.mean(math.inf if loss is None else loss for loss in losses.values())
