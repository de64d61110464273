"""What the kernels of flash-linear-attention are given: here a stand-in computes it in plain PyTorch."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest
import torch

from models.chunked import chunked_recurrence
from models.fla_backend import fla_recurrence


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Head sizes that the stand-in was called with; smaller ones than the kernels take are an error."""
    seen: list[tuple[int, int]] = []

    def kernel(q, k, v, log_decay, *, scale, initial_state, output_final_state, cu_seqlens):
        assert min(q.shape[-1], v.shape[-1]) >= 16
        seen.append((q.shape[-1], v.shape[-1]))
        decay = log_decay if log_decay.dim() == 4 else log_decay.unsqueeze(-1)
        return chunked_recurrence(q, k, v, decay, scale, initial_state, cu_seqlens)

    for name, functions in (
        ("fla.ops.gla", ("chunk_gla", "fused_recurrent_gla")),
        ("fla.ops.simple_gla", ("chunk_simple_gla", "fused_recurrent_simple_gla")),
    ):
        module = ModuleType(name)
        for function in functions:
            setattr(module, function, kernel)
        monkeypatch.setitem(sys.modules, name, module)
    for name in ("fla", "fla.ops"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    return seen


@pytest.mark.parametrize(("dim_k", "dim_v"), [(4, 8), (16, 8), (8, 32), (32, 32)])
@pytest.mark.parametrize("channels", [True, False])
def test_heads_of_few_channels_are_widened(
    kernels: list[tuple[int, int]], dim_k: int, dim_v: int, channels: bool
) -> None:
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(2, 40, 3, *shape, generator=generator, dtype=torch.float64)

    q, k, v = draw(dim_k), draw(dim_k), draw(dim_v)
    log_decay = -draw(dim_k if channels else 1).abs()
    before = torch.randn(2, 3, dim_k, dim_v, generator=generator, dtype=torch.float64).float()
    expected = chunked_recurrence(q, k, v, log_decay, 0.5, before, None)
    found = fla_recurrence(q, k, v, log_decay, 0.5, before, None)
    assert kernels == [(max(16, dim_k), max(16, dim_v))]
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5, check_dtype=False)
