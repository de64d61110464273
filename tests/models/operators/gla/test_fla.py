"""The calls of flash-linear-attention's kernels. A stand-in in plain PyTorch computes them."""

from __future__ import annotations

import math
import sys
from types import ModuleType

import pytest
import torch

from models.operators.gla.chunk import chunk_form
from models.operators.gla.fla import fla_form
from models.operators.gla.gated_linear_attention import gated_linear_attention
from models.operators.gla.select_kernel import Decay, GLAArguments, Kernel, Selection


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Replace the kernels. Return the head sizes of the calls; sizes that the kernels do not support are an error."""
    seen: list[tuple[int, int]] = []

    def kernel(q, k, v, log_decay, *, scale, initial_state, output_final_state, cu_seqlens):
        assert min(q.shape[-1], v.shape[-1]) >= 16
        seen.append((q.shape[-1], v.shape[-1]))
        decay = log_decay if log_decay.dim() == 4 else log_decay.unsqueeze(-1)
        return chunk_form(GLAArguments(q, k, v, decay, scale, initial_state, cu_seqlens))

    def kernel_with_sums(q, k, v, sums, *, scale, initial_state, output_final_state, chunk_size):
        """Call the stand-in with decays that are summed from the start of each chunk, to base 2."""
        sums = (sums if sums.dim() == 4 else sums.unsqueeze(-1)) * math.log(2)
        before = sums.roll(1, 1)
        before[:, ::chunk_size] = 0
        settings = {"scale": scale, "initial_state": initial_state, "output_final_state": output_final_state}
        return kernel(q, k, v, sums - before, cu_seqlens=None, **settings)

    def chunk_gla_fwd(q, k, v, g, g_cumsum, **settings):
        o, state = kernel_with_sums(q, k, v, g_cumsum, **settings)
        return g_cumsum, None, None, state, o

    def chunk_simple_gla_fwd(q, k, v, g, **settings):
        return kernel_with_sums(q, k, v, g, **settings)

    for name, functions in (
        ("fla.ops.gla", {"chunk_gla": kernel, "fused_recurrent_gla": kernel}),
        ("fla.ops.gla.chunk", {"chunk_gla_fwd": chunk_gla_fwd}),
        ("fla.ops.simple_gla", {"chunk_simple_gla": kernel, "fused_recurrent_simple_gla": kernel}),
        ("fla.ops.simple_gla.chunk", {"chunk_simple_gla_fwd": chunk_simple_gla_fwd}),
    ):
        module = ModuleType(name)
        for function, stand_in in functions.items():
            setattr(module, function, stand_in)
        monkeypatch.setitem(sys.modules, name, module)
    for name in ("fla", "fla.ops"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    return seen


@pytest.mark.parametrize(("dim_k", "dim_v"), [(4, 8), (16, 8), (8, 32), (32, 32)])
@pytest.mark.parametrize("channels", [True, False])
def test_small_heads_are_padded(kernels: list[tuple[int, int]], dim_k: int, dim_v: int, channels: bool) -> None:
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(2, 40, 3, *shape, generator=generator, dtype=torch.float64)

    q, k, v = draw(dim_k), draw(dim_k), draw(dim_v)
    log_decay = -draw(dim_k if channels else 1).abs()
    before = torch.randn(2, 3, dim_k, dim_v, generator=generator, dtype=torch.float64).float()
    expected = chunk_form(GLAArguments(q, k, v, log_decay, 0.5, before, None))
    actual = fla_form(Selection(Kernel.FLA_CHUNK), GLAArguments(q, k, v, log_decay, 0.5, before, None))
    assert kernels == [(max(16, dim_k), max(16, dim_v))]
    for one, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4, check_dtype=False)


@pytest.mark.parametrize("length", [17, 64, 150])
@pytest.mark.parametrize("channels", [True, False])
def test_forward_kernels_receive_decays_summed_per_chunk(
    kernels: list[tuple[int, int]], length: int, channels: bool
) -> None:
    generator = torch.Generator().manual_seed(length)
    q, k, v, decay = (torch.randn(3, length, 2, 16, generator=generator) for _ in range(4))
    log_decay = -decay.abs()[..., : 16 if channels else 1].contiguous()
    before = torch.randn(3, 2, 16, 16, generator=generator)
    expected = chunk_form(GLAArguments(q, k, v, log_decay, 0.5, before, None))
    with torch.no_grad():
        actual = fla_form(Selection(Kernel.FLA_CHUNK_FORWARD), GLAArguments(q, k, v, log_decay, 0.5, before, None))
    trained = fla_form(
        Selection(Kernel.FLA_CHUNK), GLAArguments(q.requires_grad_(), k, v, log_decay, 0.5, before, None)
    )
    for one, two, other in zip(actual, trained, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(two, other, rtol=1e-4, atol=1e-4)


def test_per_head_decay_that_fla_cannot_differentiate_is_expanded_for_the_project_kernels(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module = "models.operators.gla.gated_linear_attention"
    monkeypatch.setattr(f"{module}.triton_form", chunk_form)
    monkeypatch.setattr(f"{module}.select_kernel", lambda *_, **__: Selection(Kernel.TRITON, Decay.PER_CHANNEL))
    generator = torch.Generator().manual_seed(0)
    q, k, v, decay = (torch.randn(3, 70, 2, 16, generator=generator) for _ in range(4))
    log_decay = (-decay.abs()[..., :1]).requires_grad_()
    expected = chunk_form(GLAArguments(q, k, v, log_decay, 0.5, None, None))[0]
    actual, _ = gated_linear_attention(q, k, v, log_decay, scale=0.5)
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)
    (wanted,) = torch.autograd.grad(expected.square().sum(), log_decay)
    (gradient,) = torch.autograd.grad(actual.square().sum(), log_decay)
    torch.testing.assert_close(gradient, wanted, rtol=1e-3, atol=1e-3)
