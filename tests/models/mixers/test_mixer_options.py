"""Initial values that options of mixers set, and options that are refused."""

from __future__ import annotations

from math import inf, log
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from models.config import ModelConfig
from models.layers.complex_decay import hippo_angles
from models.layers.forget_gate import bounded_forget_gate
from models.layers.initial_decays import decay_logits, hippo_log_decays
from models.mixers import MIXERS
from tests.models.mixer_cases import SIZE, build


def initial_mixer(name: str, options: dict[str, Any], size: int = 32) -> Any:
    torch.manual_seed(3)
    config = ModelConfig(
        vocab_size=8, num_layers=1, hidden_size=size, num_heads=4, mixers=(name,), mixer_options={name: options}
    )
    return MIXERS[name](config, 0, config.options_of(name))


def test_initial_lion_decays() -> None:
    def decays(**options: Any) -> list[float]:
        return torch.sigmoid(initial_mixer("lion", options).decay.double()).tolist()

    assert decays(decay_init="half") == [0.5] * 4
    assert decays(variant="d", decay_init="retnet") == pytest.approx([1 - 2.0 ** (-5 - h) for h in range(4)], abs=1e-8)
    assert decays(decay_init="half_life", half_life=10) == pytest.approx([0.5**0.1] * 4, rel=1e-6)


def test_initial_decays_and_values_of_long_range_arena() -> None:
    """Check the diagonal A = -(n + 1) of HiPPO-LegS, and the zero-order hold A^-1 (exp(A dt) - I)."""
    options = {"decay_per": "channel", "decay_init": "hippo", "dt_min": 0.01, "dt_max": 0.08, "init_std": 0.1}
    rates = torch.outer(torch.tensor([0.01, 0.02, 0.04, 0.08], dtype=torch.float64), torch.arange(1.0, 9.0).double())
    lion = initial_mixer("lion", {**options, "value_init": "zero_order_hold"})
    torch.testing.assert_close(torch.sigmoid(lion.decay.double()), (-rates).exp().flatten(), rtol=1e-6, atol=0)
    held = (1 - (-rates).exp()) / torch.arange(1.0, 9.0)
    torch.testing.assert_close(lion.v_proj.weight.double().diag(), held.flatten(), rtol=1e-6, atol=0)
    assert lion.v_proj.weight.count_nonzero() == 32
    lin = {**options, "decay_init": "s4d_lin", "decay_per": "value_channel", "causal": False}
    other = initial_mixer("lion", {**lin, "value_init": "zero_order_hold"})
    expected = (-0.01 * 8 ** (torch.arange(32, dtype=torch.float64) / 31) / 2).exp()
    torch.testing.assert_close(torch.sigmoid(other.decay.double()), expected, rtol=1e-6, atol=0)
    torch.testing.assert_close(other.v_proj.weight.double().diag(), 2 * (1 - expected), rtol=1e-6, atol=0)
    retnet = initial_mixer("lion", {"decay_init": "retnet", "value_init": "zero_order_hold"})
    last = 1 - 2.0**-8
    assert retnet.v_proj.weight[-1, -1].item() == pytest.approx((1 - last) / -log(last), rel=1e-6)
    for weight in (lion.q_proj.weight, lion.k_proj.weight, lion.decay_weight):
        assert weight.std().item() == pytest.approx(0.1, rel=0.1)
    for name in ("metala", "metala_bidirectional"):
        metala = initial_mixer(name, {"decay_init": "hippo", "dt_min": 0.01, "dt_max": 0.08})
        alpha = torch.sigmoid(metala.decay.double()) ** (1 / 16)
        torch.testing.assert_close(alpha, (-rates[:, :4]).exp().flatten(), rtol=1e-6, atol=0)


