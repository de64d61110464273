"""The fit of loss over parameters and tokens, on generated points with known constants."""

from __future__ import annotations

import numpy as np
import pytest

from tools.compare.scaling_fit import fit_losses

RUNGS = [(5e6, r) for r in (10, 20, 40)] + [(1e7, r) for r in (10, 20, 40)] + [(2e7, 10), (2e7, 20)]
N = np.array([size for size, _ in RUNGS])
D = np.array([size * ratio for size, ratio in RUNGS])


def loss(N, D):
    """Return the loss of approach 3 of Chinchilla, with the paper's constants."""
    return 1.69 + 406.4 / N**0.34 + 410.7 / D**0.28


def test_constants_of_exact_points_are_recovered() -> None:
    fit = fit_losses(N, D, loss(N, D), samples=20)
    n, d = fit.center
    expected = [1.69, 406.4 / n**0.34, 410.7 / d**0.28, 0.34, 0.28]
    for index, value in enumerate(expected):
        assert fit.interval(index) == pytest.approx((value,) * 3, rel=1e-4)
    assert fit.predict(4e7, 4e8) == pytest.approx((loss(4e7, 4e8),) * 3, abs=1e-4)


def test_intervals_hold_the_true_loss_of_noisy_points() -> None:
    draw = np.random.default_rng(0)
    sizes, tokens = np.tile(N, 3), np.tile(D, 3)
    noisy = loss(sizes, tokens) * np.exp(0.002 * draw.standard_normal(len(sizes)))
    fit = fit_losses(sizes, tokens, noisy, samples=60)
    value, low, high = fit.predict(4e7, 4e8)
    assert low < loss(4e7, 4e8) < high
    assert low < value < high
    assert high - low < 0.1
    low, high = fit.interval(0)[1:]
    assert low < 1.69 < high
    again = fit_losses(sizes, tokens, noisy, samples=60)
    assert again.predict(4e7, 4e8) == fit.predict(4e7, 4e8)


def test_one_diverged_seed_hardly_moves_the_fit() -> None:
    """Keep within 0.04 of the truth, where a least-squares fit would move by 0.37."""
    sizes, tokens = np.tile(N, 3), np.tile(D, 3)
    losses = loss(sizes, tokens)
    losses[7] *= 1.2
    value, _, _ = fit_losses(sizes, tokens, losses, samples=2).predict(4e7, 4e8)
    assert value == pytest.approx(loss(4e7, 4e8), abs=0.04)


def test_noise_of_a_loss_limits_the_prediction() -> None:
    """Predict the ladder's largest size from one run per rung, with noise of 0.2 % of the loss (docs/guide/comparing.md)."""
    draw = np.random.default_rng(0)
    noisy = [loss(N, D) * np.exp(0.002 * draw.standard_normal(len(N))) for _ in range(60)]
    errors = [fit_losses(N, D, losses, samples=1).predict(4e7, 4e8)[0] - loss(4e7, 4e8) for losses in noisy]
    assert 0.015 < np.std(errors) < 0.035
    assert abs(np.mean(errors)) < 0.01  # two standard errors are 0.0064


@pytest.mark.parametrize(
    ("chosen", "message"),
    [
        (
            slice(0, 5),
            "MetaLA: 5 different points, 2 sizes, 3 token counts; E, A, a, B and b are 5 unknowns, so at least 6",
        ),
        (slice(0, 6), "MetaLA: 6 different points, 2 sizes, 4 token counts"),
        ([], "MetaLA: 0 different points, 0 sizes, 0 token counts"),
        ([0, 0, 0, 0, 3, 6], "MetaLA: 3 different points, 3 sizes, 3 token counts"),
    ],
)
def test_too_few_points_are_refused(chosen, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        fit_losses(N[chosen], D[chosen], loss(N, D)[chosen], name="MetaLA")


def test_diverged_runs_are_refused() -> None:
    losses = loss(N, D)
    losses[2] = np.nan
    with pytest.raises(ValueError, match="the fit: the loss nan cannot be fitted; leave diverged runs out"):
        fit_losses(N, D, losses)
