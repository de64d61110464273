"""Mixers in 16 bits: rounding, float32 decays, and sums above the largest float16."""

from __future__ import annotations

import copy
from collections.abc import Callable
from math import exp
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import models.operators.delta_rule.delta_rule
import models.operators.gla.gated_linear_attention
import models.operators.lion.bidirectional_attention
import models.operators.scan.linear_scan
from models.layers.gated_norm import gated_head_norm
from models.operators.gla.normalized import linear_attention_with_normalizer
from tests.models.mixer_cases import CASES, build, name_of, tokens
from tests.models.rank_threads import over_ranks


def _has_no_decay(case: tuple[str, dict[str, Any]]) -> bool:
    return (
        case[0] in ("attention", "delta_net", "linear_attention", "normalised_attention")
        or case[1].get("variant") == "lit"
    )


@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_sixteen_bits(case: tuple[str, dict[str, Any]]) -> None:
    """Compare with float32 at the same (rounded) parameters."""
    mixer, x = build(case).bfloat16(), tokens(70).bfloat16()
    got = mixer(x)
    expected = mixer.float()(x.float())
    assert got.dtype == torch.bfloat16
    assert ((got.float() - expected).norm() / expected.norm()).item() < 0.05


@pytest.mark.parametrize("case", [case for case in CASES if not _has_no_decay(case)], ids=name_of)
def test_log_decays_stay_float32_in_sixteen_bits(
    monkeypatch: pytest.MonkeyPatch, case: tuple[str, dict[str, Any]]
) -> None:
    """Operators receive float32 log decays that were never rounded to the 16 bits of the activations."""
    seen: list[Tensor] = []

    def watch(module: Any, name: str, decay_of: Callable[[tuple[Any, ...]], Tensor]) -> None:
        function = getattr(module, name)

        def watched(*arguments: Any) -> Any:
            actual = function(*arguments)
            seen.append(actual[0] if name == "decays" else decay_of(arguments))
            return actual

        monkeypatch.setattr(module, name, watched)

    watch(models.operators.gla.gated_linear_attention, "check_shapes", lambda arguments: arguments[0].log_decay)
    watch(models.operators.delta_rule.delta_rule, "check_arguments", lambda arguments: arguments[3])
    watch(models.operators.scan.linear_scan, "_check", lambda arguments: arguments[1])
    watch(models.operators.lion.bidirectional_attention, "decays", lambda arguments: arguments[0])
    build(case).bfloat16()(tokens(70).bfloat16())
    assert seen
    for log_decay in seen:
        parts = torch.view_as_real(log_decay) if log_decay.is_complex() else log_decay
        assert parts.dtype == torch.float32
        assert (parts.bfloat16() != parts).any()


@pytest.mark.parametrize("norm", ["layernorm", "rmsnorm"])
def test_gated_head_norm_rounds_once(norm: str) -> None:
    o, gate = tokens(70).bfloat16().unflatten(-1, (4, 8)), tokens(71)[:, 1:].bfloat16()
    exact = gated_head_norm(o.double(), gate.double(), norm=norm)
    assert (gated_head_norm(o, gate, norm=norm) - exact).norm() <= 2**-9 * exact.norm()


@pytest.mark.parametrize(
    "case",
    [("linear_attention", {}), ("lion", {"variant": "lit", "phi": "elu", "output_norm": False})],
    ids=name_of,
)
def test_normalizers_above_the_largest_float16(case: tuple[str, dict[str, Any]]) -> None:
    """Compare outputs, state and gradients. The second half of the tokens continues the state of the first."""
    mixer, x = build(case, torch.float16, size=64, heads=1), (tokens(3000, size=64) + 0.5).half()
    results = []
    for dtype in (torch.float16, torch.float32):
        mixer.to(dtype).zero_grad()
        first, state = mixer(x[:, :1500].to(dtype), return_state=True)
        y = torch.cat([first, mixer(x[:, 1500:].to(dtype), state=state)], 1)
        (y.float() * tokens(3001, size=64)[:, 1:]).sum().backward()
        gradients = [parameter.grad.float() for parameter in mixer.parameters()]
        results.append([y.float(), y[:, 2800:].float(), state["recurrent"], *gradients])
    for got, expected in zip(*results, strict=True):
        assert ((got - expected).norm() / expected.norm()).item() < 1e-2


def test_normalised_attention_divides_sums_above_the_largest_float16() -> None:
    """Sum 10,000 keys, queries and values of ones: q_t S_t is 80,000, and eta is exp(8)."""
    mixer = build(("normalised_attention", {}), torch.float16, size=64, heads=1)
    with torch.no_grad():
        for projection, value in ((mixer.q_proj, 1), (mixer.k_proj, 1), (mixer.v_proj, 1), (mixer.eta_proj, 8)):
            projection.weight.zero_()[:, 0] = value
        mixer.out_proj.weight.copy_(torch.eye(64))
        y = mixer(torch.ones(1, 10_000, 64, dtype=torch.float16))
    expected = 8 * torch.arange(1.0, 10_001) * exp(-8)
    torch.testing.assert_close(y[0, :, 0].float(), expected, rtol=1e-2, atol=0)


@pytest.mark.parametrize("weight", [1, 100])
def test_normalizers_of_many_tokens_in_float16(weight: int) -> None:
    """Sum 70,000 tokens: with weight 1 the sum is above the largest float16. The scale allows a million tokens."""
    q = torch.full((1, 70_000, 1, 1), weight**0.5, dtype=torch.float16)
    v = torch.full_like(q, 3.0)
    num, den, _ = linear_attention_with_normalizer(q, q, v, torch.zeros_like(q), weight=weight)
    expected = weight * torch.arange(1, 70_001).view_as(den)
    torch.testing.assert_close(den, expected.float(), rtol=1e-3, atol=0)
    torch.testing.assert_close(num / den, v.float(), rtol=1e-3, atol=0)


@pytest.mark.parametrize("variant", ["lit", "lstm"])
@pytest.mark.parametrize("count", [1, 3])
def test_bidirectional_normalizers_above_the_largest_float16(variant: str, count: int) -> None:
    """Outputs and gradients, of the whole sequence and over context-parallel ranks, with decays of almost 1."""
    case = ("lion", {"variant": variant, "causal": False, "phi": "elu", "output_norm": False})
    mixer, x = build(case, torch.float16, size=64, heads=1), (tokens(3000, size=64) + 0.5).half()
    if variant == "lstm":
        nn.init.constant_(mixer.decay, 12.0)
        mixer.decay_weight.data *= 0.01
    weight = tokens(3001, size=64)[:, 1:]

    def outputs_and_gradients(mixer: nn.Module, x: Tensor, weight: Tensor) -> list[Tensor]:
        y = mixer(x)
        gradients = torch.autograd.grad((y.double() * weight).sum(), list(mixer.parameters()))
        return [y.detach().double(), *(gradient.double() for gradient in gradients)]

    exact = outputs_and_gradients(copy.deepcopy(mixer).double(), x.double(), weight)
    if count == 1:
        parts = [outputs_and_gradients(mixer, x, weight)]
    else:
        shards = list(zip(x.chunk(count, 1), weight.chunk(count, 1), strict=True))
        parts = over_ranks(count, lambda index: outputs_and_gradients(copy.deepcopy(mixer), *shards[index]))
    y, *gradients = zip(*parts, strict=True)
    for got, expected in zip([torch.cat(y, 1), *map(sum, gradients)], exact, strict=True):
        assert ((got - expected).norm() / expected.norm()).item() < 1e-2
