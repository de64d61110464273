"""The kernels of quadratic attention against the reference's quadratic form in float64, forward and backward."""

from __future__ import annotations

import sys

import pytest
import torch
from torch import Tensor

from models.config import ModelConfig
from models.mixers import MIXERS
from models.operators.gla.gated_linear_attention import gated_linear_attention
from models.operators.gla.normalized import short_attention
from models.precision import NORMALIZER_EPS
from tests.models.kernels.conftest import apart, check_nan


def reference(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None, scale: float, taylor: bool, normalized: bool
) -> Tensor:
    """Compute the definition token by token."""
    seen = torch.ones(q.shape[1], q.shape[1], dtype=torch.bool).tril()
    s = torch.einsum("bihd,bjhd->bhij", q, k) * scale
    a = 1 + s + s**2 / 2 if taylor else s
    if log_decay is not None:
        sums = log_decay.clamp_min(-80).cumsum(1).transpose(1, 2)
        a = a * (sums[..., :, None] - sums[..., None, :]).masked_fill(~seen, 0.0).exp()
    a = a.masked_fill(~seen, 0.0)
    if normalized:
        a = a / (a.sum(-1, keepdim=True) + NORMALIZER_EPS)
    return torch.einsum("bhij,bjhe->bihe", a, v)


@pytest.mark.parametrize(
    ("taylor", "normalized", "decayed"), [(True, True, False), (False, False, True), (False, True, True)]
)
@pytest.mark.parametrize("shape", [(2, 150, 2, 16, 24), (1, 64, 1, 64, 64), (1, 70, 1, 128, 65), (1, 3, 1, 8, 8)])
def test_outputs_and_gradients(
    device: str, shape: tuple[int, ...], taylor: bool, normalized: bool, decayed: bool
) -> None:
    from models.kernels.quadratic_attention import quadratic_attention

    batch, length, heads, dim_k, dim_v = shape
    generator = torch.Generator().manual_seed(length + dim_k)
    draw = torch.rand if normalized and not taylor else torch.randn
    q, k = (draw(batch, length, heads, dim_k, generator=generator) for _ in range(2))
    v, dy = (torch.randn(batch, length, heads, dim_v, generator=generator) for _ in range(2))
    if normalized and length == 3:
        q *= 1e-6  # row sums of the size of their epsilon
    leaves = [q, k, v]
    if decayed:
        leaves.append(-torch.rand(batch, length, heads, generator=generator) * 0.2)
    results = []
    for exact in (True, False):
        own = [(x.double() if exact else x.to(device)).detach().clone().requires_grad_() for x in leaves]
        given = [apart(x) for x in own] + ([] if decayed else [None])
        if exact:
            y = reference(*given, 0.3, taylor, normalized)
        else:
            y = quadratic_attention(*given, scale=0.3, taylor=taylor, normalized=normalized)
        results.append([y, *torch.autograd.grad(apart(y), own, dy.to(y))])
    for name, expected, actual in zip(("y", "dq", "dk", "dv", "d log decay"), *results, strict=False):
        error = (actual.double().cpu() - expected).norm() / expected.norm().clamp_min(1e-12)
        assert error < 2e-5, f"{name}: {error:.2e}"


@pytest.mark.parametrize("queries", [1, 3])
def test_shared_keys_equal_the_recurrence(device: str, queries: int) -> None:
    """Share queries and keys among heads, as Mamba-2, or keys only, with any decay. Shared tensors are not copied."""
    from models.kernels.quadratic_attention import quadratic_attention

    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(2, 100, heads, 16, generator=generator).to(device).requires_grad_() for heads in (queries, 1))
    v, dy = (torch.randn(2, 100, 3, 16, generator=generator).to(device) for _ in range(2))
    log_decay = -torch.rand(2, 100, 3, generator=generator) * torch.tensor([0.1, 5.0, 200.0])
    log_decay[:, 50] = -torch.inf
    leaves = q, k, v.requires_grad_(), log_decay.to(device).requires_grad_()
    shared = [x.expand(-1, -1, 3, -1) for x in (q, k)]
    expected = gated_linear_attention(*shared, v, leaves[3].clamp_min(-80.0).unsqueeze(-1), form="recurrent")[0]
    actual = quadratic_attention(*shared, v, leaves[3], taylor=False, normalized=False)
    for x, y in zip(
        (actual, *torch.autograd.grad(actual, leaves, dy)),
        (expected, *torch.autograd.grad(expected, leaves, dy)),
        strict=True,
    ):
        assert ((x - y).norm() / y.norm()).item() < 1e-4


