"""The causal convolution: against torch's, in both its forms, over tiles, with history, padding and packing."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F

from models.layers import short_convolution as convolution
from models.layers.short_convolution import CausalConvolution


def reference(layer: CausalConvolution, x: torch.Tensor) -> torch.Tensor:
    channels, kernel = layer.weight.shape
    padded = F.pad(x.transpose(1, 2), (kernel - 1, 0))
    y = F.conv1d(padded, layer.weight.unsqueeze(1), groups=channels).transpose(1, 2)
    return F.silu(y) if layer.silu else y


@pytest.mark.parametrize("silu", [False, True])
@pytest.mark.parametrize("kernel", [1, 2, 4])
@pytest.mark.parametrize("tile", [8, 40, 10000])
@pytest.mark.parametrize("length", [1, 2, 13])
def test_values_and_gradients(monkeypatch, silu, kernel, tile, length):
    monkeypatch.setattr(convolution, "_TILE_ELEMENTS", tile)
    layer = CausalConvolution(4, kernel, silu=silu).double()
    x = torch.randn(3, length, 4, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(3, length, 4, dtype=torch.float64)
    expected = reference(layer, x)
    y, _ = layer(x)
    torch.testing.assert_close(y, expected, rtol=0, atol=1e-12)
    leaves = [x, layer.weight]
    for a, e in zip(
        torch.autograd.grad((y * weight).sum(), leaves),
        torch.autograd.grad((expected * weight).sum(), leaves),
        strict=True,
    ):
        torch.testing.assert_close(a, e, rtol=0, atol=1e-12)


def test_gradient_of_the_history():
    layer = CausalConvolution(3, 4, silu=True).double()
    x = torch.randn(2, 5, 3, dtype=torch.float64, requires_grad=True)
    history = torch.randn(2, 3, 3, dtype=torch.float64, requires_grad=True)

    def function(x, history, weight):
        layer_weight = {"weight": weight}
        return torch.func.functional_call(layer, layer_weight, (x,), {"history": history, "return_history": True})

    assert torch.autograd.gradcheck(function, (x, history, layer.weight))


@pytest.mark.parametrize("channels", [16, 3])
def test_history_gradient_is_zero_without_tokens(monkeypatch, channels):
    empty_like = torch.empty_like
    # Uninitialised memory may hold any number.
    monkeypatch.setattr(torch, "empty_like", lambda *x, **options: empty_like(*x, **options).fill_(torch.nan))
    layer, history = CausalConvolution(channels, 4, silu=True), torch.randn(2, 3, channels, requires_grad=True)
    y, after = layer(torch.zeros(2, 0, channels), history=history, return_history=True)
    assert y.shape == (2, 0, channels)
    assert torch.equal(after, history)
    gradient, of_weight = torch.autograd.grad(y.sum() + (0.5 * after).sum(), [history, layer.weight])
    assert (gradient == 0.5).all()
    assert (of_weight == 0).all()


@pytest.mark.parametrize("channels", [16, 3])
@pytest.mark.parametrize("shape", [(1, 3), (3, 3), (2, 2), (2, 4)])
def test_history_of_wrong_shape_is_refused(channels, shape):
    """Test 16 channels, which the C++ kernel supports, and 3, which it does not."""
    layer, history = CausalConvolution(channels, 4, silu=True), torch.zeros(*shape, channels)
    words = rf"history \[{shape[0]}, {shape[1]}, {channels}\]: expected .* = \[2, 3, {channels}\]; give the"
    for x, options in (
        (torch.zeros(2, 5, channels), {}),
        (torch.zeros(2, 5, channels), {"mask": torch.ones(2, 5, dtype=torch.bool)}),
        (torch.zeros(1, 5, channels), {"cu_seqlens": torch.tensor([0, 2, 5])}),
    ):
        with pytest.raises(ValueError, match=words):
            layer(x, history=history, **options)
    with pytest.raises(ValueError, match=rf"history \[2, 3, {channels + 1}\]"):
        layer(torch.zeros(2, 5, channels), history=torch.zeros(2, 3, channels + 1))


@pytest.mark.parametrize("channels", [16, 3])
def test_bfloat16_sums_in_float32(channels):
    """Outputs and gradients are rounded once by the C++ kernel, and by the form in tiles for other channel counts."""
    layer = CausalConvolution(channels, 4, silu=True).bfloat16()
    x = torch.randn(2, 50, channels).bfloat16().requires_grad_()
    y, _ = layer(x)
    got = [y, *torch.autograd.grad(y.sum(), [x, layer.weight])]
    y = reference(layer.double(), wide := x.detach().double().requires_grad_())
    for a, exact in zip(got, [y, *torch.autograd.grad(y.sum(), [wide, layer.weight])], strict=True):
        assert a.dtype == torch.bfloat16
        assert (a - exact).norm() <= 2**-9 * exact.norm()


def test_pieces_equal_the_whole():
    layer = CausalConvolution(3, 4, silu=True).double()
    x = torch.randn(2, 12, 3, dtype=torch.float64)
    outputs, history = [], None
    for a, b in ((0, 1), (1, 2), (2, 7), (7, 12)):
        y, history = layer(x[:, a:b], history=history, return_history=True)
        outputs.append(y)
    torch.testing.assert_close(torch.cat(outputs, 1), reference(layer, x))
    torch.testing.assert_close(history, x[:, -3:])


def test_history_is_directly_before_the_first_real_token():
    layer = CausalConvolution(3, 4, silu=True).double()
    x, history = torch.randn(3, 7, 3, dtype=torch.float64), torch.randn(3, 3, 3, dtype=torch.float64)
    spans = [(2, 7), (0, 2), (3, 5)]  # padding on the left, on the right, and on both sides
    place = torch.arange(7)
    mask = torch.stack([(place >= start) & (place < end) for start, end in spans])
    y, after = layer(x, mask=mask, history=history, return_history=True)
    for row, (start, end) in enumerate(spans):
        alone, last = layer(x[row : row + 1, start:end], history=history[row : row + 1], return_history=True)
        torch.testing.assert_close(y[row, start:end], alone[0])
        torch.testing.assert_close(after[row], last[0])


def test_packed_gradients_equal_runs_apart():
    layer = CausalConvolution(3, 4, silu=True).double()
    x = torch.randn(1, 12, 3, dtype=torch.float64, requires_grad=True)
    bounds = [0, 2, 2, 9, 12]
    y, _ = layer(x, cu_seqlens=torch.tensor(bounds))
    apart = torch.cat([reference(layer, x[:, a:b]) for a, b in pairwise(bounds) if a < b], 1)
    torch.testing.assert_close(y, apart)
    weight = torch.randn_like(y)
    for a, e in zip(
        torch.autograd.grad((y * weight).sum(), [x, layer.weight]),
        torch.autograd.grad((apart * weight).sum(), [x, layer.weight]),
        strict=True,
    ):
        torch.testing.assert_close(a, e)
