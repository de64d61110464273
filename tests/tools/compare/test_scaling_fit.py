"""The fit of loss over parameters and tokens, on generated points with known constants."""

from __future__ import annotations

import numpy as np
import pytest

from tools.compare.scaling_fit import ScalingFit, fit_losses, fit_with_common_exponents

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


def test_intervals_hold_new_runs_at_about_the_stated_rate() -> None:
    """Hold about 95 % of the losses of a new run with the same noise; of 200 draws 94 %."""
    draw, held = np.random.default_rng(1), 0
    for _ in range(20):
        noisy = loss(N, D) * np.exp(0.001 * draw.standard_normal(len(N)))
        _, low, high = fit_losses(N, D, noisy, samples=40).predict(4e7, 4e8)
        held += low <= loss(4e7, 4e8) * np.exp(0.001 * draw.standard_normal()) <= high
    assert 17 <= held <= 20


def test_interval_of_a_run_holds_the_noise_of_its_own_loss() -> None:
    values = np.array([np.log(1.0), np.log(0.5), np.log(0.25), 0.3, 0.3])
    exact = ScalingFit((1e7, 1e8), values, np.tile(values, (100, 1)), residuals=np.array([-0.1, 0.1]))
    assert exact.predict(1e7, 1e8) == pytest.approx((1.75, 1.75 * np.exp(-0.1), 1.75 * np.exp(0.1)))
    assert exact.interval(1) == pytest.approx((0.5, 0.5, 0.5)), "the noise is not an error of the fit"


def test_one_diverged_seed_hardly_moves_the_fit() -> None:
    """Keep within 0.04 of the truth, where a least-squares fit would move by 0.37."""
    sizes, tokens = np.tile(N, 3), np.tile(D, 3)
    losses = loss(sizes, tokens)
    losses[7] *= 1.2
    value, _, _ = fit_losses(sizes, tokens, losses, samples=2).predict(4e7, 4e8)
    assert value == pytest.approx(loss(4e7, 4e8), abs=0.04)


def test_noise_of_a_loss_limits_the_prediction() -> None:
    """Predict the ladder's largest size from one run per rung, with noise of 0.2 % of the loss."""
    draw = np.random.default_rng(0)
    noisy = [loss(N, D) * np.exp(0.002 * draw.standard_normal(len(N))) for _ in range(40)]
    errors = [fit_losses(N, D, losses, samples=1).predict(4e7, 4e8)[0] - loss(4e7, 4e8) for losses in noisy]
    assert 0.015 < np.std(errors) < 0.035
    assert abs(np.mean(errors)) < 0.01  # two standard errors are 0.008


@pytest.mark.parametrize(
    ("rungs", "largest", "spread", "best"),
    [
        (RUNGS, (4e7, 4e8), 0.02, "common"),
        ([*RUNGS, (2e7, 40), (4e7, 10), (4e7, 20)], (6e7, 6e8), 0.06, "own"),
    ],
)
def test_the_mean_of_both_fits_is_nearer_to_the_better_one(
    rungs: list[tuple[float, int]], largest: tuple[float, float], spread: float, best: str
) -> None:
    """Predict the largest size of six models whose exponents differ by `spread`, with noise of 0.1 % of each loss."""
    draw = np.random.default_rng(0)
    errors: dict[str, list[float]] = {"common": [], "own": []}
    sizes = np.array([size for size, _ in rungs])
    tokens = np.array([size * ratio for size, ratio in rungs])
    for _ in range(5):
        points, truth = {}, {}
        for model in range(6):
            E, a, b = 1.6 + 0.02 * model, *(center + spread * draw.standard_normal() for center in (0.34, 0.28))
            every = [
                E + 1.0 * (1e7 / n) ** a + 0.8 * (2e8 / d) ** b for n, d in [*zip(sizes, tokens, strict=True), largest]
            ]
            noise = np.exp(0.001 * draw.standard_normal(len(sizes)))
            points[str(model)], truth[str(model)] = (sizes, tokens, np.array(every[:-1]) * noise), every[-1]
        together = fit_with_common_exponents(points, samples=1)
        for model, true in truth.items():
            errors["common"].append(together[model].predict(*largest)[0] - true)
            errors["own"].append(fit_losses(*points[model], samples=1).predict(*largest)[0] - true)
    mean = np.std(np.mean(list(errors.values()), 0))
    deviation = {name: np.std(values) for name, values in errors.items()}
    assert min(deviation, key=lambda name: deviation[name]) == best
    assert mean < 0.9 * np.mean(list(deviation.values()))


def test_common_exponents_of_exact_points_are_recovered() -> None:
    fits = fit_with_common_exponents({"a": (N, D, loss(N, D)), "b": (N[1:], D[1:], loss(N, D)[1:] + 0.1)}, samples=10)
    for name, more in (("a", 0.0), ("b", 0.1)):
        assert fits[name].interval(3) == pytest.approx((0.34,) * 3, rel=1e-3)
        assert fits[name].interval(0) == pytest.approx((1.69 + more,) * 3, rel=1e-3)
        assert fits[name].predict(4e7, 4e8) == pytest.approx((loss(4e7, 4e8) + more,) * 3, abs=1e-4)
    with pytest.raises(ValueError, match="b: 5 different points"):
        fit_with_common_exponents({"a": (N, D, loss(N, D)), "b": (N[:5], D[:5], loss(N, D)[:5])})


@pytest.mark.parametrize(
    ("chosen", "message"),
    [
        (
            slice(0, 5),
            "MetaLA: 5 different points, 2 sizes, 3 token counts; E, A, a, B and b are 5 unknowns, so at least 6",
        ),
        (slice(0, 6), "MetaLA: 6 different points, 2 sizes, 4 token counts"),
        ([], "MetaLA: 0 different points, 0 sizes, 0 token counts"),
        (
            [0],
            "MetaLA: 1 different point, 1 size, 1 token count; E, A, a, B and b are 5 unknowns, so at least 6 points, 3 sizes",
        ),
        ([0, 1, 3, 6, 7], "MetaLA: 5 different points, 3 sizes, 4 token counts"),
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