@pytest.mark.parametrize("mixer", ["mamba2", "lion", "linear_attention"])
def test_mixers_with_and_without_the_kernels(device: str, mixer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compare outputs and gradients of a layer with those of the recurrence."""
    from models.kernels.quadratic_attention import quadratic_attention

    module = sys.modules[f"models.mixers.{mixer}"]
    called = []

    def by_kernels(*args, cu_seqlens, initial_state, return_state, **settings):
        called.append(mixer)
        q, k, v, log_decay = args
        return quadratic_attention(q, k, v, None if log_decay is None else log_decay.reshape(q.shape[:3]), **settings)

    options = {"mamba2": {"state_size": 16}, "lion": {}, "linear_attention": {"feature_map": "taylor"}}[mixer]
    config = ModelConfig(
        vocab_size=8, num_layers=1, hidden_size=32, num_heads=2, mixers=(mixer,), mixer_options={mixer: options}
    )
    torch.manual_seed(0)
    layer = MIXERS[mixer](config, 0, config.options_of(mixer)).to(device)
    x, dy = (torch.randn(2, 40, 32, device=device) for _ in range(2))
    x.requires_grad_()
    leaves, results = [x, *layer.parameters()], []
    for form in (lambda *args, **settings: None, by_kernels):
        monkeypatch.setattr(module, "short_attention", form)
        y = layer(x)
        results.append([y, *torch.autograd.grad(y, leaves, dy)])
    assert called == [mixer]
    for expected, actual in zip(*results, strict=True):
        assert ((actual - expected).norm() / expected.norm()).item() < 1e-4


def test_short_whole_sequences_in_16_bits_are_supported(device: str) -> None:
    """Refuse states, packed and long sequences, and other dtypes."""
    q = torch.zeros(1, 40, 2, 16, device=device, dtype=torch.bfloat16)
    plain = {"normalized": True, "cu_seqlens": None, "initial_state": None, "return_state": False}
    assert (short_attention(q, q, q, None, **plain) is None) == (device == "cpu")
    for other in ({"return_state": True}, {"initial_state": q}, {"cu_seqlens": torch.tensor([0, 40])}):
        assert short_attention(q, q, q, None, **{**plain, **other}) is None
    for x in (q.float(), q[:, :1], q.expand(20, -1, -1, -1).reshape(1, 800, 2, 16), q.repeat(1, 1, 1, 9)):
        assert short_attention(x, x, x, None, **plain) is None


@pytest.mark.parametrize("normalized", [True, False])
@pytest.mark.parametrize("length", [10, 70])
def test_nan_propagates(device: str, length: int, normalized: bool) -> None:
    from models.kernels.quadratic_attention import quadratic_attention

    q, k, v, g = (torch.rand(1, length, 2, 16, device=device) for _ in range(4))
    check_nan(
        lambda *x: (reference(*x, 1.0, False, normalized),),
        lambda *x: (quadratic_attention(*x, normalized=normalized),),
        [q, k, v, -g[..., 0]],
    )


@pytest.mark.parametrize(("dim_k", "dim_v"), [(129, 128), (128, 129)])
def test_heads_that_are_too_large_are_refused(device: str, dim_k: int, dim_v: int) -> None:
    from models.kernels.quadratic_attention import quadratic_attention

    q, v = (torch.zeros(1, 2, 1, dim, device=device) for dim in (dim_k, dim_v))
    with pytest.raises(
        ValueError, match=f"head_dim_k {dim_k}, head_dim_v {dim_v}: the kernels support at most 128 and 128"
    ):
        quadratic_attention(q, q, v, None, taylor=True, normalized=True)


def test_single_tokens_with_heads_first_in_memory(device: str) -> None:
    from models.kernels.quadratic_attention import quadratic_attention

    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(4, 3, 1, 8, generator=generator).to(device).transpose(1, 2) for _ in range(3))
    y = quadratic_attention(q, k, v, None, scale=0.5, taylor=False, normalized=False)
    expected = reference(*(x.cpu().double() for x in (q, k, v)), None, 0.5, False, False)
    assert torch.allclose(y.cpu().double(), expected, atol=1e-5)
