"""Build the engine of a configuration. This is the only place where `models` and `megatron_lite` meet for training."""

from __future__ import annotations

from megatron_lite.config.schema import Config
from megatron_lite.engine.engine import Engine
from megatron_lite.parallel.grid import Grid
from models.config import ModelConfig
from models.language_model import build_layer, layer_specs
from models.operators.context_parallel import context_parallel
from models.recompute import recompute_elementwise


def build_engine(config: Config[ModelConfig], grid: Grid, dtype: str) -> Engine:
    """Return an engine with the initial weights of `run.seed`. All but causal models also count correct predictions.

    Args:
        grid: has the sizes of `config.parallel`.
        dtype: "bf16", "fp16" or "fp32". The caller resolves `precision.dtype` "auto".

    Raises ValueError as `Engine`.
    """
    return Engine(
        layer_specs(config.model),
        build_layer,
        seed=config.run.seed,
        grid=grid,
        dtype=dtype,
        micro_batch_size=config.batch.micro_batch_size,
        accumulation=config.batch.gradient_accumulation_steps,
        optimizer=config.optimizer,
        parallel=config.parallel,
        precision=config.precision,
        sequence_length=config.batch.sequence_length,
        context_parallel=context_parallel,
        recompute=recompute_elementwise,
        count_correct=config.data.objective != "causal",
        predicted_fraction=config.data.predicted_fraction,
    )
