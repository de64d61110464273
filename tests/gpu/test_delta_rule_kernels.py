"""The Triton kernels of the delta rule in 16 bits on a GPU, against the chunked form in float32."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from models.operators.delta_rule.delta_rule import delta_rule
from models.operators.delta_rule.select_kernel import Kernel, select_kernel

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.parametrize("decay", [0.1, 4.0, 19.0])
@pytest.mark.parametrize("per_channel", [True, False])
@pytest.mark.parametrize(
    ("dim_k", "dim_v", "dtype"),
    [(64, 64, torch.float16), (96, 96, torch.bfloat16), (128, 128, torch.bfloat16), (256, 512, torch.bfloat16)],
)
def test_kernels_equal_the_chunked_form(
    dim_k: int, dim_v: int, dtype: torch.dtype, per_channel: bool, decay: float
) -> None:
    """Compare packed sequences with initial states: errors of at most 1e-2 for outputs and states, 2e-2 for gradients."""
    generator = torch.Generator("cuda").manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device="cuda", generator=generator)

    length, heads, bounds = 520, 2, torch.tensor([0, 100, 100, 300, 520], device="cuda")
    q, k = (F.normalize(random(1, length, heads, dim_k), dim=-1).to(dtype) for _ in range(2))
    v, d_o = (random(1, length, heads, dim_v).to(dtype) for _ in range(2))
    g = -decay * random(1, length, heads, *((dim_k,) if per_channel else ())).abs().clamp_max(1.0)
    beta = random(1, length, heads).sigmoid()
    initial, d_final = (random(4, heads, dim_k, dim_v) for _ in range(2))
    assert select_kernel(q, k, v, beta, None, None, bounds) is Kernel.TRITON
    results = []
    for exact in (True, False):
        given = [(x.float() if exact else x).detach().requires_grad_() for x in (q, k, v, g, beta, initial)]
        o, final = delta_rule(*given[:5], initial_state=given[5], output_final_state=True, cu_seqlens=bounds)
        assert final is not None
        loss = (o.float() * d_o.float()).sum() + (final * d_final).sum()
        results.append([o, final, *torch.autograd.grad(loss, given)])
    names = "o", "final state", "dq", "dk", "dv", "d log_decay", "d beta", "d initial state"
    for name, expected, actual in zip(names, *results, strict=True):
        error = ((actual.float() - expected.float()).norm() / expected.float().norm()).item()
        assert error < (2e-2 if name.startswith("d") else 1e-2), (name, error)
