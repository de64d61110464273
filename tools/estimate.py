"""What a run costs before it starts: its configuration for so many processes, FLOPs, memory by part, and what is sent."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # torch is imported where it is used, so that --help answers at once
    from megatron_lite.communication import Workload
    from megatron_lite.config_schema import Config
    from megatron_lite.layout import Layout
    from megatron_lite.memory import LayerCost
    from models.config import ModelConfig


def read_config(words: Sequence[str], gpus: int) -> Config[ModelConfig]:
    """The configuration for so many processes. Accumulation follows from the layout."""
    from megatron_lite.config import load_config
    from models.config import ModelConfig

    files = [word for word in words if "=" not in word]
    overrides = [word for word in words if "=" in word]
    overrides.append("batch.gradient_accumulation_steps=null")
    return load_config(files, overrides, model_type=ModelConfig, world_size=gpus)


def layer_flops(config: Config[ModelConfig]) -> list[float]:
    """Forward FLOPs a token of every layer."""
    import torch

    from megatron_lite.flops import forward_flops
    from models.lm import build_layer, layer_specs

    with torch.device("meta"):
        layers: list[Any] = [build_layer(spec, index, None) for index, spec in enumerate(layer_specs(config.model))]
    return forward_flops(layers, config.batch.sequence_length, config.data.asked_share)


def memory(
    layers: list[LayerCost],
    flops: Sequence[float],
    config: Config[ModelConfig],
    layout: Layout,
    dtype: str,
    stage: int,
    *,
    overlap: bool = True,
    released: bool = True,
) -> dict[str, float]:
    """Bytes by part of the fullest process: of the stages of a pipeline, the first holds most micro batches."""
    from megatron_lite.layout import stage_bounds
    from megatron_lite.memory import Setting, step_bytes

    bounds = stage_bounds(flops, layout.pipeline)
    steps = config.batch.gradient_accumulation_steps
    replicas = config.batch.data_ranks * layout.context
    stages = []
    for index in range(layout.pipeline):
        own = layers[bounds[index] : bounds[index + 1]]
        in_flight = min(steps, layout.pipeline - index)
        if config.model.tie_embeddings and layout.pipeline > 1 and index == layout.pipeline - 1:
            own = [*own[:-1], replace(own[-1], parameters=own[-1].parameters + layers[0].largest)]
        state, graphs = config.precision.optimizer_state, config.parallel.cuda_graph and layout.pipeline == 1
        setting = Setting(dtype, stage, replicas, steps, in_flight, overlap, released, state, graphs)
        stages.append(step_bytes(own, setting))
    return max(stages, key=lambda parts: sum(parts.values()))


def workload(config: Config[ModelConfig], flops: Sequence[float], dtype: str) -> Workload:
    """What the model of communication needs to know."""
    from megatron_lite.communication import Workload
    from models.lm import count_parameters

    model, batch = config.model, config.batch
    mixers = {model.mixer_of(index) for index in range(model.num_layers)}
    # Every linear mixer of the project holds at most d^2 / heads numbers; softmax attention has no state to send.
    state = 0 if mixers <= {"attention"} else model.hidden_size**2 // model.num_heads
    return Workload(
        parameters=count_parameters(model),
        layers=model.num_layers,
        hidden=model.hidden_size,
        state_elements=state,
        sequence_length=batch.sequence_length,
        micro_batch_size=batch.micro_batch_size,
        global_batch_size=batch.global_batch_size,
        flops_per_token=3 * sum(flops),
        width=4 if dtype == "fp32" else 2,
        recompute=config.parallel.activation_checkpointing.mode == "full",
    )
