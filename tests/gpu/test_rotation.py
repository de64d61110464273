"""The rotation kernel in 16 bits on a CUDA device, compared with PyTorch in float32."""

from __future__ import annotations

import pytest
import torch

from models.operators.rotary import rotate


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("angles", [(1, 1), (1, 8), (40, 1), (40, 8)])
def test_rotation(angles: tuple[int, int], dtype: torch.dtype) -> None:
    """Compare the output and all gradients of a part of a projection, with 16 channels that are not rotated."""
    from models.kernels.rotary import rotate as kernel

    generator = torch.Generator().manual_seed(0)
    batch, length, heads, dim, pairs = 40, 300, 8, 64, 24
    whole = torch.randn(batch, length, 3 * heads * dim, generator=generator).to(dtype)
    dy = torch.randn(batch, length, heads, dim, generator=generator).to(dtype)
    cos, sin = (torch.randn(angles[0], length, angles[1], pairs, generator=generator) for _ in range(2))
    results = []
    for device, compute in (("cpu", torch.float32), ("cuda", dtype)):
        leaves = [t.detach().to(device).requires_grad_() for t in (whole.to(compute), cos, sin)]
        x = leaves[0][..., heads * dim : 2 * heads * dim].unflatten(-1, (heads, dim))
        y = (rotate if device == "cpu" else kernel)(x, *leaves[1:])
        y.backward(dy.to(device, compute))
        results.append([y.detach(), *(leaf.grad for leaf in leaves)])
    rounding = torch.finfo(dtype).eps
    for expected, actual, bound in zip(*results, (rounding, rounding, 1e-5, 1e-5), strict=True):
        assert actual.dtype in (dtype, torch.float32)
        error = (actual.cpu().float() - expected).abs()
        assert (error <= bound * expected.abs().clamp_min(1.0 if bound == rounding else expected.abs().max())).all()
