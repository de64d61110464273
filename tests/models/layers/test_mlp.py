"""The MLPs with a gate compute the equations of Shazeer 2020; the embedding is multiplied by its scale."""

from __future__ import annotations

import pytest
import torch

from models.config import ModelConfig
from models.language_model import LanguageModel
from models.layers.mlp import MLPS

ACTIVATIONS = {
    "swiglu": lambda x: x / (1 + torch.exp(-x)),
    "geglu": lambda x: x * torch.distributions.Normal(0.0, 1.0).cdf(x),
    "reglu": lambda x: x.clamp(min=0),
    "glu": lambda x: 1 / (1 + torch.exp(-x)),
    "bilinear": lambda x: x,
}


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_gated_mlp_equals_its_equation(name: str) -> None:
    config = ModelConfig(vocab_size=8, num_layers=1, hidden_size=32, num_heads=2, mlp=name, mlp_bias=True)
    assert config.mlp_width == 256
    torch.manual_seed(0)
    mlp = MLPS[name](config).double()
    x = torch.randn(3, 32, dtype=torch.double)
    for linear in (mlp.gate_proj, mlp.up_proj, mlp.down_proj):
        torch.nn.init.normal_(linear.bias)
    gate, up = (x @ linear.weight.T + linear.bias for linear in (mlp.gate_proj, mlp.up_proj))
    expected = (ACTIVATIONS[name](gate) * up) @ mlp.down_proj.weight.T + mlp.down_proj.bias
    torch.testing.assert_close(mlp(x), expected, rtol=1e-10, atol=1e-12)


def test_channel_mixing_equals_its_equation_and_decodes() -> None:
    shape = {"vocab_size": 8, "num_layers": 2, "hidden_size": 32, "num_heads": 2}
    config = ModelConfig(**shape, mixers=("kda", "attention"), mlp="rwkv7")
    assert config.mlp_width == 128
    mlp = MLPS["rwkv7"](config).double()
    assert mlp.mix.tolist() == [1 - channel / 32 for channel in range(32)]
    x = torch.randn(2, 5, 32, dtype=torch.double)
    before = torch.cat([torch.zeros_like(x[:, :1]), x[:, :-1]], 1)
    hidden = (x + mlp.mix * (before - x)) @ mlp.up_proj.weight.T
    torch.testing.assert_close(mlp(x), hidden.clamp(min=0) ** 2 @ mlp.down_proj.weight.T, rtol=1e-10, atol=1e-12)

    model = LanguageModel(config, seed=1).double()
    ids = torch.randint(0, 8, (2, 9), generator=torch.Generator().manual_seed(1))
    mask = torch.arange(9) >= torch.tensor([[0], [3]])
    full = model(ids, mask=mask)
    logits, state = model(ids[:, :6], mask=mask[:, :6], return_state=True)
    rest, _ = model(ids[:, 6:], state=state, return_state=True)
    torch.testing.assert_close(torch.cat([logits, rest], 1)[mask], full[mask], rtol=1e-5, atol=1e-6)
    packed = model(ids[:, mask[1]][1:], cu_seqlens=torch.tensor([0, 4, 6]))
    alone = model(ids[1:, 3:7])
    torch.testing.assert_close(packed[:, :4], alone, rtol=1e-5, atol=1e-6)


def test_embedding_scale_does_not_scale_positions_or_tied_head() -> None:
    shape = {"vocab_size": 11, "num_layers": 1, "hidden_size": 8, "num_heads": 2}
    config = ModelConfig(**shape, positions="learned", max_positions=6, embedding_scale=8**0.5)
    model = LanguageModel(config, seed=0)
    tokens = torch.tensor([[3, 1, 4, 1]])
    expected = 8**0.5 * model.embedding.weight[tokens] + model.embedding.positions.weight[:4]
    torch.testing.assert_close(model.embedding(tokens), expected)
    assert model.head.weight is model.embedding.weight
    hidden = torch.randn(1, 2, 8)
    torch.testing.assert_close(model.head(hidden), model.head.norm(hidden) @ model.embedding.weight.T)


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
def test_embedding_scale_out_of_range_is_refused(value: float) -> None:
    with pytest.raises(ValueError, match=r"model\.embedding_scale = .*: must be greater than 0 and finite"):
        ModelConfig(vocab_size=11, num_layers=1, hidden_size=8, num_heads=2, embedding_scale=value)
