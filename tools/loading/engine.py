"""Build the engine of a configuration. This is the only place where `models` and `megatron_lite` meet for training."""

from __future__ import annotations

from megatron_lite.config.schema import Config
from megatron_lite.engine.engine import Engine
from megatron_lite.parallel.grid import Grid
from models.config import ModelConfig
from models.language_model import layer_specs
from models.operators.context_parallel import context_parallel
from models.recompute import recompute_elementwise


def build_engine(config: Config[ModelConfig], grid: Grid, dtype: str) -> Engine:
    """Return an engine with the initial weights of `run.seed`. Arguments and errors are those of `Engine`."""
    return Engine(
        config,
        grid,
        dtype,
        specs=layer_specs(config.model),
        context_parallel=context_parallel,
        recompute=recompute_elementwise,
    )
