"""The Triton kernels of the delta rule against the float64 token loop, in float32."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from models.operators.delta_rule.naive import recurrent_form
from models.operators.delta_rule.select_kernel import initial, operands
from tests.models.kernels.conftest import apart

# A token's log decay, as a multiple of a uniform number.
DECAYS = {"none": 0.0, "mild": 0.1, "middling": 4.0, "strong": 19.0}


@pytest.fixture(autouse=True)
def _interpreter(device: str) -> None:
    if device == "cuda":
        pytest.skip(
            "float32, which the kernels refuse on CUDA; tests/gpu/test_delta_rule_kernels.py runs them in 16 bits"
        )


def check(
    shape: tuple[int, int, int, int, int],
    per_channel: bool,
    decay: str = "mild",
    cu_seqlens: list[int] | None = None,
    states: bool = True,
    strength: float = 1.0,
) -> None:
    """Compare outputs, final states and all gradients; with `states`, use initial states and a loss on the final ones."""
    from models.kernels.delta_rule.delta_rule import delta_rule

    batch, length, heads, dim_k, dim_v = shape
    generator = torch.Generator().manual_seed(length + dim_k)
    q, k = (F.normalize(torch.randn(batch, length, heads, dim_k, generator=generator), dim=-1) for _ in range(2))
    v, d_o = (torch.randn(batch, length, heads, dim_v, generator=generator) for _ in range(2))
    g = -DECAYS[decay] * torch.rand(*(q.shape if per_channel else q.shape[:3]), generator=generator)
    beta = strength * torch.rand(batch, length, heads, generator=generator)
    sequences = batch if cu_seqlens is None else len(cu_seqlens) - 1
    start, d_final = (torch.randn(sequences, heads, dim_k, dim_v, generator=generator) for _ in range(2))
    bounds = None if cu_seqlens is None else torch.tensor(cu_seqlens)
    results = []
    for dtype in (torch.float64, torch.float32):
        leaves = [x.to(dtype).requires_grad_() for x in (q, k, v, g, beta, start)][: 6 if states else 5]
        given = [apart(x) for x in leaves]
        begin = given[5] if states else None
        if dtype == torch.float64:
            x = operands(*given[:5], given[4], None, 0.3)
            o, final = recurrent_form(x, initial(x, begin, bounds), bounds)
        else:
            o, final = delta_rule(*given[:5], 0.3, begin, bounds)
        loss = (apart(o) * d_o.to(o)).sum() + ((apart(final) * d_final.to(final)).sum() if states else 0.0)
        results.append([o, final, *torch.autograd.grad(loss, leaves)])
    names = "o", "final", "dq", "dk", "dv", "dg", "d beta", "d initial"
    for name, actual, expected in zip(names, *reversed(results), strict=False):
        assert actual.isfinite().all(), name
        error = (actual.double() - expected).norm() / expected.norm().clamp_min(1e-6)
        assert error.item() < 5e-5, (name, error.item())


@pytest.mark.parametrize("per_channel", [True, False])
@pytest.mark.parametrize(
    ("shape", "states"),
    [((2, 128, 2, 16, 16), True), ((1, 70, 2, 24, 40), False), ((1, 3, 1, 16, 80), True), ((1, 65, 1, 130, 16), True)],
)
def test_shapes(shape: tuple[int, int, int, int, int], per_channel: bool, states: bool) -> None:
    """Whole chunks; and lengths and head sizes that do not fill their tiles, or take several."""
    check(shape, per_channel, states=states)


@pytest.mark.parametrize("per_channel", [True, False])
@pytest.mark.parametrize("decay", ["none", "middling", "strong"])
def test_every_decay(decay: str, per_channel: bool) -> None:
    """Also decays whose exponential over a whole chunk is outside of float32."""
    check((1, 130, 1, 16, 16), per_channel, decay)


def test_strengths_up_to_two() -> None:
    """Negative eigenvalues."""
    check((1, 130, 1, 16, 16), True, strength=2.0)


@pytest.mark.parametrize("per_channel", [True, False])
@pytest.mark.parametrize("states", [True, False])
def test_packed_sequences(per_channel: bool, states: bool) -> None:
    """Empty ones too, at the start, between others and, as batches of a fixed size have them, at the end."""
    check((1, 320, 2, 16, 16), per_channel, "middling", [0, 0, 1, 60, 188, 188, 252, 320, 320, 320], states)


@pytest.mark.parametrize("decay", ["mild", "strong"])
def test_decay_gate_in_the_kernels(decay: str) -> None:
    """Equal to the log decay computed before, with the gradients of logits, rate and bias."""
    from models.kernels.delta_rule.delta_rule import delta_rule

    generator = torch.Generator().manual_seed(0)
    shape, bounds = (1, 100, 2, 24), torch.tensor([0, 30, 100])
    q, k, v, logits = (torch.randn(*shape, generator=generator) for _ in range(4))
    q, k, beta = F.normalize(q, dim=-1), F.normalize(k, dim=-1), torch.rand(shape[:3], generator=generator)
    a_log, bias = torch.randn(2, generator=generator), torch.randn(2, 24, generator=generator)
    a_log = a_log + (2.0 if decay == "strong" else -4.0)
    results = []
    for gate in (False, True):
        given = [x.clone().requires_grad_() for x in (q, k, v, beta, logits, a_log, bias)]
        *rest, x, a, b = given
        log_decay = x if gate else -a.exp()[:, None] * F.softplus(x + b)
        o, _ = delta_rule(*rest[:3], log_decay, rest[3], 0.3, None, bounds, (a, b) if gate else None)
        results.append([o, *torch.autograd.grad((o * v).sum(), given)])
    for expected, actual in zip(*results, strict=True):
        assert (actual - expected).norm() / expected.norm() < 1e-3


@pytest.mark.parametrize("per_channel", [True, False])
@pytest.mark.parametrize("states", [True, False])
@pytest.mark.parametrize(
    ("length", "cu_seqlens"), [(398, None), (512, [0, 256, 512]), (512, [0, 70, 70, 300, 512, 512])]
)
def test_groups_of_chunks(
    length: int, cu_seqlens: list[int] | None, states: bool, per_channel: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seven to ten chunks in four groups; sequences begin where a group does, and inside groups. The states last for long."""
    from models.kernels.delta_rule import delta_rule as kernels

    monkeypatch.setattr(kernels, "_GROUP", 1)
    monkeypatch.setattr(kernels, "_MOST_GROUPS", 4)
    check((1, length, 1, 16, 24), per_channel, "none", cu_seqlens, states, strength=0.1)


