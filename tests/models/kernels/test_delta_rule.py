"""The Triton kernels of the delta rule against the float64 token loop, in float32."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from models.operators.context_parallel import shard_maps
from models.operators.delta_rule.naive import recurrent_form
from models.operators.delta_rule.select_kernel import initial, operands
from tests.models.kernels.conftest import Replace, apart, check_nan
from tests.models.rank_threads import over_ranks

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


@pytest.mark.parametrize("per_channel", [True, False])
@pytest.mark.parametrize("decay", ["mild", "strong"])
def test_nan_propagates(decay: str, per_channel: bool) -> None:
    from models.kernels.delta_rule.delta_rule import delta_rule

    q, k, v = (F.normalize(torch.rand(1, 130, 1, 16), dim=-1) for _ in range(3))
    g = -DECAYS[decay] * torch.rand(1, 130, 1, *([16] if per_channel else []))
    check_nan(
        lambda *x: recurrent_form(y := operands(*x, x[4], None, 0.3), initial(y, None, None), None),
        lambda *x: delta_rule(*x, 0.3, None, None),
        [q, k, v, g, torch.rand(1, 130, 1)],
    )


def test_sizes_that_overflow_are_refused() -> None:
    from models.kernels.delta_rule.delta_rule import delta_rule

    q, decay = (torch.empty(shape, device="meta") for shape in ((1, 2**21, 16, 64), (1, 2**21, 16)))
    with pytest.raises(ValueError, match=r"2,097,152 tokens of 1,024 numbers .* overflow 32-bit addresses"):
        delta_rule(q, q, q, decay, decay, 1.0, None, None)


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


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> dict[str, Counter[str]]:
    """Count the launches of every kernel per thread. The interpreter runs one kernel at once."""
    from models.kernels.launch import Launch

    lock, launch, counters = threading.Lock(), Launch.__call__, {}

    def call(self: Any, *pointers: Tensor | None) -> None:
        with lock:
            counters.setdefault(threading.current_thread().name, Counter())[self._kernel.__name__] += 1
            launch(self, *pointers)

    monkeypatch.setattr(Launch, "__call__", call)
    return counters


def shard_results(
    length: int, bounds: list[int] | None, per_channel: bool, decay: str
) -> Callable[[int, int], list[Tensor]]:
    """Return a function (index, count) -> outputs, final states and gradients of a shard; with a loss on the final states."""
    from models.kernels.delta_rule.delta_rule import delta_rule

    generator = torch.Generator().manual_seed(length)
    q, k = (F.normalize(torch.randn(1, length, 1, 16, generator=generator), dim=-1) for _ in range(2))
    v, d_o = (torch.randn(1, length, 1, 24, generator=generator) for _ in range(2))
    g = -DECAYS[decay] * torch.rand(q.shape if per_channel else q.shape[:3], generator=generator)
    # The states last for long.
    beta = 0.1 * torch.rand(1, length, 1, generator=generator)
    ends = torch.tensor([length] if bounds is None else bounds[1:])
    d_final = torch.randn(len(ends), 1, 16, 24, generator=generator)
    cu_seqlens = None if bounds is None else torch.tensor(bounds)

    def run(index: int, count: int) -> list[Tensor]:
        leaves = [x.chunk(count, 1)[index].clone().requires_grad_() for x in (q, k, v, g, beta)]
        shards, local = shard_maps(length // count, cu_seqlens, None)
        o, final = delta_rule(*(apart(x) for x in leaves), 0.3, None, local, shards=shards)
        # The final state of a sequence belongs to the rank of its last token.
        last = (ends - 1).clamp_min(0) // (length // count) == index
        loss = (apart(o) * d_o.chunk(count, 1)[index]).sum() + (final * d_final * last[:, None, None, None]).sum()
        return [o.detach(), *torch.autograd.grad(loss, leaves), (final * last[:, None, None, None]).detach()]

    return run


@pytest.fixture
def groups(replace: Replace) -> Callable[[int], None]:
    """Return a function that sets the largest number of groups of chunks."""
    from models.kernels.delta_rule import delta_rule as kernels

    cached = [kernels._launches, kernels._scan_launch, kernels._compose_launch]
    return lambda most: replace(kernels, cached, _GROUP=1, _MOST_GROUPS=most)


@pytest.mark.parametrize("per_channel", [True, False])
@pytest.mark.parametrize("most_groups", [1, 4])
@pytest.mark.parametrize(
    ("length", "bounds", "decay"),
    [
        (501, None, "none"),
        (390, None, "strong"),
        (576, [0, 576], "none"),
        (576, [0, 192, 192, 384, 576, 576], "none"),
        (576, [0, 0, 70, 448, 500, 576, 576], "none"),
        (576, [0, 256, 320, 570, 576], "none"),
    ],
)
@pytest.mark.usefixtures("launches")
def test_local_shards_equal_the_whole_sequence(
    length: int,
    bounds: list[int] | None,
    decay: str,
    most_groups: int,
    per_channel: bool,
    groups: Callable[[int], None],
) -> None:
    """Sequences begin and end with a shard, inside shards and groups, and continue over two or all shards."""
    groups(most_groups)
    run = shard_results(length, bounds, per_channel, decay)
    expected = run(0, 1)
    parts = [list(x) for x in zip(*over_ranks(3, lambda index: run(index, 3)), strict=True)]
    actual = [*(torch.cat(x, 1) for x in parts[:-1]), sum(parts[-1])]
    for name, got, wanted in zip(("o", "dq", "dk", "dv", "dg", "d beta", "final"), actual, expected, strict=True):
        assert ((got - wanted).norm() / wanted.norm()).item() < 2e-5, name


def test_context_parallelism_launches_the_kernels_of_one_rank(
    launches: dict[str, Counter[str]], groups: Callable[[int], None]
) -> None:
    """Only the composition of the groups' maps runs a second time per pass."""
    groups(4)
    run = shard_results(512, None, True, "mild")
    run(0, 1)
    (one_rank,) = (Counter(counter) for counter in launches.values())
    launches.clear()
    over_ranks(2, lambda index: run(index, 2))
    assert one_rank["wy_kernel"] == 2
    assert one_rank["compose_kernel"] == 2
    assert list(launches.values()) == [one_rank + Counter(compose_kernel=2)] * 2


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
        y = function(*(apart(x) for x in given))
        weight = torch.randn(y.shape, generator=torch.Generator().manual_seed(1))
        results.append([y, *torch.autograd.grad((apart(y) * weight.to(dtype)).sum(), given)])
    for expected, actual in zip(*results, strict=True):
        assert (actual.double() - expected).norm() / expected.norm() < 1e-5