def test_initial_complex_decays_and_values() -> None:
    """Check S4D-Lin, L = -1/2 + i pi n, and its zero-order hold as a product of complex numbers."""
    options = {"decay_per": "value_channel", "causal": False, "decay_init": "s4d_lin", "complex_decay": True}
    lion = initial_mixer("lion", {**options, "dt_min": 0.01, "dt_max": 0.08, "value_init": "zero_order_hold"})
    step = 0.01 * 8 ** (torch.arange(16, dtype=torch.float64) / 15)  # four pairs of channels in each of four heads
    rate = torch.complex(torch.full((16,), -0.5, dtype=torch.float64), torch.pi * torch.arange(4.0).repeat(4).double())
    torch.testing.assert_close(torch.sigmoid(lion.decay.double()), (-step / 2).exp(), rtol=1e-6, atol=0)
    assert not lion.frequency_offset.any()
    angle = hippo_angles(lion.frequency_offset.double(), lion.head_index, 4, lion.options)
    torch.testing.assert_close(angle, (rate.imag * step).view(4, 4), rtol=1e-9, atol=0)
    x = torch.randn(5, 4, 2, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    held = (torch.exp(rate * step) - 1) / rate
    expected = torch.complex(x[:, :, 0], x[:, :, 1]) * held.view(4, 4)
    actual = F.linear(x.flatten(1), lion.v_proj.weight.double()).view(5, 4, 2, 4)
    torch.testing.assert_close(actual, torch.stack([expected.real, expected.imag], 2), rtol=1e-5, atol=1e-7)


def test_initial_complex_decays_of_metala() -> None:
    """Check alpha e^(i angle) = exp(-dt / 2 + i pi n dt) for four channels of keys in each of four heads."""
    options = {"decay_init": "s4d_lin", "complex_decay": True, "dt_min": 0.01, "dt_max": 0.08}
    metala = initial_mixer("metala_bidirectional", options)
    step = 0.01 * 8 ** (torch.arange(16, dtype=torch.float64) / 15)
    alpha = torch.sigmoid(metala.decay.double()) ** (1 / 16)
    torch.testing.assert_close(alpha, (-step / 2).exp(), rtol=1e-6, atol=0)
    angle = hippo_angles(metala.frequency_offset.double(), metala.head_index, 4, metala.options)
    frequency = torch.pi * torch.arange(4, dtype=torch.float64)
    torch.testing.assert_close(angle, frequency * step.view(4, 4), rtol=1e-9, atol=0)


def test_complex_decays_need_pairs_of_channels() -> None:
    options = {"decay_per": "value_channel", "causal": False, "decay_init": "s4d_lin", "complex_decay": True}
    with pytest.raises(ValueError, match=r"complex_decay = true with heads of 3 channels: make .* even, or set"):
        initial_mixer("lion", options, size=12)


def test_decays_near_zero_have_finite_logits() -> None:
    """Test heads of 64 channels: the 16th power of the fastest decay is exp(-102)."""
    log_decay = hippo_log_decays(8, 64, 0.001, 0.1)
    logits = decay_logits(16 * log_decay)
    assert logits.isfinite().all()
    torch.testing.assert_close(F.logsigmoid(logits.double()) / 16, log_decay, rtol=1e-6, atol=0)


def test_per_channel_decays_begin_as_those_of_their_head() -> None:
    per_head, per_channel = (initial_mixer("lion", {"decay_per": per}).decay for per in ("head", "channel"))
    assert torch.equal(per_head.repeat_interleave(8), per_channel)


@pytest.mark.parametrize("gamma", [-120.0, -2.0, 5.0, 12.0, 20.0])
@pytest.mark.parametrize("where", ["free", "layer"])
def test_hgrn2_forget_gates_near_one_keep_their_digits(where: str, gamma: float) -> None:
    """Compare log f, 1 - f and finite gradients in float32 with float64."""
    results, gradients = [], []
    for dtype in (torch.float32, torch.float64):
        mixer = build(("hgrn2", {"lower_bound_range": where}), dtype)
        nn.init.constant_(mixer.lower_bound, gamma)
        a = torch.linspace(-30, 30, SIZE, dtype=dtype)[None, None].requires_grad_()
        gates = torch.stack(mixer._gates(a))
        results.append(gates.double())
        gradients.append([x.double() for x in torch.autograd.grad(gates.sum(), [a, mixer.lower_bound])])
    torch.testing.assert_close(*results, rtol=1e-5, atol=0)
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("bound", [0.0, 1e-9, 0.5, 0.99])
def test_forget_gate_with_a_fixed_bound(bound: float) -> None:
    a = torch.linspace(-30, 30, SIZE)
    beta = torch.tensor(bound, dtype=torch.float64)
    gates = bounded_forget_gate(a, beta.float().log(), torch.log1p(-beta).float())
    closed, gate = (1 - beta) * torch.sigmoid(-a.double()), beta + (1 - beta) * torch.sigmoid(a.double())
    log_forget = torch.where(closed < 0.5, torch.log1p(-closed), gate.log())
    torch.testing.assert_close([x.double() for x in gates], [log_forget, closed], rtol=1e-5, atol=0)


def test_hgrn2_lower_bounds_grow_with_depth() -> None:
    """Return the smallest decay that a layer can have, for any value of its parameter."""

    def smallest(layer: int, gamma: float) -> float:
        mixer = build(("hgrn2", {}), torch.float64, layer=layer)
        if mixer.lower_bound is not None:
            nn.init.constant_(mixer.lower_bound, gamma)
        return mixer._gates(torch.full((1, SIZE), -200.0, dtype=torch.float64))[0].exp().max().item()

    assert smallest(0, 0.0) < 1e-80
    assert smallest(1, 0.0) == pytest.approx(1 / 3)
    assert smallest(0, 0.0) < smallest(1, -9.0) < smallest(1, 9.0) < smallest(2, -9.0) < smallest(2, 9.0) < 1


@pytest.mark.parametrize(
    ("mixer", "options", "message"),
    [
        ("lion", {"variant": "x"}, r"lion\.variant = 'x': allowed are lit, d, s, lstm, grfa"),
        (
            "lion",
            {"phi": "gelu"},
            r"lion\.phi = 'gelu': allowed are silu, silu_paper, elu, sigmoid, relu, softplus, none",
        ),
        (
            "lion",
            {"variant": "lit", "decay_per": "channel"},
            r"lion\.decay_per = channel with variant = lit, .* no decay",
        ),
        (
            "lion",
            {"variant": "lit", "value_init": "zero_order_hold"},
            r"value_init = zero_order_hold with variant = lit",
        ),
        ("lion", {"decay_init": "hippo"}, r"decay_init = hippo with decay_per = head: .*lion\.decay_per = channel"),
        ("lion", {"decay_init": "s4d_lin"}, r"decay_init = s4d_lin with decay_per = head"),
        (
            "lion",
            {"decay_per": "value_channel"},
            r"variant = s, causal = true: it is for variants d, s and grfa with causal = false",
        ),
        (
            "lion",
            {"decay_per": "value_channel", "variant": "lstm", "causal": False},
            r"variant = lstm, causal = false: it is",
        ),
        (
            "lion",
            {"decay_per": "value_channel", "variant": "grfa", "causal": False},
            r"scaled = true with decay_per = value_channel and variant = grfa, .* set scaled = false",
        ),
        (
            "lion",
            {"complex_decay": True},
            r"complex_decay = true with decay_per = head and decay_init = retnet: set decay_per = value_channel",
        ),
        (
            "lion",
            {"complex_decay": True, "decay_per": "value_channel", "causal": False},
            r"decay_init = retnet: set decay_per = value_channel and decay_init = s4d_lin",
        ),
        ("lion", {"dt_min": 0.2}, r"lion\.dt_min = 0\.2 with dt_max = 0\.1: set 0 < dt_min <= dt_max"),
        ("lion", {"init_std": 0.0}, r"lion\.init_std = 0\.0: must be greater than 0"),
        ("metala", {"dt_min": 0.0}, r"metala\.dt_min = 0 with dt_max = 0\.1"),
        ("metala_bidirectional", {"dt_max": 0.0}, r"metala_bidirectional\.dt_min = 0\.001 with dt_max = 0"),
        ("lion", {"half_life": 0}, r"lion\.half_life = 0: must be greater than 0"),
        ("lion", {"mask_convention": "shifted"}, r"causal = false"),
        ("lion", {"phi": "none"}, r"normalizers may be 0"),
        ("lion", {"variant": "lstm", "scaled": False}, r"max\(\|normalizer\|, 1\)"),
        (
            "metala_bidirectional",
            {"complex_decay": True, "decay_init": "hippo"},
            r"metala_bidirectional\.complex_decay = true with decay_init = hippo: set decay_init = s4d_lin, or complex_decay = f",
        ),
        ("metala_bidirectional", {"preset": "x"}, r"metala_bidirectional\.preset = 'x': allowed are released, paper"),
        ("metala_bidirectional", {"conv_kernel": 0}, r"metala_bidirectional\.conv_kernel = 0: must be at least 1"),
        ("normalised_attention", {"normaliser": "x"}, r"allowed are exp, softplus, sigmoid"),
        ("gla", {"low_rank": 0}, r"gla\.low_rank = 0: must be at least 1"),
        ("gla", {"temperature": 0}, r"gla\.temperature = 0: must be greater than 0"),
        ("gla", {"conv_kernel": -1}, r"gla\.conv_kernel = -1: must be at least 0"),
        ("gla", {"expand_k": 0.3}, r"key_dim of gla, .* 0\.3 = 9\.6: must be a whole number, which model\.num_heads"),
        ("gla", {"expand_k": inf}, r"gla\.expand_k = inf: must be greater than 0 and finite"),
        ("gla", {"norm_eps": inf}, r"gla\.norm_eps = inf: must be greater than 0 and finite"),
        ("metala", {"dt_max": inf}, r"dt_max = inf: set 0 < dt_min <= dt_max, both finite"),
        ("retnet", {"rotary_base": 0.0}, r"retnet\.rotary_base = 0\.0: must be greater than 0"),
        ("transnormer", {"phase_base": -1.0}, r"transnormer\.phase_base = -1\.0: must be greater than 0"),
        ("metala", {"dynamic_decay": False}, r"key_projection = true"),
        ("metala", {"expand_k": 0}, r"metala\.expand_k = 0: must be greater than 0"),
        ("linear_attention", {"feature_map": "x"}, r"linear_attention\.feature_map = 'x': allowed are elu, taylor"),
        ("linear_attention", {"feature_dim": 0}, r"linear_attention\.feature_dim = 0: must be at least 1"),
        ("retnet", {"expand_v": 0}, r"retnet\.expand_v = 0: must be at least 1"),
        ("transnormer", {"phase": "x"}, r"transnormer\.phase = 'x': allowed are all, first, none"),
    ],
)
def test_invalid_options_are_refused(mixer: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build((mixer, options))


@pytest.mark.parametrize("mixer", ["gla", "retnet", "metala_bidirectional"])
def test_heads_that_do_not_divide_are_refused(mixer: str) -> None:
    with pytest.raises(ValueError, match=rf"num_heads = 8 does not divide .*\b{mixer}\b.*; nearest that do: .*4"):
        build((mixer, {}), size=8, heads=8)


def test_product_that_is_whole_up_to_rounding_is_a_key_dim() -> None:
    """Multiply 90 by 0.7, which is 62.99999999999999 in binary."""
    assert build(("gla", {"expand_k": 0.7}), size=90, heads=9).q_proj.out_features == 63
