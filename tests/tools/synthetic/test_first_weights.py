"""The initial weights of the models of the generated tasks."""

from __future__ import annotations

from math import sqrt

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tools.synthetic.experiment import load_experiment, plan
from tools.synthetic.network import Network


def _network(suite: str, task: str, model: str) -> Network:
    words = [f"tasks=[{task}]", f"models=[{model}]", "lrs=[1e-3]", "widths=[128]", "weight_decays=[0.1]"]
    (run,) = plan(load_experiment(suite, [*words, *(["more_lrs.lrs=[]"] if suite == "mqar" else [])]), "fp32")
    return Network(run)


def _deviation(network: Network, ending: str) -> float:
    result = [p for name, p in network.named_parameters() if name.endswith(ending)]
    assert result, ending
    return max(p.std().item() for p in result)


# Uniform numbers within a bound deviate by it over sqrt 3; PyTorch's bound is 1 / sqrt(inputs).
DEFAULT = 1 / sqrt(3 * 128)


@pytest.mark.parametrize(
    ("suite", "task", "model", "expected"),
    [
        ("mqar", "64x4", "metala", {"embedding.weight": 0.02, "q_proj.weight": 0.02, "up_proj.weight": 0.02}
         | dict.fromkeys(["out_proj.weight", "down_proj.weight"], 0.01)),
        ("mad", "memorization/vocabulary=512", "metala", {"embedding.weight": 0.02, "head.weight": DEFAULT,
         "q_proj.weight": 2**-2.5 * sqrt(2 / (64 + 128)), "out_proj.weight": 2**-2.5 * sqrt(2 / 256),
         "up_proj.weight": DEFAULT, "down_proj.weight": 1 / sqrt(3 * 352)}),
        ("mad", "memorization/vocabulary=512", "attention", {"q_proj.weight": DEFAULT, "out_proj.weight": DEFAULT}),
        ("mad", "selective_copying/vocabulary=128", "mamba", {"select_weight": 1 / sqrt(3 * 256), "dt_weight": 1 / sqrt(3 * 8),
         "x_proj.weight": DEFAULT}),
        ("mad", "compression/vocabulary=128", "mamba", dict.fromkeys(["select_weight", "dt_weight"], 0.02) | {"dt_bias": 0.0}),
        ("mad", "compression/vocabulary=128", "lion_s", {"decay_weight": 0.02}),
        ("mad", "compression/vocabulary=128", "metala", dict.fromkeys(
            ["embedding.weight", "head.weight", "q_proj.weight", "up_proj.weight", "layers.1.weight", "layers.4.weight"],
            0.02)),
    ],
)  # fmt: skip
def test_first_weights(suite: str, task: str, model: str, expected: dict[str, float]) -> None:
    network = _network(suite, task, model)
    for ending, deviation in expected.items():
        assert _deviation(network, ending) == pytest.approx(deviation, rel=0.08), ending
    again = dict(_network(suite, task, model).named_parameters())
    assert all(p.equal(again[name]) for name, p in network.named_parameters())


def test_output_projection_has_a_bias() -> None:
    """Check that the bias is zero at first, as in MAD-Lab, and acts on logits, loss and training."""
    network = plan_and_build([])
    bias = network.model.head.bias
    assert bias is not None
    assert not bias.any()
    nn.init.normal_(bias)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, len(bias), (2, 32), generator=generator)
    logits = network.logits(tokens, None)
    hidden = network.model.head.norm(network.rows(tokens, None))
    torch.testing.assert_close(logits, hidden @ network.model.head.weight.T + bias)
    loss = network.loss(tokens, None, tokens)
    assert loss.item() == pytest.approx(F.cross_entropy(logits.flatten(0, 1), tokens.flatten()).item(), rel=1e-5)
    loss.backward()
    assert bias.grad is not None
    assert bias.grad.abs().min() > 0
    assert plan_and_build(["network.head_bias=false"]).model.head.bias is None
    with pytest.raises(ValueError, match="head_bias = 'so': allowed are true and false"):
        plan_and_build(["network.head_bias=so"])


def test_unknown_first_weights_are_refused() -> None:
    with pytest.raises(ValueError, match="first_weights = 'mad': allowed are model, mad_lab, mad_lab_gla"):
        plan_and_build(["network.first_weights=mad", "definitions.metala.first_weights=mad"])


def plan_and_build(words: list[str]) -> Network:
    words = ["tasks=[memorization/baseline]", "models=[metala]", "lrs=[1e-3]", "weight_decays=[0.1]", *words]
    return Network(plan(load_experiment("mad", words), "fp32")[0])
