"""The mixers of the delta rule: initial parameters, weight decay, sizes of the published models."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from megatron_lite.optim.param_groups import parameter_kind
from models.config import ModelConfig
from models.language_model import LanguageModel
from tests.models import mixer_equations as equations
from tests.models.mixer_cases import HEADS, SIZE, assert_close, build, tokens
from tests.models.mixers.test_mixers_ssm import assert_uniform, first


@pytest.mark.parametrize(("name", "low"), [("gated_delta_net", 0), ("kda", 1), ("gdn2", 1)])
def test_initial_decays(name: str, low: float) -> None:
    """Check dt log-uniform in [0.001, 0.1] and exp(A_log) uniform up to 16."""
    mixer = first(name)
    assert_uniform(F.softplus(mixer.dt_bias.detach().double()).log10(), -3, -1)
    assert_uniform(mixer.a_log.detach().exp(), low, 16)
    torch.testing.assert_close(mixer.norm_weight.detach(), torch.ones_like(mixer.norm_weight))


@pytest.mark.parametrize("name", ["gated_delta_net", "kda", "gdn2"])
def test_decay_parameters_have_no_weight_decay(name: str) -> None:
    mixer = build((name, {}))
    kinds = {key: parameter_kind(mixer, key) for key, _ in mixer.named_parameters()}
    assert {key for key, kind in kinds.items() if kind != "weight"} >= {"a_log", "dt_bias", "norm_weight"}
    assert kinds["a_log"] == "decay"


def test_rwkv7_equals_its_equations_and_returns_the_first_values() -> None:
    first, second = (build(("rwkv7", {}), torch.float64, layer=layer) for layer in (0, 1))
    x = tokens(70, dtype=torch.float64)
    weights = [{k: v.detach() for k, v in mixer.named_parameters()} for mixer in (first, second)]
    y, values = first(x, return_values=True)
    expected, expected_values = equations.rwkv7(weights[0], x[0], HEADS)
    assert_close(y[0], expected, 1e-9)
    assert_close(values[0], expected_values, 1e-12)
    y, same = second(x, values=values, return_values=True)
    assert_close(y[0], equations.rwkv7(weights[1], x[0], HEADS, expected_values)[0], 1e-9)
    assert torch.equal(same, values)
    # Rows between layers are fewer and longer where the sequence is sharded.
    assert torch.equal(second(x, values=values.reshape(1, 35, -1)), y)
    with pytest.raises(ValueError, match="needs `values` of the first"):
        second(x)


def value_residual_model(*mixers: str, **changes: Any) -> LanguageModel:
    shape = {"vocab_size": 31, "num_layers": 4, "hidden_size": 16, "num_heads": 2, "intermediate_size": 32}
    model = LanguageModel(ModelConfig(**shape, mixers=mixers, **changes), seed=5).double()
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    return model


@pytest.mark.parametrize("shape", [(2, 0), (0, 5)])
def test_rwkv7_returns_values_of_no_tokens(shape: tuple[int, int]) -> None:
    first, second = (build(("rwkv7", {}), layer=layer) for layer in (0, 1))
    x = torch.zeros(*shape, SIZE)
    y, values = first(x, return_values=True)
    # A block keeps the values behind the hidden state, where it knows them by their width.
    assert values.shape == y.shape == x.shape
    assert second(x, values=values).shape == x.shape
    assert value_residual_model("rwkv7")(torch.zeros(shape, dtype=torch.int64)).shape[:2] == shape


@pytest.mark.parametrize("mixers", [("rwkv7",), ("kda", "rwkv7"), ("rwkv7", "kda", "kda")])
def test_models_with_a_value_residual_decode_as_the_full_forward(mixers: tuple[str, ...]) -> None:
    model = value_residual_model(*mixers)
    ids = torch.randint(0, 31, (2, 12), generator=torch.Generator().manual_seed(1))
    full = model(ids)
    logits, state = model(ids[:, :8], return_state=True)
    parts = [logits]
    for t in range(8, 12):
        logits, state = model(ids[:, t : t + 1], state=state, return_state=True)
        parts.append(logits)
    assert_close(torch.cat(parts, 1), full, 1e-10)


def test_all_layers_read_the_values_of_the_first() -> None:
    model = value_residual_model("rwkv7")
    ids = torch.randint(0, 31, (1, 9), generator=torch.Generator().manual_seed(1))
    hidden = model.embedding(ids)
    widths = []
    for block in model.blocks:
        hidden = block(hidden)
        widths.append(hidden.shape[-1])
    assert widths == [32, 32, 32, 16]
    with torch.no_grad():
        expected = model(ids)
        model.blocks[0].mixer.out_proj.weight.zero_()
        without = model(ids)
        model.blocks[0].mixer.v_proj.weight.mul_(2)
        # The first layer's own output is zero: its values reach the others alone.
        assert (model(ids) - without).abs().max() > 1e-3
    assert (without - expected).abs().max() > 1e-3


def test_rwkv7_begins_as_the_released_models() -> None:
    mixer = first("rwkv7", hidden_size=128, num_heads=2)
    decay = torch.sigmoid(mixer.decay_up.bias.detach())
    # The second of three layers: w from exp(-0.6) to 1 within a head, and later channels decay faster.
    assert decay[:64].argmax() == 63
    assert decay[64:].mean() > decay[:64].mean()
    assert not mixer.decay_down.weight.any()
    torch.testing.assert_close(mixer.norm_weight.detach(), torch.full((128,), (2 / 3) ** 0.7))
    for name, power in zip("rwkvag", (0.2, 0.9, 0.7, 0.7, 0.9, 0.2), strict=True):
        mixes = [1 - (channel / 128) ** (power * 2 / 3) for channel in range(128)]
        assert getattr(mixer, f"mix_{name}").tolist() == pytest.approx(mixes, abs=1e-6)
    lines = [channel / 127 - 0.5 for channel in range(128)]
    inside = [(channel % 64 - 31.5) / 31.5 for channel in range(128)]
    zigzag = [place * abs(place) for place in inside]
    rates = [-0.19 + 0.3 * z + 0.4 * line for z, line in zip(zigzag, lines, strict=True)]
    assert mixer.rate_up.bias.tolist() == pytest.approx(rates, abs=1e-6)
    assert mixer.value_up.bias.tolist() == pytest.approx([0.73 - 0.4 * line for line in lines], abs=1e-6)
    assert mixer.removal_scale.tolist() == pytest.approx([0.71 - 0.1 * line for line in lines], abs=1e-6)
    decays = [-5.5 + 6 * (line + 0.5) ** (1 + 0.5**0.3) + 2.5 * z for z, line in zip(zigzag, lines, strict=True)]
    assert mixer.decay_up.bias.tolist() == pytest.approx(decays, abs=1e-5)
    assert mixer.key_scale.tolist() == pytest.approx([1.02] * 128)
    assert mixer.bonus.tolist() == pytest.approx([-0.04] * 128)
    assert parameter_kind(mixer, "mix_r") == "norm"


def test_decimal_fractions_set_whole_widths() -> None:
    """Accept 45 x 1.4, which is 62.99999999999999 in binary."""
    assert build(("kda", {"head_dim": 45, "expand_v": 1.4})).norm_weight.shape == (63,)


@pytest.mark.parametrize(
    ("mixer", "options", "message"),
    [
        ("kda", {"num_value_heads": 6}, r"kda\.num_value_heads = 6 is not a multiple of .*num_heads = 4; .*: 4 or 8"),
        ("kda", {"head_dim": 5, "expand_v": 0.5}, r"kda\.expand_v = 0\.5: .* 2\.5 channels .* for example 2 / 5"),
        ("rwkv7", {"norm_eps": 0.0}, r"rwkv7\.norm_eps = 0\.0: must be greater than 0"),
        ("gdn2", {"conv_kernel": 0}, r"gdn2\.conv_kernel = 0: must be at least 1"),
        ("delta_net", {"expand_v": 0.0}, r"delta_net\.expand_v = 0\.0: must be greater than 0"),
        (
            "kda",
            {"num_heads": 3},
            r"kda\.num_heads = 3 does not divide key_dim of kda, .* = 32; nearest that do: 2 or 4",
        ),
        (
            "gated_delta_net",
            {"num_heads": 5},
            r"gated_delta_net\.num_heads = 5 does not divide .* 0\.75 .* = 24; .*4 or 6",
        ),
    ],
)
def test_heads_and_widths_that_do_not_fit_are_refused(mixer: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build((mixer, options))
