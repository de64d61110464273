"""Initial parameters of the state-space mixers and gated RNNs."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from tests.models.mixers.test_mixers_ssm import assert_uniform, first


def test_initial_mamba_parameters() -> None:
    """dt log-uniform in [0.001, 0.1], A = -1, ..., -N; the convolution as torch.nn.Conv1d's."""
    mixer, heads = first("mamba"), first("mamba2")
    for bias in (mixer.dt_bias, heads.dt_bias):
        assert_uniform(F.softplus(bias.detach().double()).log10(), -3, -1)
    torch.testing.assert_close(mixer.a_log.exp(), torch.arange(1.0, 17).expand(2048, 16))
    assert_uniform(mixer.conv.weight.detach().flatten(), -0.5, 0.5)
    assert mixer.select_weight.std().item() == pytest.approx(0.03, rel=0.02)
    assert_uniform(heads.a_log.detach().exp(), 1, 16)


@pytest.mark.parametrize("exponent", [8.0, 2.0, 0.001])
def test_initial_rg_lru_decays(exponent: float) -> None:
    mixer = first("rg_lru", {"exponent": exponent})
    assert_uniform((-exponent * F.softplus(mixer.decay.detach().double())).exp(), 0.9, 0.999)
    for weight in (mixer.decay_gate_weight, mixer.input_gate_weight):
        assert weight.std().item() == pytest.approx(4**-0.5, rel=0.05)


def test_initial_s5_eigenvalues() -> None:
    """Eigenvalues uniform in the area of the ring, every state of variance 1 under white noise."""
    mixer = first("s5", {"min_radius": 0.3, "max_radius": 0.9})
    squared = (-2 * mixer.nu.detach().double().exp()).exp()
    assert_uniform(squared, 0.3**2, 0.9**2)
    assert_uniform(mixer.theta.detach().exp(), 0, 2 * math.pi)
    torch.testing.assert_close(mixer.log_gamma.double().exp() ** 2, 1 - squared, rtol=1e-5, atol=0)


def test_initial_rwkv4_parameters() -> None:
    """Appendix E for the second of three layers, d = 16: its layer over the last one is 1/2."""
    mixer = first("rwkv4", hidden_size=16, num_heads=2)
    for c in (0, 1, 7, 15):
        place = c / 16
        expected = {
            "mix_k": place ** (2 / 3),
            "mix_v": place ** (2 / 3) + 0.15,
            "mix_r": place ** (1 / 3),
            "decay": -5 + 8 * (c / 15) ** 1.35,
            "bonus": math.log(0.3) + {0: 0.0, 1: 0.5, 7: 0.5, 15: 0.0}[c],
        }
        assert {name: getattr(mixer, name)[c].item() for name in expected} == pytest.approx(expected, rel=1e-5)


def test_initial_hgrn2_lower_bounds() -> None:
    """Layer two of three starts at 1/3 in both parametrisations."""
    for where in ("free", "layer"):
        mixer = first("hgrn2", {"lower_bound_range": where})
        _, one_minus_f = mixer._gates(torch.full((1, 1, 1024), -1e3))
        torch.testing.assert_close(one_minus_f, torch.full_like(one_minus_f, 2 / 3))


def test_mamba2_norm_uses_the_models_epsilon() -> None:
    x = torch.randn(1, 5, 64)
    # The mean square is negligible beside these epsilons: the norm divides by 100 or 200.
    one, other = (first("mamba2", hidden_size=64, num_heads=2, norm_eps=eps)(x) for eps in (1e4, 4e4))
    torch.testing.assert_close(one, 2 * other, rtol=1e-3, atol=1e-6)


def test_initial_phases() -> None:
    """Compare with rotary frequencies over the channels of a head (TransNormer) or of the layer (HGRN)."""
    theta = first("transnormer", {"phase_base": 100.0}, hidden_size=32, num_heads=4).theta
    torch.testing.assert_close(theta, 100.0 ** (-torch.arange(8) / 8).repeat(4))
    theta = first("hgrn", {"rotation": True}, hidden_size=32, num_heads=4).theta
    torch.testing.assert_close(theta, 10000.0 ** (-torch.arange(32) / 32))
