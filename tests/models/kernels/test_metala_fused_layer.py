"""MetaLA's decay, recurrence and epilogue as one autograd node against the three steps in PyTorch and float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from models.operators.gla.gated_linear_attention import gated_linear_attention
from models.operators.metala import decay_and_key_reference, metala_epilogue
from tests.models.kernels.conftest import apart


@pytest.fixture(autouse=True)
def _interpreter(device: str) -> None:
    if device == "cuda":
        pytest.skip(
            "float32, which the kernels refuse on CUDA; tests/gpu/test_metala_fused_layer.py runs them in 16 bits"
        )


def gates(kind: str, *shape: int, generator: torch.Generator) -> Tensor:
    """Return a: initial values of MetaLA, decays of almost 0 in every other channel, both, or decays of almost 1."""
    a = torch.randn(*shape, generator=generator)
    if kind == "strong":
        a[..., ::2] *= 300.0
    if kind == "later":
        a[:, shape[1] // 2 :] -= 60.0
    if kind == "open":
        return a + 18.0
    return a


@pytest.mark.parametrize(
    ("shape", "kind", "cu_seqlens", "states"),
    [
        ((2, 128, 2, 16, 16), "mild", None, True),
        ((1, 70, 2, 24, 40), "mild", None, False),
        ((1, 65, 1, 5, 100), "later", None, True),
        ((1, 130, 2, 16, 16), "strong", None, False),
        ((1, 130, 1, 16, 16), "open", None, False),
        ((1, 200, 2, 16, 16), "later", [0, 0, 1, 60, 188, 188, 200, 200], True),
    ],
)
def test_fused_layer_equals_the_three_steps(
    device: str, shape: tuple[int, int, int, int, int], kind: str, cu_seqlens: list[int] | None, states: bool
) -> None:
    """Outputs, final states and the gradients of all inputs."""
    from models.kernels.metala import metala_core

    batch, length, heads, dim_k, dim_v = shape
    generator = torch.Generator().manual_seed(length + dim_k)

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator)

    a = gates(kind, batch, length, heads, dim_k, generator=generator)
    q, v, d_y = normal(*a.shape), normal(batch, length, heads, dim_v), normal(batch, length, heads * dim_v)
    sequences = batch if cu_seqlens is None else len(cu_seqlens) - 1
    initial, d_final = normal(sequences, heads, dim_k, dim_v), normal(sequences, heads, dim_k, dim_v)
    inputs = [q, a, v, 0.3 * normal(heads * dim_k), normal(*d_y.shape), *([initial] if states else [])]
    bounds = None if cu_seqlens is None else torch.tensor(cu_seqlens, device=device)
    results = []
    for exact in (True, False):
        leaves = [x.to(device, torch.float64 if exact else torch.float32).requires_grad_() for x in inputs]
        q, a, v, weight, gate, *rest = (apart(x) for x in leaves)
        before = rest[0] if states else None
        if exact:
            g, k = decay_and_key_reference(a)
            o, final = gated_linear_attention(
                q, k, v, g, scale=0.3, initial_state=before, cu_seqlens=bounds, form="recurrent"
            )
            y = metala_epilogue(o, q, k, v, weight, gate)
        else:
            y, final = metala_core(q, a, v, weight, gate, 0.3, before, bounds)
        loss = (apart(y) * d_y.to(y)).sum() + ((apart(final) * d_final.to(final)).sum() if states else 0.0)
        results.append([y, final, *torch.autograd.grad(loss, leaves)])
    names = "y", "final", "dq", "da", "dv", "d weight", "d gate", "d initial"
    for name, actual, expected in zip(names, *reversed(results), strict=False):
        assert actual.isfinite().all(), name
        error = (actual.double() - expected).norm() / expected.norm().clamp_min(1e-6)
        assert error.item() < 5e-5, (name, error.item())


def test_loss_on_final_states_only(device: str) -> None:
    from models.kernels.metala import metala_core

    inputs = [torch.randn(1, 70, 2, 16, generator=torch.Generator().manual_seed(seed)) for seed in range(3)]
    weight, gate = torch.ones(32, device=device), torch.ones(1, 70, 32, device=device)
    results = []
    for exact in (True, False):
        leaves = [x.to(device, torch.float64 if exact else torch.float32).requires_grad_() for x in inputs]
        q, a, v = leaves
        if exact:
            g, k = decay_and_key_reference(a)
            final = gated_linear_attention(q, k, v, g, scale=0.3, form="recurrent")[1] + 0 * q.sum()
        else:
            final = metala_core(q, a, v, weight, gate, 0.3, None, None)[1]
        results.append(torch.autograd.grad(final.square().sum(), leaves))
    for expected, actual in zip(*results, strict=True):
        torch.testing.assert_close(actual.double(), expected, rtol=1e-4, atol=1e-4)


def test_gradients_are_adjacent_in_memory(device: str) -> None:
    """Gradients of q, a, v and gate, in this order, are one matrix for the matmuls with the weights."""
    from models.kernels.metala import metala_core

    leaves = [torch.randn(1, 20, 2, 16, device=device, requires_grad=True) for _ in range(3)]
    q, a, v = leaves
    gate, weight = torch.randn(1, 20, 32, device=device, requires_grad=True), torch.randn(32, device=device)
    y, _ = metala_core(q, a, v, weight, gate, 0.3, None, None)
    actual = torch.autograd.grad(y.sum(), [*leaves, gate])
    assert [x.storage_offset() for x in actual] == [0, 32, 64, 96]
    assert len({x.untyped_storage().data_ptr() for x in actual}) == 1
    assert {x.stride(1) for x in actual} == {128}


def test_launches_are_prepared_per_dtype(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Use other dtypes of weight and gate. A launch on CUDA reads every pointer in the dtype of its first call."""
    from models.kernels.launch import Launch
    from models.kernels.metala import metala_core

    dtypes: dict[Launch, set[tuple[torch.dtype | None, ...]]] = {}
    launch = Launch.__call__

    def call(self: Launch, *pointers: Tensor | None) -> None:
        dtypes.setdefault(self, set()).add(tuple(None if x is None else x.dtype for x in pointers))
        launch(self, *pointers)

    monkeypatch.setattr(Launch, "__call__", call)
    q, a, v = (torch.randn(1, 5, 2, 16, device=device, requires_grad=True) for _ in range(3))
    for weight, gate in (
        (torch.float32, torch.float32),
        (torch.bfloat16, torch.float32),
        (torch.float32, torch.bfloat16),
    ):
        y, _ = metala_core(
            q,
            a,
            v,
            torch.ones(32, dtype=weight, device=device),
            torch.ones(1, 5, 32, dtype=gate, device=device),
            0.3,
            None,
            None,
        )
        y.sum().backward()
    assert {len(of_launch) for of_launch in dtypes.values()} == {1}
