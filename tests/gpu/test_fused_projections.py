"""Bias gradients of fused projections, which a matmul with ones computes."""

from __future__ import annotations

import pytest
import torch

from megatron_lite.parallel.fused_projections import project_inputs


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("tokens", [1, 77, 16384])
def test_bias_gradients_equal_float64_sums(dtype: torch.dtype, tokens: int) -> None:
    linears = [torch.nn.Linear(64, size, device="cuda", dtype=dtype) for size in (48, 1024)]
    x = torch.randn(1, tokens, 64, device="cuda", dtype=dtype)
    outputs = project_inputs(None, x, linears)
    # A mean of 0.5 gets lost if the running sum is rounded to 16 bits.
    gradients = [(torch.randn_like(y, dtype=torch.float32) + 0.5).to(dtype) for y in outputs]
    torch.autograd.backward(outputs, gradients)
    for linear, gradient in zip(linears, gradients, strict=True):
        expected = gradient.flatten(0, -2).double().sum(0)
        error = (linear.bias.grad.double() - expected).norm() / expected.norm()
        assert error < {torch.bfloat16: 4e-3, torch.float16: 1e-3, torch.float32: 1e-5}[dtype]
