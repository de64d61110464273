"""Fit the loss as a function of parameters and tokens: L(N, D) = E + A / N^a + B / D^b.

The fit minimises Huber's loss of the differences of log L, as approach 3 of Chinchilla (Hoffmann et al., 2203.15556).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.optimize import least_squares, nnls
from scipy.stats import norm, t

UNKNOWNS = 5
# Of log L. The paper's 1e-3 suits hundreds of runs; with about ten it passes through five of them exactly.
_HUBER = 1e-2
_EXPONENTS = (0.1, 0.2, 0.35, 0.5, 0.7, 1.0)  # starts of a and b
_LOWEST = -12.0  # of the logarithm of a term, far below the noise of a loss
_BOUNDS = ([_LOWEST, _LOWEST, _LOWEST, 0.01, 0.01], [3.0, 3.0, 3.0, 2.0, 2.0])


@dataclass(frozen=True)
class ScalingFit:
    """Hold a fit and its bootstrap samples.

    Attributes:
        center: geometric means of N and D. A and B are the terms there: A (N0 / N)^a and B (D0 / D)^b.
        values: log E, log A, log B, a, b; shape [5].
        samples: the same of every bootstrap sample, [samples, 5].
        residuals: log L of the points minus that of the fit, widened for the unknowns and, with Student's t, for few points.
    """

    center: tuple[float, float]
    values: NDArray[np.float64]
    samples: NDArray[np.float64]
    residuals: NDArray[np.float64]

    def predict(self, parameters: float, tokens: float) -> tuple[float, float, float]:
        """Return the loss of a run and the 95 % interval, which holds the errors of the fit and of one run."""
        n, d = np.log(parameters / self.center[0]), np.log(tokens / self.center[1])
        draws = _log_loss(self.samples, n, d) + np.random.default_rng(0).choice(self.residuals, len(self.samples))
        low, high = np.exp(np.quantile(draws, [0.025, 0.975]))
        return float(np.exp(_log_loss(self.values, n, d))), float(low), float(high)

    def interval(self, index: int) -> tuple[float, float, float]:
        """Return the value and 95 % interval of E (0), A (1), B (2), a (3) or b (4)."""
        low, high = np.quantile(self.samples[:, index], [0.025, 0.975])
        values = np.array([self.values[index], low, high])
        value, low, high = np.exp(values) if index < 3 else values
        return float(value), float(low), float(high)


def fit_losses(
    parameters: ArrayLike, tokens: ArrayLike, losses: ArrayLike, *, samples: int = 200, name: str = "the fit"
) -> ScalingFit:
    """Fit runs. parameters, tokens, losses: one value per run. samples: number of bootstrap samples.

    The bootstrap resamples residuals: with few points, resampled points would not determine the unknowns.

    Raises:
        ValueError: too few different points, sizes or token counts, or a loss that is not a finite positive number.
    """
    N, D, L = (np.asarray(values, np.float64) for values in (parameters, tokens, losses))
    if not (np.isfinite(L) & (L > 0)).all():
        raise ValueError(
            f"{name}: the loss {L[~(np.isfinite(L) & (L > 0))][0]} cannot be fitted; leave diverged runs out"
        )
    # Sizes and token counts within 2 % are the same rung of a ladder.
    sizes, counts = _distinct(N), _distinct(D)
    points = len({(round(np.log(n) * 40), round(np.log(d) * 40)) for n, d in zip(N, D, strict=True)})
    if points <= UNKNOWNS or sizes < 3 or counts < 3:
        raise ValueError(
            f"{name}: {points} different points, {sizes} sizes, {counts} token counts; E, A, a, B and b are {UNKNOWNS} unknowns,"
            f" so at least {UNKNOWNS + 1} points, 3 sizes and 3 token counts are needed. Train more rungs"
        )
    center = (float(np.exp(np.log(N).mean())), float(np.exp(np.log(D).mean())))
    n, d, target = np.log(N / center[0]), np.log(D / center[1]), np.log(L)
    values = min((_refined(start, n, d, target) for start in _starts(n, d, L)), key=lambda fit: fit[0])[1]
    predicted = _log_loss(values, n, d)
    freedom = len(L) - UNKNOWNS
    residuals = (target - predicted) * np.sqrt(len(L) / freedom) * t.ppf(0.975, freedom) / norm.ppf(0.975)
    draw = np.random.default_rng(0)
    refits = [_refined(values, n, d, predicted + draw.choice(residuals, len(L)))[1] for _ in range(samples)]
    return ScalingFit(center, values, np.array(refits), residuals)


# Parameters, tokens and losses of runs.
Points = tuple[ArrayLike, ArrayLike, ArrayLike]


def fit_with_common_exponents(points: Mapping[str, Points], *, samples: int = 100) -> dict[str, ScalingFit]:
    """Fit several models with the same exponents a and b, and their own E, A and B.

    Models of nearly equal exponents predict with 0.5 to 0.7 of the error of separate fits (docs/guide/comparing.md).

    Args:
        points: of every model. Each fulfils the conditions of `fit_losses`.
        samples: number of bootstrap samples; they resample the residuals of all models.

    Raises ValueError as `fit_losses`.
    """
    names = list(points)
    single = [fit_losses(*of_model, samples=1, name=name) for name, of_model in points.items()]
    model = np.repeat(np.arange(len(names)), [len(np.asarray(of_model[2])) for of_model in points.values()])
    N, D, L = (np.concatenate([np.asarray(of[i], np.float64) for of in points.values()]) for i in range(3))
    center = (float(np.exp(np.log(N).mean())), float(np.exp(np.log(D).mean())))
    n, d, target = np.log(N / center[0]), np.log(D / center[1]), np.log(L)
    exponents = [tuple(np.median([fit.values[3:] for fit in single], 0))]
    exponents += [(a, b) for a in _EXPONENTS[1:5:2] for b in _EXPONENTS[1:5:2]]
    starts = [_start_together(a, b, model, n, d, L) for a, b in exponents]
    unknowns = min((_refined_together(start, model, n, d, target) for start in starts), key=lambda fit: fit[0])[1]
    predicted = _log_loss(_values_of(unknowns)[model], n, d)
    freedom = len(L) - len(unknowns)
    residuals = (target - predicted) * np.sqrt(len(L) / freedom) * t.ppf(0.975, freedom) / norm.ppf(0.975)
    draw = np.random.default_rng(0)
    refits = np.array(
        [
            _values_of(_refined_together(unknowns, model, n, d, predicted + draw.choice(residuals, len(L)))[1])
            for _ in range(samples)
        ]
    )
    values = _values_of(unknowns)
    return {name: ScalingFit(center, values[k], refits[:, k], residuals) for k, name in enumerate(names)}


def _values_of(unknowns: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return log E, log A, log B, a, b of every model, [models, 5], from the three of each model and the common exponents."""
    own = unknowns[:-2].reshape(-1, 3)
    return np.concatenate([own, np.broadcast_to(unknowns[-2:], (len(own), 2))], 1)


