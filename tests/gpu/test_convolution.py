"""Convolution kernels at training sizes, inside the layer, compared with float64."""

from __future__ import annotations

import pytest
import torch

from models.layers.short_convolution import CausalConvolution


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("kernel", [2, 4])
@pytest.mark.parametrize(("batch", "length", "channels"), [(8, 2048, 2048), (1, 5001, 1000), (3, 1, 64)])
def test_layer_equals_the_layer_in_float64(batch, length, channels, kernel, dtype):
    torch.manual_seed(0)
    exact = CausalConvolution(channels, kernel, silu=True).double().cuda()
    layer = CausalConvolution(channels, kernel, silu=True).to("cuda", dtype)
    with torch.no_grad():
        layer.weight.copy_(exact.weight)
        exact.weight.copy_(layer.weight)
    x = torch.randn(batch, length, channels, device="cuda").to(dtype)
    dy = torch.randn_like(x)
    results = []
    for module, kind in ((exact, torch.float64), (layer, dtype)):
        leaf = x.to(kind).detach().clone().requires_grad_()
        y, _ = module(leaf)
        y.backward(dy.to(kind))
        results.append([y.detach().double(), leaf.grad.double(), module.weight.grad.double()])
    for expected, actual in zip(*results, strict=True):
        assert ((actual - expected).norm() / expected.norm()).item() < (1e-5 if dtype == torch.float32 else 4e-3)
