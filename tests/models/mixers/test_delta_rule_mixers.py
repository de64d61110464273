"""The mixers of the delta rule: initial parameters, weight decay, sizes of the published models."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from megatron_lite.optim.param_groups import parameter_kind
from tests.models.mixer_cases import build
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