def _start_together(
    a: float, b: float, model: NDArray[np.int64], n: NDArray[np.float64], d: NDArray[np.float64], L: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Return the unknowns of all models for two exponents."""
    own = [_linear_terms(a, b, n[model == k], d[model == k], L[model == k])[1] for k in range(model.max() + 1)]
    return np.concatenate([*own, [a, b]])


def _refined_together(
    start: NDArray[np.float64],
    model: NDArray[np.int64],
    n: NDArray[np.float64],
    d: NDArray[np.float64],
    target: NDArray[np.float64],
) -> tuple[float, NDArray[np.float64]]:
    """Return the lowest cost near a start of all models, and its unknowns."""
    rows, models = np.arange(len(n)), (len(start) - 2) // 3
    low, high = (np.concatenate([np.tile(bound[:3], models), bound[3:]]) for bound in _BOUNDS)

    def difference(unknowns: NDArray[np.float64]) -> NDArray[np.float64]:
        return _log_loss(_values_of(unknowns)[model], n, d) - target

    def slopes(unknowns: NDArray[np.float64]) -> NDArray[np.float64]:
        by_value = _slopes(_values_of(unknowns)[model], n, d)
        matrix = np.zeros((len(n), len(unknowns)))
        for index in range(3):
            matrix[rows, 3 * model + index] = by_value[:, index]
        matrix[:, -2:] = by_value[:, 3:]
        return matrix

    result = least_squares(
        difference,
        np.clip(start, low, high),
        jac=slopes,
        bounds=(low, high),
        loss="huber",
        f_scale=_HUBER,
        max_nfev=300,
    )
    return float(result.cost), result.x


def _distinct(values: NDArray[np.float64]) -> int:
    """Return the number of values that differ by more than 2 %."""
    return min(1, len(values)) + int((np.diff(np.sort(np.log(values))) > 0.02).sum())


def _log_loss(values: NDArray[np.float64], n: ArrayLike, d: ArrayLike) -> NDArray[np.float64]:
    """Return log L. values: [..., 5]; n, d: log N / N0 and log D / D0."""
    E, A, B, a, b = np.moveaxis(values, -1, 0)
    return np.logaddexp(np.logaddexp(E, A - a * n), B - b * d)


def _starts(n: NDArray[np.float64], d: NDArray[np.float64], L: NDArray[np.float64]) -> list[NDArray[np.float64]]:
    """Return the best starts on a grid of exponents, for which E, A and B follow by linear least squares."""
    starts = []
    for a in _EXPONENTS:
        for b in _EXPONENTS:
            error, terms = _linear_terms(a, b, n, d, L)
            starts.append((error, np.array([*terms, a, b])))
    return [start for _, start in sorted(starts, key=lambda pair: pair[0])[:4]]


def _linear_terms(
    a: float, b: float, n: NDArray[np.float64], d: NDArray[np.float64], L: NDArray[np.float64]
) -> tuple[float, NDArray[np.float64]]:
    """Return the error and log E, log A, log B of the linear least squares that two exponents leave."""
    terms = np.stack([np.ones_like(L), np.exp(-a * n), np.exp(-b * d)], 1)
    scale, error = nnls(terms / L[:, None], np.ones_like(L))
    return error, np.log(np.maximum(scale, np.exp(_LOWEST + 1)))


def _slopes(values: NDArray[np.float64], n: NDArray[np.float64], d: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the derivatives of log L by the five values, [points, 5]."""
    E, A, B, a, b = np.moveaxis(values, -1, 0)
    total = _log_loss(values, n, d)
    e, x, y = np.exp(E - total), np.exp(A - a * n - total), np.exp(B - b * d - total)
    return np.stack([e, x, y, -n * x, -d * y], 1)


def _refined(
    start: NDArray[np.float64], n: NDArray[np.float64], d: NDArray[np.float64], target: NDArray[np.float64]
) -> tuple[float, NDArray[np.float64]]:
    """Return the lowest cost near a start, and its values."""

    def difference(values: NDArray[np.float64]) -> NDArray[np.float64]:
        return _log_loss(values, n, d) - target

    result = least_squares(
        difference,
        np.clip(start, *_BOUNDS),
        jac=lambda values: _slopes(values, n, d),
        bounds=_BOUNDS,
        loss="huber",
        f_scale=_HUBER,
        max_nfev=300,
    )
    return float(result.cost), result.x
