"""The order of parameters in the optimizer's groups, which is their order in ZeRO's flat buffers."""

from __future__ import annotations

import pytest

from megatron_lite.config.loader import load_config
from megatron_lite.parallel.grid import init_grid
from models.config import ModelConfig
from tools.loading.engine import build_engine


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
