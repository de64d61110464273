"""The settings of the optimizer's groups, and the order of parameters, which is their order in ZeRO's flat buffers."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from megatron_lite.config.loader import load_config
from megatron_lite.config.optimizer_schema import OptimizerConfig
from megatron_lite.optim.param_groups import build_optimizer
from megatron_lite.parallel.grid import init_grid
from models.config import ModelConfig
from tools.loading.engine import build_engine


@pytest.mark.parametrize(("name", "decays"), [("adamw", [0.2, 0.0]), ("muon", [0.2, 0.2, 0.0])])
def test_groups_have_the_settings_of_the_configuration(name: str, decays: list[float]) -> None:
    values = {"lr": 0.5, "betas": (0.3, 0.4), "eps": 1e-3, "weight_decay": 0.2, "no_weight_decay": ("norm",)}
    kinds = ["norm", "bias", "weight", "matrix"]
    parameters = [(nn.Parameter(torch.zeros(8)), kind) for kind in kinds]
    optimizer, fillers = build_optimizer(parameters, OptimizerConfig(name=name, **values))  # type: ignore[arg-type]
    assert not fillers
    kind_of = {id(parameter): kind for parameter, kind in parameters}
    groups = optimizer.param_groups
    assert [[kind_of[id(p)] for p in group["params"]] for group in groups] == (
        [["bias", "weight", "matrix"], ["norm"]] if name == "adamw" else [["matrix"], ["bias", "weight"], ["norm"]]
    )
    assert [group["weight_decay"] for group in groups] == decays
    assert [group["muon"] for group in groups] == ([False] * 2 if name == "adamw" else [True, False, False])
    assert {(group["lr"], group["betas"], group["eps"]) for group in groups} == {(0.5, (0.3, 0.4), 1e-3)}


@pytest.mark.parametrize("stage", [1, 2])
def test_parameters_of_whole_vectors_lie_at_multiples_of_16_bytes(stage: int) -> None:
    words = ["data.images.train=-", "optimizer.lr=1e-3", "schedule.train_steps=1", "batch.micro_batch_size=1"]
    words += ["batch.global_batch_size=1", "model.vocab_size=9", "model.num_layers=2", f"parallel.zero_stage={stage}"]
    config = load_config(["configs/model/lion_s_vit_tiny.yml"], words, model_type=ModelConfig, world_size=1)
    engine = build_engine(config, init_grid("cpu"), "bf16")
    parameters = {name: p for layer in engine.layers for name, p in layer.named_parameters()}
    engine.close()
    # One decay per head of two blocks, and one bias per class: 15 elements, which move those that follow.
    assert (parameters["mixer.decay"].numel(), parameters["bias"].numel()) == (3, 9)
    for name, parameter in parameters.items():
        assert parameter.numel() % 8 or parameter.data_ptr() % 16 == 0, name
