"""Predict the losses of a ladder's largest size from the smaller ones, and store them before a run of that size is complete."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime

import numpy as np
from pydantic import TypeAdapter, ValidationError

from data.atomic_io import read_json, write_text
from tools.compare.results import Result, read_results
from tools.compare.rungs import Ladder
from tools.compare.scaling_fit import Points, ScalingFit, check_points, fit_losses, fit_with_common_exponents
from tools.compare.spec import Comparison, Run

FILE = "predictions.json"


@dataclass(frozen=True)
class Prediction:
    """Hold the predicted losses of a rung, of two fits.

    Attributes:
        loss, low, high: with common exponents, and the 95 % interval of one run.
        own: with the model's own exponents.
        runs: number of runs of the model in the fit.
        stored: UTC time of the prediction; "" if it is not stored.
    """

    loss: float
    low: float
    high: float
    own: float
    runs: int
    stored: str = ""

    @property
    def mean(self) -> tuple[float, float, float]:
        """Return the prediction, the mean of both losses, and its interval, moved from that of common exponents.

        Its error is the least, or near it (docs/guide/comparing.md).
        """
        shift = (self.own - self.loss) / 2
        return self.loss + shift, self.low + shift, self.high + shift


# Model -> rung of the largest size -> prediction.
Predictions = dict[str, dict[str, Prediction]]
# Why a fit is not possible -> the models without one.
Reasons = dict[str, list[str]]


def store_predictions(
    comparison: Comparison,
    ladder: Ladder,
    runs: Sequence[Run],
    failed: Collection[str] = (),
    every: Sequence[Run] = (),
) -> None:
    """Write the predictions that are not stored yet, once all smaller runs are complete or failed.

    A stored prediction is never changed. A model gets none after a run of its largest size is complete.
    every: all runs of the comparison, also those that this launch does not train.
    """
    stored = stored_predictions(comparison)
    largest = [run for run in runs if ladder.is_largest(run.size)]
    late = {run.model for run in (*runs, *every) if ladder.is_largest(run.size) and run.complete}
    wanted = [run for run in largest if run.model not in late and run.size not in stored.get(run.model, {})]
    smaller = [run for run in runs if not ladder.is_largest(run.size)]
    if not wanted or not all(run.complete or run.name in failed for run in smaller):
        return
    now = datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S")
    new = predict(ladder, wanted, read_results(smaller), now)[0]
    if new:
        content = {
            model: {rung: asdict(value) for rung, value in of_model.items()}
            for model, of_model in merge_predictions(new, stored).items()
        }
        write_text(comparison.folder / FILE, json.dumps({"models": content}, indent=1) + "\n")


def stored_predictions(comparison: Comparison) -> Predictions:
    """Return the predictions that `store_predictions` wrote; empty without any."""
    path = comparison.folder / FILE
    if not path.is_file():
        return {}
    remedy = "remove it; predictions are then computed after the training"
    models = read_json(path, remedy, "models")["models"]
    try:
        return TypeAdapter(Predictions).validate_python(models)
    except ValidationError as error:
        place = ".".join(map(str, error.errors()[0]["loc"]))
        raise ValueError(
            f"{path} holds no prediction at models.{place} ({error.errors()[0]['msg']}): {remedy}"
        ) from error


def merge_predictions(computed: Predictions, stored: Predictions) -> Predictions:
    """Return the predictions of both. A stored one has precedence."""
    return {model: {**computed.get(model, {}), **stored.get(model, {})} for model in {**stored, **computed}}


def predict(
    ladder: Ladder, largest: Sequence[Run], results: Sequence[Result], stored: str = ""
) -> tuple[Predictions, Reasons]:
    """Return the predictions of runs of the largest size, and why other models have none.

    results: of any sizes; those of the largest size are left out. stored: see `Prediction`.
    """
    points = points_of([result for result in results if not ladder.is_largest(result.run.size)])
    separate_fits, reasons = fits_of(points, samples=1)
    usable = {model: points[model] for model in separate_fits}
    common = fit_with_common_exponents(usable) if len(usable) > 1 else fits_of(usable)[0]
    predictions: Predictions = {}
    for run in largest:
        if run.model in common:
            tokens = run.config.batch.tokens_of(run.config.schedule.train_steps)
            loss, low, high = common[run.model].predict(run.body, tokens)
            separate = separate_fits[run.model].predict(run.body, tokens)[0]
            count = len(np.asarray(points[run.model][2]))
            predictions.setdefault(run.model, {})[run.size] = Prediction(loss, low, high, separate, count, stored)
    return predictions, reasons


def too_few_points(ladder: Ladder, runs: Sequence[Run]) -> str:
    """Return why a plan cannot predict the loss of the largest size, or "". runs: of all sizes."""
    smaller = [run for run in runs if run.model == runs[0].model and not ladder.is_largest(run.size)]
    tokens = [run.config.batch.tokens_of(run.config.schedule.train_steps) for run in smaller]
    points = np.array([[run.body for run in smaller], tokens, [1] * len(smaller)], np.float64)
    try:
        check_points(f"No prediction of {ladder.largest} is possible", *points)
    except ValueError as error:
        return f"{error}."
    return ""


def points_of(results: Sequence[Result]) -> dict[str, Points]:
    """Return model -> parameters, tokens and losses of its complete runs, without the unstable ones."""
    points: dict[str, list[tuple[float, float, float]]] = {}
    for result in results:
        of_model = points.setdefault(result.run.model, [])
        if result.final and math.isfinite(result.final["loss"]) and not result.unstable:
            of_model.append((result.run.body, result.tokens, result.final["loss"]))
    return {model: (*np.array(of_model or np.zeros((0, 3))).T,) for model, of_model in points.items()}


def fits_of(points: Mapping[str, Points], *, samples: int = 200) -> tuple[dict[str, ScalingFit], Reasons]:
    """Return model -> fit, and why other models have none."""
    fits: dict[str, ScalingFit] = {}
    reasons: Reasons = {}
    for model, of_model in points.items():
        try:
            fits[model] = fit_losses(*of_model, samples=samples, name=model)
        except ValueError as error:
            reasons.setdefault(str(error).removeprefix(f"{model}: "), []).append(model)
    return fits, reasons
