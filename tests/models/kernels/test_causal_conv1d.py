"""The convolution's kernels against torch's convolution, with and without history."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.models.kernels.conftest import apart


def reference(before: Tensor, x: Tensor, weight: Tensor, silu: bool) -> Tensor:
    padded = torch.cat([before, x], 1).transpose(1, 2)
    y = F.conv1d(padded, weight.unsqueeze(1), groups=len(weight)).transpose(1, 2)
    return F.silu(y) if silu else y


@pytest.mark.parametrize("silu", [False, True])
@pytest.mark.parametrize("kernel", [1, 2, 3, 4])
@pytest.mark.parametrize(("batch", "length", "channels"), [(2, 1, 3), (1, 16, 128), (2, 150, 140)])
def test_values_and_gradients(device: str, batch: int, length: int, channels: int, kernel: int, silu: bool) -> None:
    from models.kernels.causal_conv1d import causal_convolution

    generator = torch.Generator().manual_seed(length)
    shapes = [(batch, kernel - 1, channels), (batch, length, channels), (channels, kernel)]
    exact = [torch.randn(*shape, generator=generator, dtype=torch.float64).to(device) for shape in shapes]
    results = []
    for function, dtype in ((reference, torch.float64), (causal_convolution, torch.float32)):
        leaves = [tensor.detach().clone().to(dtype).requires_grad_() for tensor in exact]
        y = apart(function(*(apart(leaf) for leaf in leaves), silu))
        y.backward(torch.linspace(-1, 1, y.numel(), dtype=torch.float64, device=device).view_as(y).to(dtype))
        results.append([y.detach(), *(leaf.grad for leaf in leaves)])
    for expected, actual in zip(*results, strict=True):
        if expected.numel():
            assert ((actual.double() - expected).norm() / expected.norm().clamp_min(1e-9)).item() < 1e-5


@pytest.mark.parametrize("length", [5, 122])
def test_missing_history_equals_zero_history(device: str, length: int) -> None:
    from models.kernels.causal_conv1d import causal_convolution

    generator = torch.Generator().manual_seed(length)
    x, weight, dy = (
        torch.randn(*s, generator=generator).to(device) for s in ((2, length, 20), (20, 4), (2, length, 20))
    )
    results = []
    for before in (None, torch.zeros(2, 3, 20, device=device)):
        leaves = [tensor.clone().requires_grad_() for tensor in (x, weight)]
        y = causal_convolution(before, *leaves, True)
        y.backward(dy)
        results.append([y.detach(), *(leaf.grad for leaf in leaves)])
    for expected, actual in zip(*results, strict=True):
        torch.testing.assert_close(actual, expected)


def test_histories_of_two_dtypes_have_their_own_launches(device: str) -> None:
    """Continue after a history in 16 bits, then in float32. A launch reads the dtypes of its first call."""
    from models.kernels.causal_conv1d import _launches, causal_convolution

    generator = torch.Generator().manual_seed(0)
    before, x, weight = (torch.randn(*s, generator=generator).to(device) for s in ((2, 3, 20), (2, 5, 20), (20, 4)))
    before = before.bfloat16()
    _launches.cache_clear()
    outputs = [causal_convolution(history, x, weight, True) for history in (before, before.float())]
    assert torch.equal(*outputs)
    assert _launches.cache_info().currsize == 2