@pytest.mark.parametrize("dim", [16, 24])
@pytest.mark.parametrize("step", ["unit length", "silu norm", "sigmoid norm", "decay"])
def test_steps_around_the_operator(step: str, dim: int) -> None:
    """Compare the elementwise kernels with PyTorch in float64, with all gradients."""
    from models.kernels.delta_rule import layer

    generator = torch.Generator().manual_seed(0)
    x, gate = (torch.randn(2, 150, 3, dim, generator=generator) for _ in range(2))
    small, per_head = 4 * torch.randn(3, dim, generator=generator), torch.randn(3, generator=generator)
    activation = F.silu if step == "silu norm" else torch.sigmoid
    leaves, exact, kernel = {
        "unit length": ([x], lambda x: F.normalize(x, dim=-1), lambda x: layer.unit_length(x, 1e-12)),
        "decay": (
            [x, per_head, small],
            lambda x, a, b: -a.exp()[:, None] * F.softplus(x + b, threshold=40.0),
            layer.channel_decay,
        ),
    }.get(
        step,
        (
            [x, gate.flatten(2), small[0]],
            lambda o, z, w: activation(z) * F.rms_norm(o, (dim,), w, 1e-5).flatten(2),
            lambda o, z, w: layer.gated_norm(o, z, w, 1e-5, step == "silu norm"),
        ),
    )
    results = []
    for dtype, function in ((torch.float64, exact), (torch.float32, kernel)):
        given = [leaf.to(dtype).requires_grad_() for leaf in leaves]
        y = function(*given)
        weight = torch.randn(y.shape, generator=torch.Generator().manual_seed(1))
        results.append([y, *torch.autograd.grad((apart(y) * weight.to(dtype)).sum(), given)])
    for expected, actual in zip(*results, strict=True):
        assert (actual.double() - expected).norm() / expected.norm() < 1e-5
