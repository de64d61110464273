"""Which layers a pipeline stage holds."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from megatron_lite.config.data_schema import DataConfig
from megatron_lite.engine.model_shard import ModelShard
from models.language_model import layer_specs
from tests.megatron_lite.conftest import model_config, run_config


@pytest.mark.parametrize(
    ("length", "data", "bounds"),
    [
        (16, {"objective": "causal"}, [0, 6, 8]),
        # The head runs at the masked positions only.
        (16, {"objective": "masked", "masked": {"rate": 0.1}}, [0, 4, 8]),
        # The FLOPs of attention per token grow with the length, those of the head do not.
        (4096, {"objective": "causal"}, [0, 4, 8]),
    ],
)
def test_stages_have_about_equal_flops(grid, length, data, bounds):
    model = model_config(("attention",), num_layers=6, vocab_size=4000)
    config: Any = run_config(model, length=length, pipeline=2).model_copy(update={"data": DataConfig(**data)})
    for rank in range(2):
        stage = replace(grid, pipe_rank=rank, pipe_size=2)
        shard = ModelShard(config, stage, layer_specs(model))
        assert shard.bounds == bounds
        assert list(shard.layers) == list(range(bounds[rank], bounds[rank + 1]))
