"""Fit the loss as a function of parameters and tokens: L(N, D) = E + A / N^a + B / D^b.

The fit minimises Huber's loss of the differences of log L, as approach 3 of Chinchilla (Hoffmann et al., 2203.15556).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.optimize import nnls
from scipy.stats import norm, t

from megatron_lite.plural import counted

_UNKNOWNS = 5
# Of log L. With the paper's 1e-3, a fit of about ten runs passes through five of them exactly.
_HUBER = 1e-2
_EXPONENTS = (0.1, 0.2, 0.35, 0.5, 0.7, 1.0)  # starts of a and b
_LOWEST = -12.0  # of the logarithm of a term, far below the noise of a loss
EXPONENT_BOUNDS = (0.01, 2.0)
_BOUNDS = tuple([scale] * 3 + [exponent] * 2 for scale, exponent in zip((_LOWEST, 3.0), EXPONENT_BOUNDS, strict=True))
_ITERATIONS = 300
# Parameters, tokens and losses of runs.
Points = tuple[ArrayLike, ArrayLike, ArrayLike]


@dataclass(frozen=True)
class ScalingFit:
    """Hold a fit and its bootstrap samples.

    Attributes:
        center: geometric means N0 and D0 of N and D. The terms of the fit are A (N0 / N)^a and B (D0 / D)^b.
        values: log E, log A, log B, a, b; shape [5].
        samples: `values` of every bootstrap sample, [samples, 5].
        residuals: measured minus fitted log L of all points, scaled up for the unknowns and for few points (Student's t).
    """

    center: tuple[float, float]
    values: NDArray[np.float64]
    samples: NDArray[np.float64]
    residuals: NDArray[np.float64]

    def predict(self, parameters: float, tokens: float) -> tuple[float, float, float]:
        """Return the loss of a run and its 95 % interval, which covers the errors of the fit and of one run."""
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
    """Fit runs of one model; see `fit_with_common_exponents`. parameters, tokens, losses: one value per run."""
    return fit_with_common_exponents({name: (parameters, tokens, losses)}, samples=samples)[name]


def fit_with_common_exponents(points: Mapping[str, Points], *, samples: int = 200) -> dict[str, ScalingFit]:
    """Fit several models with the same exponents a and b, and their own E, A and B.

    For models of nearly equal exponents, predictions have less error than those of separate fits (docs/guide/comparing.md).
    The bootstrap resamples residuals, because few resampled points do not determine the unknowns.

    Args:
        points: model -> its points.
        samples: number of bootstrap samples.

    Raises:
        ValueError: a model with too few different points, sizes or token counts, or with a loss that is not a finite positive
            number.
    """
    arrays = [np.array([np.asarray(values, np.float64) for values in of_model]) for of_model in points.values()]
    for name, (N, D, L) in zip(points, arrays, strict=True):
        check_points(name, N, D, L)
    model = np.repeat(np.arange(len(arrays)), [array.shape[1] for array in arrays])
    N, D, L = np.concatenate(arrays, 1)
    center = (float(np.exp(np.log(N).mean())), float(np.exp(np.log(D).mean())))
    n, d, target = np.log(N / center[0]), np.log(D / center[1]), np.log(L)
    cost, unknowns = _refined(_starts(model, n, d, L), model, n, d, target)
    best = unknowns[cost.argmin()]
    predicted = _log_loss(_values_of(best)[model], n, d)
    degrees_of_freedom = len(L) - len(best)
    widening = np.sqrt(len(L) / degrees_of_freedom) * t.ppf(0.975, degrees_of_freedom) / norm.ppf(0.975)
    residuals = (target - predicted) * widening
    draws = predicted + np.random.default_rng(0).choice(residuals, (samples, len(L)))
    refits = _values_of(_refined(np.tile(best, (samples, 1)), model, n, d, draws)[1])
    values = _values_of(best)
    return {name: ScalingFit(center, values[k], refits[:, k], residuals) for k, name in enumerate(points)}


def check_points(name: str, N: NDArray[np.float64], D: NDArray[np.float64], L: NDArray[np.float64]) -> None:
    """Raise ValueError as `fit_with_common_exponents`. N, D, L: parameters, tokens and losses of the runs of one model."""
    if not (np.isfinite(L) & (L > 0)).all():
        raise ValueError(
            f"{name}: the loss {L[~(np.isfinite(L) & (L > 0))][0]} cannot be fitted; leave diverged runs out"
        )
    # Sizes and token counts within 2 % are the same rung of a ladder.
    sizes, counts = _distinct(N), _distinct(D)
    points = len({(round(np.log(n) * 40), round(np.log(d) * 40)) for n, d in zip(N, D, strict=True)})
    if points <= _UNKNOWNS or sizes < 3 or counts < 3:
        raise ValueError(
            f"{name}: {counted(points, 'different point')}, {counted(sizes, 'size')}, {counted(counts, 'token count')}; E, A, a, "
            f"B and b are {_UNKNOWNS} unknowns, so at least {_UNKNOWNS + 1} points, 3 sizes and 3 token counts are needed. Train "
            "more rungs"
        )


def _distinct(values: NDArray[np.float64]) -> int:
    """Return the number of values that differ by more than 2 %."""
    return min(1, len(values)) + int((np.diff(np.sort(np.log(values))) > 0.02).sum())


def _values_of(unknowns: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return log E, log A, log B, a, b of every model, [..., models, 5], from the three of each model and the exponents."""
    own = unknowns[..., :-2].reshape(*unknowns.shape[:-1], -1, 3)
    exponents = np.broadcast_to(unknowns[..., None, -2:], (*own.shape[:-1], 2))
    return np.concatenate([own, exponents], -1)


def _log_loss(values: NDArray[np.float64], n: ArrayLike, d: ArrayLike) -> NDArray[np.float64]:
    """Return log L. values: [..., 5]; n, d: log N / N0 and log D / D0."""
    E, A, B, a, b = np.moveaxis(values, -1, 0)
    return np.logaddexp(np.logaddexp(E, A - a * n), B - b * d)


def _starts(
    model: NDArray[np.int64], n: NDArray[np.float64], d: NDArray[np.float64], L: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Return the best starts on a grid of exponents, for which E, A and B follow by linear least squares."""
    starts = []
    for a in _EXPONENTS:
        for b in _EXPONENTS:
            terms = np.stack([np.ones_like(L), np.exp(-a * n), np.exp(-b * d)], 1) / L[:, None]
            fits = [nnls(terms[model == k], np.ones(int((model == k).sum()))) for k in range(model.max() + 1)]
            scales = np.maximum([scale for scale, _ in fits], np.exp(_LOWEST + 1))
            starts.append((sum(error**2 for _, error in fits), [*np.log(scales).ravel(), a, b]))
    return np.array([start for _, start in sorted(starts, key=lambda pair: pair[0])[:4]])


def _refined(
    starts: NDArray[np.float64],
    model: NDArray[np.int64],
    n: NDArray[np.float64],
    d: NDArray[np.float64],
    target: NDArray[np.float64],
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the lowest costs near several starts, [starts], and their unknowns, [starts, unknowns].

    Levenberg-Marquardt steps with the weights of Huber's loss, for all starts at once. target: [points], or one row per start.
    """
    models = model.max() + 1
    low, high = (np.concatenate([np.tile(bound[:3], models), bound[3:]]) for bound in _BOUNDS)
    identity = np.eye(len(low))

    def difference(x: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        residual = _log_loss(_values_of(x)[:, model], n, d) - target
        size = np.abs(residual)
        return residual, np.where(size <= _HUBER, size**2 / 2, _HUBER * (size - _HUBER / 2)).sum(1)

    x, damping = np.clip(starts, low, high), np.full(len(starts), 1e-3)
    residual, cost = difference(x)
    for _ in range(_ITERATIONS):
        slopes = _slopes(_values_of(x)[:, model], model, n, d)
        weighted = slopes * np.minimum(1, _HUBER / np.maximum(np.abs(residual), 1e-300))[..., None]
        gradient = np.einsum("spu,sp->su", weighted, residual)
        # An unknown at its bound stays there while the cost falls beyond it.
        free = ~((x <= low) & (gradient > 0) | (x >= high) & (gradient < 0))
        curvature = (weighted.mT @ slopes) * free[:, :, None] * free[:, None, :]
        scale = damping[:, None] * (np.einsum("suu->su", curvature) + 1e-9) + ~free
        step = -np.linalg.solve(curvature + scale[:, :, None] * identity, (gradient * free)[..., None])[..., 0]
        moved = np.clip(x + step, low, high)
        new_residual, new_cost = difference(moved)
        better = new_cost < cost
        done = (np.abs(moved - x).max(1) < 1e-8) | (damping > 1e9)
        x, residual = np.where(better[:, None], moved, x), np.where(better[:, None], new_residual, residual)
        cost, damping = np.minimum(new_cost, cost), np.maximum(np.where(better, damping / 3, damping * 4), 1e-12)
        if done.all():
            break
    return cost, x


def _slopes(
    values: NDArray[np.float64], model: NDArray[np.int64], n: NDArray[np.float64], d: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Return the derivatives of log L by the unknowns, [starts, points, unknowns]. values: [starts, points, 5]."""
    E, A, B, a, b = np.moveaxis(values, -1, 0)
    total = _log_loss(values, n, d)
    e, x, y = np.exp(E - total), np.exp(A - a * n - total), np.exp(B - b * d - total)
    matrix = np.zeros((*total.shape, 3 * (model.max() + 1) + 2))
    points = np.arange(len(n))
    for index, slope in enumerate((e, x, y)):
        matrix[:, points, 3 * model + index] = slope
    matrix[..., -2], matrix[..., -1] = -n * x, -d * y
    return matrix
