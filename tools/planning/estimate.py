"""What a run costs before it starts: its configuration for so many processes, FLOPs, memory by part, and what is sent."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # torch is imported where it is used, so that --help answers at once
    from torch import Tensor

    from megatron_lite.config.schema import Config
    from megatron_lite.parallel.layout import Layout
    from megatron_lite.planning.communication_cost import Workload
    from megatron_lite.planning.memory import LayerCost
    from models.config import ModelConfig


def read_config(words: Sequence[str], gpus: int) -> Config[ModelConfig]:
    """The configuration for so many processes. Accumulation follows from the layout where both batch sizes are given."""
    from megatron_lite.config.loader import ConfigError, load_config
    from models.config import ModelConfig
    from tools.loading.vocab_size import vocabulary_override

    files = [word for word in words if "=" not in word]
    overrides = [word for word in words if "=" in word]
    overrides += vocabulary_override(files, overrides)
    try:
        free = [*overrides, "batch.gradient_accumulation_steps=null"]
        return load_config(files, free, model_type=ModelConfig, world_size=gpus)
    except ConfigError:
        return load_config(files, overrides, model_type=ModelConfig, world_size=gpus)


def any_layout(words: Sequence[str], gpus: int) -> tuple[Config[ModelConfig], list[str], Exception | None]:
    """The configuration, the words that hold its batch in every layout, and why its own layout cannot run, if so: the
    batch may divide in others. Raises ConfigError for what no layout mends."""
    from megatron_lite.config.loader import ConfigError

    problem = None
    try:
        config = read_config(words, gpus)
    except ConfigError as error:
        problem = error
        alone = [f"parallel.{key}=1" for key in ("tensor", "pipeline", "context")]
        try:
            config = read_config([*words, *alone, "parallel.sequence_parallel=false"], 1)
        except ConfigError:
            raise error from None
    sizes = ("micro_batch_size", "global_batch_size")
    return config, [*words, *(f"batch.{key}={getattr(config.batch, key)}" for key in sizes)], problem


def layer_flops(config: Config[ModelConfig]) -> list[float]:
    """Forward FLOPs a token of every layer."""
    import torch

    from megatron_lite.planning.flops import forward_flops
    from models.language_model import build_layer, layer_specs

    with torch.device("meta"):
        layers: list[Any] = [build_layer(spec, index, None) for index, spec in enumerate(layer_specs(config.model))]
    return forward_flops(layers, config.batch.sequence_length, config.data.predicted_fraction)


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
    from megatron_lite.planning.memory import Setting, step_bytes

    steps = config.batch.gradient_accumulation_steps
    replicas = config.batch.data_ranks * layout.context
    stages = []
    for own, in_flight in layers_of_stages(layers, flops, config, layout):
        state, graphs = config.precision.optimizer_state, config.parallel.cuda_graph and layout.pipeline == 1
        setting = Setting(dtype, stage, replicas, steps, in_flight, overlap, released, state, graphs)
        stages.append(step_bytes(own, setting))
    return max(stages, key=lambda parts: sum(parts.values()))


def memory_of(config: Config[ModelConfig], dtype: str, *, cuda: bool = True) -> dict[str, float]:
    """Bytes by part of the fullest process of this configuration's layout: on GPUs, or on a CPU, whose layers are computed."""
    from megatron_lite.engine.precision import DTYPES
    from megatron_lite.parallel.layout import Layout
    from tools.planning.layer_memory import layer_costs

    parallel = config.parallel
    layout = Layout(parallel.tensor, parallel.pipeline, parallel.context, parallel.sequence_parallel)
    layers = layer_costs(
        config.model,
        dtype=DTYPES[dtype],
        micro_batch_size=config.batch.micro_batch_size,
        sequence_length=config.batch.sequence_length,
        layout=layout,
        parallel=parallel,
        device="meta" if cuda else "cpu",
    )
    stage = max(1, parallel.zero_stage)
    return memory(layers, layer_flops(config), config, layout, dtype, stage, overlap=cuda, released=cuda)


def layers_of_stages(
    layers: list[LayerCost], flops: Sequence[float], config: Config[ModelConfig], layout: Layout
) -> list[tuple[list[LayerCost], int]]:
    """The layers of every pipeline stage, and the micro batches whose activations it holds at once."""
    from megatron_lite.parallel.layout import stage_bounds

    bounds = stage_bounds(flops, layout.pipeline)
    stages = []
    for index in range(layout.pipeline):
        own = layers[bounds[index] : bounds[index + 1]]
        if config.model.tie_embeddings and layout.pipeline > 1 and index == layout.pipeline - 1:
            own = [*own[:-1], replace(own[-1], parameters=own[-1].parameters + layers[0].largest)]
        stages.append((own, min(config.batch.gradient_accumulation_steps, layout.pipeline - index)))
    return stages


def workload(config: Config[ModelConfig], flops: Sequence[float], dtype: str) -> Workload:
    """What the model of communication needs to know."""
    from megatron_lite.planning.communication_cost import Workload
    from models.language_model import count_parameters

    model, batch = config.model, config.batch
    return Workload(
        parameters=count_parameters(model),
        layers=model.num_layers,
        hidden=model.hidden_size,
        state_elements=state_elements(model),
        sequence_length=batch.sequence_length,
        micro_batch_size=batch.micro_batch_size,
        global_batch_size=batch.global_batch_size,
        flops_per_token=3 * sum(flops),
        width=4 if dtype == "fp32" else 2,
        recompute=config.parallel.activation_checkpointing.mode == "full",
    )


def state_elements(model: ModelConfig) -> float:
    """Numbers that a block hands on for a sample where a sequence is split, states and their decays, as a mean over blocks.

    The mixers say so themselves: one of each kind runs on "meta" on a local shard, and what it gathers counts.
    """
    import torch

    from models.mixers import MIXERS
    from models.operators.context_parallel import context_parallel
    from tools.planning.meta_device import kernels_of_cuda

    found: dict[str, int] = {}
    names = [model.mixer_of(index) for index in range(model.num_layers)]
    with kernels_of_cuda(), torch.no_grad():
        for index, name in enumerate(names):
            if name in found:
                continue
            found[name] = 0
            if getattr(MIXERS[name], "supports_context_parallel", False):
                with torch.device("meta"):
                    mixer = MIXERS[name](model, index, model.options_of(name))
                mixer.to("meta", torch.bfloat16)  # and buffers that are made elsewhere
                x = torch.zeros(1, 64, model.hidden_size, dtype=torch.bfloat16, device="meta")
                counter = _Counter()
                with context_parallel(counter):
                    mixer(x)
                found[name] = counter.numbers
    return sum(found[name] for name in names) / len(names)


class _Counter:
    """A context-parallel group that counts the float32 numbers gathered. A convolution's few tokens, of 16 bits, are left out."""

    index, count = 1, 2

    def __init__(self) -> None:
        self.numbers = 0

    def gather(self, x: Tensor) -> Tensor:
        if x.itemsize > 2 and x.is_floating_point():
            self.numbers += x.numel()
        return x.new_zeros(self.count, *x.shape)
