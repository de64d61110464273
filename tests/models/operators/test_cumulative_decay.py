"""Running sums of log decays on two levels."""

from __future__ import annotations

import pytest
import torch

from models.operators.cumulative_decay import decay_from_start, decay_to_end, running_sum


@pytest.mark.parametrize("length", [1, 5, 128, 129, 300])
@pytest.mark.parametrize("dim", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
def test_two_level_sums_equal_one_sum(length: int, dim: int, dtype: torch.dtype) -> None:
    shape = [2, 3, 4]
    shape[dim] = length
    x = torch.randn(shape, dtype=dtype) - 0.5
    expected = x.cumsum(dim)
    torch.testing.assert_close(running_sum(x, dim), expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(decay_from_start(x, dim), expected.exp(), rtol=1e-11, atol=1e-300)
    after = expected.narrow(dim, length - 1, 1) - expected
    torch.testing.assert_close(decay_to_end(x, dim), after.exp(), rtol=1e-11, atol=1e-300)


def test_infinite_decays_give_zeros_with_finite_gradients() -> None:
    x = torch.full((1, 300, 2), -0.1, dtype=torch.float64)
    x[0, 7, 0] = x[0, 130, 1] = -torch.inf
    x.requires_grad_()
    for function, start, end in ((decay_from_start, 7, 300), (decay_to_end, 0, 7)):
        out = function(x, 1)
        assert (out[0, start:end, 0] == 0).all()
        assert (out[0] > 0).sum() > 100
        (gradient,) = torch.autograd.grad(out.square().sum(), x)
        assert gradient.isfinite().all()


def test_long_float32_sums_are_accurate() -> None:
    x = -torch.rand(1, 100000, 1, generator=torch.Generator().manual_seed(0)) * 1e-4
    exact = x.double().cumsum(1).exp()
    error = (decay_from_start(x, 1).double() / exact - 1).abs().max()
    assert error < 5e-7
    assert (running_sum(x, 1).double() - x.double().cumsum(1)).abs().max() < 1e-6
