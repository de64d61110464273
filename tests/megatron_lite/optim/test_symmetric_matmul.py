"""The symmetric matmul in Triton against PyTorch."""

from __future__ import annotations

import pytest
import torch

from tests.models.kernels.conftest import device

__all__ = ["device"]


@pytest.mark.parametrize(("shape", "beta"), [((2, 200, 72), 0.0), ((1, 200, 200), -4.775)])
def test_kernel_equals_a_general_matmul(device: str, shape: tuple[int, int, int], beta: float) -> None:
    from megatron_lite.optim.symmetric_matmul import symmetric_matmul

    x = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(device)
    x = (x + x.mT if beta else x).half()
    exact = 2.0315 * x.double() @ x.double().mT
    exact = exact + (beta * x.double() if beta else 0) + 3.4445 * torch.eye(200, device=device)
    found = symmetric_matmul(x, alpha=2.0315, beta=beta, diagonal=3.4445)
    assert ((found.double() - exact).norm() / exact.norm()).item() < 1e-3
    assert torch.equal(found[:, 128:, :128], found[:, :128, 128:].mT)
