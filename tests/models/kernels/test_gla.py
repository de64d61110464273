"""The Triton kernels of gated linear attention with one decay per channel against the float64 reference, in float32."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch import Tensor

from models.operators.gla.gated_linear_attention import gated_linear_attention
from tests.models.kernels.conftest import apart, check_nan


@pytest.fixture(autouse=True)
def _interpreter(device: str) -> None:
    if device == "cuda":
        pytest.skip("float32, which the kernels refuse on CUDA; tests/gpu/test_gla_kernels.py runs them in 16 bits")


def decays(kind: str, *shape: int, generator: torch.Generator) -> Tensor:
    """Return log decays [batch, length, heads, dim]: MetaLA's, or decays that do not fit the matmul form."""
    g = -torch.rand(*shape, generator=generator)
    if kind == "none":
        return g * 0.0
    if kind == "mild":
        return g * 0.1
    if kind == "strong":
        return g * 160.0
    if kind == "middling":
        return g * 4.0
    if kind == "single":
        return torch.where(torch.rand(*shape, generator=generator) < 0.02, -80.0, g * 0.05)
    if kind == "later":
        g[:, shape[1] // 2 :] *= 60.0
        return g * 0.1
    if kind == "last":
        # Only the last token of every chunk has a large decay.
        g[:, 63::64] = -80.0
        return g
    g[:, 5::37] = -torch.inf
    return g


def check(
    device: str,
    shape: tuple[int, int, int, int, int],
    kind: str = "mild",
    cu_seqlens: list[int] | None = None,
    states: bool = True,
    tolerance: float = 2e-5,
    scale: float = 0.3,
) -> None:
    """Compare outputs, final states and all gradients; with `states`, use initial states and a loss on the final ones."""
    from models.kernels.gla.gla import gla

    batch, length, heads, dim_k, dim_v = shape
    generator = torch.Generator().manual_seed(length + dim_k)
    q, k = (torch.randn(batch, length, heads, dim_k, generator=generator) for _ in range(2))
    v, d_o = (torch.randn(batch, length, heads, dim_v, generator=generator) for _ in range(2))
    g = decays(kind, batch, length, heads, dim_k, generator=generator)
    sequences = batch if cu_seqlens is None else len(cu_seqlens) - 1
    initial, d_final = (torch.randn(sequences, heads, dim_k, dim_v, generator=generator) for _ in range(2))
    bounds = None if cu_seqlens is None else torch.tensor(cu_seqlens, device=device)
    results = []
    for exact in (True, False):
        leaves = [x.to(device, torch.float64 if exact else torch.float32) for x in (q, k, v, g, initial)]
        leaves = [x.requires_grad_() for x in leaves[: 5 if states else 4]]
        given = [apart(x) for x in leaves]
        before = given[4] if states else None
        if exact:
            # Below -80 the kernels see -80, which has no gradient.
            clamped = given[3].clamp_min(-80.0)
            o, final = gated_linear_attention(
                *given[:3], clamped, scale=scale, initial_state=before, cu_seqlens=bounds, form="recurrent"
            )
        else:
            o, final = gla(*given[:4], scale, before, bounds)
        loss = (apart(o) * d_o.to(o)).sum() + ((apart(final) * d_final.to(final)).sum() if states else 0.0)
        results.append([o, final, *torch.autograd.grad(loss, leaves)])
    for name, actual, expected in zip(
        ("o", "final", "dq", "dk", "dv", "dg", "d initial"), *reversed(results), strict=False
    ):
        assert actual.isfinite().all(), name
        error = (actual.double() - expected).norm() / expected.norm().clamp_min(1e-6)
        assert error.item() < tolerance, (name, error.item())
    # Exactly 0, without the rounding errors of sums that cancel.
    assert not results[1][5][g.to(device) < -80.0].any()


@pytest.mark.parametrize("states", [True, False])
@pytest.mark.parametrize(
    "shape",
    [
        (2, 128, 2, 16, 16),
        (1, 3, 1, 16, 32),
        (1, 70, 2, 24, 40),
        (1, 65, 1, 5, 100),
        (1, 64, 1, 16, 24),
        (1, 64, 1, 128, 16),
    ],
)
def test_shapes(device: str, shape: tuple[int, int, int, int, int], states: bool) -> None:
    """Whole chunks; and lengths and head sizes that do not fill their tiles."""
    check(device, shape, states=states)


@pytest.mark.parametrize("kind", ["none", "middling", "strong", "single", "later", "last", "infinite"])
def test_every_decay(device: str, kind: str) -> None:
    """Also decays whose exponential over a whole chunk is outside of float32."""
    check(device, (1, 130, 1, 16, 16), kind, tolerance=5e-5)


def test_scale_that_is_not_positive(device: str) -> None:
    check(device, (1, 70, 2, 16, 16), scale=-0.3)


@pytest.mark.parametrize("kind", ["mild", "single"])
@pytest.mark.parametrize("states", [True, False])
def test_packed_sequences(device: str, kind: str, states: bool) -> None:
    """Empty ones too, at the start, between others and, as batches of a fixed size have them, at the end."""
    check(device, (1, 320, 2, 16, 16), kind, [0, 0, 1, 60, 188, 188, 252, 320, 320, 320], states, tolerance=5e-5)


def test_largest_number_of_chunks_of_packed_sequences(device: str) -> None:
    check(device, (1, 67, 1, 16, 16), cu_seqlens=[0, 1, 2, 67])


@pytest.mark.parametrize(("length", "group"), [(384, 1), (400, 8)])
@pytest.mark.parametrize("packed", [False, True])
def test_sequences_in_several_splits(
    device: str, packed: bool, length: int, group: int, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """Scan 7 chunks in splits of two, merged by one or two programs. With 6 chunks the last split is empty.

    Packed sequences have up to 10 chunks, and several empty splits.
    """
    from models.kernels.gla import gla as kernels

    request.addfinalizer(kernels._state_launches.cache_clear)
    kernels._state_launches.cache_clear()
    monkeypatch.setattr(kernels, "splits_of", lambda _: 4)
    monkeypatch.setattr(kernels, "_GROUP", group)
    bounds = [0, 90, 90, 230, length] if packed else None
    # A packed final state includes the incoming state of its split.
    check(device, (1, length, 2, 16, 16), "mild" if packed else "later", bounds, tolerance=5e-5)


def test_loss_on_final_states_only(device: str) -> None:
    from models.kernels.gla.gla import gla

    inputs = [torch.randn(1, 70, 1, 16, generator=torch.Generator().manual_seed(seed)) for seed in range(4)]
    results = []
    for exact in (True, False):
        leaves = [x.to(device, torch.float64 if exact else torch.float32).requires_grad_() for x in inputs]
        q, k, v, g = leaves
        if exact:
            final = gated_linear_attention(q, k, v, -g.abs(), scale=0.3, form="recurrent")[1] + 0 * q.sum()
        else:
            final = gla(q, k, v, -g.abs(), 0.3, None, None)[1]
        results.append(torch.autograd.grad(final.square().sum(), leaves))
    for expected, actual in zip(*results, strict=True):
        torch.testing.assert_close(actual.double(), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("strength", [1, 30])
def test_nan_propagates(device: str, strength: int) -> None:
    """Take decays of both forms of a chunk."""
    from models.kernels.gla.gla import gla

    q, k, v, g = (torch.rand(1, 150, 2, 16, device=device) for _ in range(4))
    check_nan(
        lambda *x: gated_linear_attention(*x, form="recurrent"),
        lambda *x: gla(*x, 1.0, None, None),
        [q, k, v, -strength * g],
    )


def test_unsupported_inputs_are_refused(device: str) -> None:
    from models.kernels.gla.gla import gla

    def call(dim_k: int, dim_v: int, length: int = 4, dtype: torch.dtype = torch.float32) -> None:
        q = torch.zeros(1, length, 1, dim_k, device=device)
        v = torch.zeros(1, length, 1, dim_v, device=device, dtype=dtype)
        gla(q, q, v, q, 1.0, None, None)

    with pytest.raises(ValueError, match="head_dim_k 160"):
        call(160, 16)
    with pytest.raises(ValueError, match="head_dim_v 129"):
        call(16, 129)
    for dtype in (torch.float64, torch.bfloat16):
        with pytest.raises(ValueError, match="one dtype"):
            call(16, 16, dtype=dtype)
    with pytest.raises(ValueError, match="no tokens"):
        call(16, 16, length=0)


@pytest.mark.parametrize(
    ("fits", "layer", "gradients"), [(2**21 - 1, False, True), (2**21 - 1, True, False), (699_050, True, True)]
)
def test_sizes_that_overflow_are_refused(device: str, fits: int, layer: bool, gradients: bool) -> None:
    """Count 8 * 128 numbers per token, and 8 * 2 * (64 + 128) in the gradients of a layer of MetaLA, which are adjacent."""
    from models.kernels.gla.gla import case_of

    for length in (fits, fits + 1):
        q, v = (torch.empty(1, length, 8, dim, device="meta", dtype=torch.bfloat16) for dim in (64, 128))
        refused = pytest.raises(ValueError, match=f"{length:,} tokens .* overflow 32-bit addresses")
        with refused if length > fits else nullcontext(), torch.set_grad_enabled(gradients):
            assert case_of(q, q, v, 1.0, None, None, torch.float32 if layer else None).length == fits
