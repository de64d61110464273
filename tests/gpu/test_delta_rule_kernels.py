"""The Triton kernels of the delta rule in 16 bits on a GPU, against the chunked form in float32."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from models.operators.delta_rule.delta_rule import delta_rule
from models.operators.delta_rule.select_kernel import Kernel, select_kernel
from models.operators.delta_rule.softplus_decay import SoftplusDecay
from tests.models.rank_threads import over_ranks


@pytest.mark.parametrize("decay", [0.1, 4.0, 19.0])
@pytest.mark.parametrize("per_channel", [True, False])
@pytest.mark.parametrize(
    ("dim_k", "dim_v", "dtype"),
    [(64, 64, torch.float16), (96, 96, torch.bfloat16), (128, 128, torch.bfloat16), (256, 512, torch.bfloat16)],
)
def test_kernels_equal_the_chunked_form(
    dim_k: int, dim_v: int, dtype: torch.dtype, per_channel: bool, decay: float
) -> None:
    """Packed sequences with initial states."""
    check(520, dim_k, dim_v, dtype, per_channel, decay, torch.tensor([0, 100, 100, 300, 520], device="cuda"))


@pytest.mark.parametrize("per_channel", [True, False])
@pytest.mark.parametrize("bounds", [None, [0, 2048, 4096], [0, 1000, 1000, 4096]])
def test_groups_of_chunks_equal_the_chunked_form(bounds: list[int] | None, per_channel: bool) -> None:
    """One long sequence with few heads, and packed sequences, which begin where a group does or inside one."""
    table = None if bounds is None else torch.tensor(bounds, device="cuda")
    check(4096, 128, 128, torch.bfloat16, per_channel, 2e-3, table)


@pytest.mark.parametrize("decay", [0.1, 4.0])
def test_decay_gate_equals_the_chunked_form(decay: float) -> None:
    """Whole chunks, as in training."""
    check(1024, 128, 128, torch.bfloat16, True, decay, None, gate=True)


@pytest.mark.parametrize("per_channel", [True, False])
@pytest.mark.parametrize("bounds", [None, [0, 4096, 8192], [0, 1000, 1000, 6000, 8192]])
def test_local_shards_equal_the_whole_sequence(bounds: list[int] | None, per_channel: bool) -> None:
    """Two ranks, with four groups of chunks each. The states last for long."""
    generator = torch.Generator("cuda").manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device="cuda", generator=generator)

    length, heads, dim = 8192, 2, 128
    channels = (dim,) if per_channel else ()
    q, k = (F.normalize(random(1, length, heads, dim), dim=-1).bfloat16() for _ in range(2))
    v, d_o = (random(1, length, heads, dim).bfloat16() for _ in range(2))
    logits, bias = random(1, length, heads, *channels).bfloat16(), random(heads, *channels)
    beta, a_log = random(1, length, heads).sigmoid(), torch.full([heads], 2e-3, device="cuda").log()
    cu_seqlens = None if bounds is None else torch.tensor(bounds, device="cuda")

    def run(index: int, count: int) -> list[torch.Tensor]:
        parts = [x.chunk(count, 1)[index].detach().requires_grad_() for x in (q, k, v, beta, logits)]
        gates = [x.clone().requires_grad_() for x in (a_log, bias)]
        o, _ = delta_rule(*parts[:3], SoftplusDecay(parts[4], *gates), parts[3], cu_seqlens=cu_seqlens)
        loss = (o.float() * d_o.chunk(count, 1)[index].float()).sum()
        # Run the backward pass in the calling thread. A device has one backward thread, and the ranks wait for one another.
        with torch.autograd.set_multithreading_enabled(False):
            return [o.detach(), *torch.autograd.grad(loss, [*parts, *gates])]

    expected = run(0, 1)
    pieces = [list(x) for x in zip(*over_ranks(2, lambda index: run(index, 2)), strict=True)]
    actual = [*(torch.cat(x, 1) for x in pieces[:6]), *(sum(x) for x in pieces[6:])]
    names = "o", "dq", "dk", "dv", "d beta", "d logits", "d a_log", "d bias"
    for name, got, wanted in zip(names, actual, expected, strict=True):
        error = ((got.float() - wanted.float()).norm() / wanted.float().norm()).item()
        assert error < (1e-2 if name == "o" else 2e-2), (name, error)


def check(
    length: int,
    dim_k: int,
    dim_v: int,
    dtype: torch.dtype,
    per_channel: bool,
    decay: float,
    bounds: torch.Tensor | None,
    gate: bool = False,
) -> None:
    """Require errors of at most 1e-2 on outputs and states, 2e-2 on gradients. gate: logits instead of log decays."""
    generator = torch.Generator("cuda").manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device="cuda", generator=generator)

    heads, sequences = 2, 1 if bounds is None else len(bounds) - 1
    q, k = (F.normalize(random(1, length, heads, dim_k), dim=-1).to(dtype) for _ in range(2))
    v, d_o = (random(1, length, heads, dim_v).to(dtype) for _ in range(2))
    g = -decay * random(1, length, heads, *((dim_k,) if per_channel else ())).abs().clamp_max(1.0)
    beta = random(1, length, heads).sigmoid()
    initial, d_final = (random(sequences, heads, dim_k, dim_v) for _ in range(2))
    assert select_kernel(q, k, v, beta, None, None, bounds) is Kernel.TRITON
    gates = [
        random(1, length, heads, dim_k).to(dtype),
        torch.full([heads], decay, device="cuda").log(),
        random(heads, dim_k),
    ]
    results = []
    for exact in (True, False):
        inputs = (q, k, v, beta, initial, *(gates if gate else [g]))
        given = [(x.float() if exact else x).detach().requires_grad_() for x in inputs]
        log_decay = SoftplusDecay(*given[5:]) if gate else given[5]
        o, final = delta_rule(
            *given[:3], log_decay, given[3], initial_state=given[4], output_final_state=True, cu_seqlens=bounds
        )
        assert final is not None
        loss = (o.float() * d_o.float()).sum() + (final * d_final).sum()
        results.append([o, final, *torch.autograd.grad(loss, given)])
    names = ["o", "final state", "dq", "dk", "dv", "d beta", "d initial state"]
    names += ["d logits", "d a_log", "d bias"] if gate else ["d log_decay"]
    for name, expected, actual in zip(names, *results, strict=True):
        error = ((actual.float() - expected.float()).norm() / expected.float().norm()).item()
        assert error < (2e-2 if name.startswith("d") else 1e-2), (name, error)
