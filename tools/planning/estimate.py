"""Estimate what a run costs before it starts: FLOPs, memory by part, and communication."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # torch is imported on use, so that --help is fast
    from torch import Tensor

    from megatron_lite.config.schema import Config
    from megatron_lite.parallel.layout import Layout
    from megatron_lite.planning.communication_cost import Workload
    from megatron_lite.planning.memory import LayerCost
    from models.config import ModelConfig


def read_config(words: Sequence[str], gpus: int) -> Config[ModelConfig]:
    """Return the configuration for `gpus` processes. If it has both batch sizes, gradient accumulation follows from them.

    words: configuration files and overrides `key.sub=value`.
    """
    from megatron_lite.config.loader import ConfigError, load_config
    from models.config import ModelConfig
    from tools.loading.vocab_size import vocabulary_override

    files = [word for word in words if "=" not in word]
    overrides = [word for word in words if "=" in word]
    overrides += vocabulary_override(files, overrides)
    try:
        derived = [*overrides, "batch.gradient_accumulation_steps=null"]
        return load_config(files, derived, model_type=ModelConfig, world_size=gpus)
    except ConfigError:
        return load_config(files, overrides, model_type=ModelConfig, world_size=gpus)


def read_config_any_layout(words: Sequence[str], gpus: int) -> tuple[Config[ModelConfig], list[str], Exception | None]:
    """Return the configuration, the words that keep its batch in every layout, and the error of its layout or None.

    Raises ConfigError for an error that remains without parallelism.
    """
    from megatron_lite.config.loader import ConfigError

    problem = None
    try:
        config = read_config(words, gpus)
    except ConfigError as error:
        problem = error
        one_process = [f"parallel.{key}=1" for key in ("tensor", "pipeline", "context")]
        try:
            config = read_config([*words, *one_process, "parallel.sequence_parallel=false"], 1)
        except ConfigError:
            raise error from None
    sizes = ("micro_batch_size", "global_batch_size")
    return config, [*words, *(f"batch.{key}={getattr(config.batch, key)}" for key in sizes)], problem


def layer_flops(config: Config[ModelConfig]) -> list[float]:
    """Return the forward FLOPs per token of each layer."""
    from megatron_lite.planning.flops import forward_flops

    return forward_flops(_meta_layers(config.model), config.batch.sequence_length, config.data.predicted_fraction)


def _meta_layers(model: ModelConfig) -> list[Any]:
    import torch

    from models.language_model import layer_specs

    with torch.device("meta"):
        return [spec.build() for spec in layer_specs(model)]


def fp8_flops(config: Config[ModelConfig]) -> float:
    """Return the training FLOPs per token that run in FP8 on one rank per tensor group."""
    from megatron_lite.engine.precision import is_fp8_layer
    from megatron_lite.parallel.fp8_projections import select_projections

    fp8 = config.precision.fp8
    if fp8.recipe == "none":
        return 0.0
    layers = _meta_layers(config.model)
    covered = [layer for index, layer in enumerate(layers) if is_fp8_layer(fp8, index, len(layers))]
    names = [(layer, name) for layer in covered for name in select_projections(layer, 1)[0]]
    return 6.0 * sum(layer.get_submodule(name).weight.numel() for layer, name in names)


def memory(
    layers: list[LayerCost],
    flops: Sequence[float],
    config: Config[ModelConfig],
    layout: Layout,
    dtype: str,
    stage: int,
    *,
    cuda: bool = True,
) -> dict[str, float]:
    """Return the bytes by part of the pipeline stage with the most memory, with ZeRO `stage`.

    layers: as `layers_of`. flops: of each layer, which decide the pipeline stages.
    """
    from megatron_lite.planning.memory import Setting, step_bytes

    muon = config.optimizer.muon
    setting = Setting(
        dtype,
        stage,
        replicas=config.batch.data_ranks * layout.context,
        accumulation=config.batch.gradient_accumulation_steps,
        overlap=cuda,
        released=cuda,
        optimizer_state=config.precision.optimizer_state,
        graphs=config.parallel.cuda_graph and layout.pipeline == 1,
        momentum={"fp32": 4, "bf16": 2}[muon.momentum_dtype] if config.optimizer.name == "muon" else 0,
        averaged=config.optimizer.ema_decay > 0,
        tensor=layout.tensor,
    )
    stages = layers_by_stage(layers, flops, config, layout)
    sizes = [step_bytes(stage_layers, replace(setting, in_flight=in_flight)) for stage_layers, in_flight in stages]
    return max(sizes, key=lambda parts: sum(parts.values()))


def memory_of(config: Config[ModelConfig], dtype: str, *, cuda: bool = True) -> dict[str, float]:
    """Return the bytes by part of the process with the most memory. On a CPU (not `cuda`) the layers are executed."""
    from megatron_lite.parallel.layout import Layout

    parallel = config.parallel
    layout = Layout(parallel.tensor, parallel.pipeline, parallel.context, parallel.sequence_parallel)
    layers = layers_of(config, layout, dtype, cuda=cuda)
    stage = parallel.effective_zero_stage
    return memory(layers, layer_flops(config), config, layout, dtype, stage, cuda=cuda)


def layers_of(config: Config[ModelConfig], layout: Layout, dtype: str, *, cuda: bool = True) -> list[LayerCost]:
    """Return `layer_costs` of a configuration. On a CPU (not `cuda`) the layers are executed."""
    from megatron_lite.dtypes import DTYPES
    from tools.planning.layer_memory import layer_costs

    return layer_costs(
        config.model,
        dtype=DTYPES[dtype],
        micro_batch_size=config.batch.micro_batch_size,
        sequence_length=config.batch.sequence_length,
        layout=layout,
        parallel=config.parallel,
        fp8=config.precision.fp8,
        device="meta" if cuda else "cpu",
    )


def layers_by_stage(
    layers: list[LayerCost], flops: Sequence[float], config: Config[ModelConfig], layout: Layout
) -> list[tuple[list[LayerCost], int]]:
    """Return the layers of each pipeline stage, and the number of micro-batches whose activations it holds at once."""
    from megatron_lite.parallel.layout import stage_bounds

    bounds = stage_bounds(flops, layout.pipeline)
    stages = []
    for index in range(layout.pipeline):
        stage = layers[bounds[index] : bounds[index + 1]]
        if config.model.tie_embeddings and layout.pipeline > 1 and index == layout.pipeline - 1:
            stage = [*stage[:-1], replace(stage[-1], parameters=stage[-1].parameters + layers[0].largest)]
        stages.append((stage, min(config.batch.gradient_accumulation_steps, layout.pipeline - index)))
    return stages


def workload(config: Config[ModelConfig], flops: Sequence[float], dtype: str) -> Workload:
    """Return the quantities that the communication model reads."""
    from megatron_lite.optim.muon import STEPS
    from megatron_lite.optim.whole_matrices import newton_schulz_cost
    from megatron_lite.planning.communication_cost import Workload
    from models.language_model import count_parameters

    model, batch = config.model, config.batch
    states, tokens = gathered_elements(model, batch.sequence_length // 2)
    matrices = muon_blocks(model, config.optimizer.muon.per_head) if config.optimizer.name == "muon" else []
    return Workload(
        parameters=count_parameters(model),
        layers=model.num_layers,
        hidden=model.hidden_size,
        state_elements=states,
        token_elements=tokens,
        sequence_length=batch.sequence_length,
        micro_batch_size=batch.micro_batch_size,
        global_batch_size=batch.global_batch_size,
        flops_per_token=3 * sum(flops),
        dtype=dtype,
        optimizer_state=config.precision.optimizer_state,
        recompute=config.parallel.activation_checkpointing.mode == "full",
        matrices=sum(rows * columns for rows, columns in matrices),
        muon_flops=2 * STEPS * sum(newton_schulz_cost(*shape) for shape in matrices),
        fp8_flops_per_token=fp8_flops(config),
    )


def muon_blocks(model: ModelConfig, per_head: bool) -> list[tuple[int, int]]:
    """Return the shapes [rows, columns] of all matrices of the model that Muon orthogonalizes."""
    from megatron_lite.optim.param_groups import matrices_of

    shapes: list[tuple[int, int]] = []
    for block in _meta_layers(model)[1:-1]:
        for name, heads in matrices_of(block).items():
            rows, columns = block.get_parameter(name).shape
            blocks = heads or 1 if per_head else 1
            shapes += [(rows // blocks, columns)] * blocks
    return shapes


def gathered_elements(model: ModelConfig, length: int) -> tuple[float, float]:
    """Return the mean numbers of elements that a block gathers under context parallelism.

    The first counts float32 elements per sample (states and decays), the second 16-bit elements per token (softmax attention).
    One mixer of each kind runs on the device "meta" on a local shard of `length` tokens.
    """
    import torch

    from models.mixers import MIXERS
    from models.operators.context_parallel import context_parallel
    from tools.planning.layer_memory import mixer_kind
    from tools.planning.meta_device import kernels_of_cuda

    counters: dict[str, _Counter] = {}
    kinds = [mixer_kind(model, index) for index in range(model.num_layers)]
    with kernels_of_cuda(), torch.no_grad():
        for index, kind in enumerate(kinds):
            if kind in counters:
                continue
            counters[kind] = _Counter()
            name = model.mixer_of(index)
            if getattr(MIXERS[name], "supports_context_parallel", False):
                with torch.device("meta"):
                    mixer = MIXERS[name](model, index, model.options_of(name))
                mixer.to("meta", torch.bfloat16)  # buffers may be created on another device
                with context_parallel(counters[kind]):
                    mixer(torch.zeros(1, length, model.hidden_size, dtype=torch.bfloat16, device="meta"))
    return (
        sum(counters[kind].states for kind in kinds) / len(kinds),
        sum(counters[kind].tokens for kind in kinds) / length / len(kinds),
    )


class _Counter:
    """Count the elements gathered in a context-parallel group. The few tokens of a convolution are ignored."""

    index, count = 1, 2

    def __init__(self) -> None:
        self.states = self.tokens = 0

    def gather(self, x: Tensor) -> Tensor:
        if x.is_floating_point() and x.itemsize > 2:
            self.states += x.numel()
        elif x.is_floating_point() and x.dim() == 4:  # [batch, length, heads, channels] of attention
            self.tokens += x.numel()
        return x.new_zeros(self.count, *x.shape)


def decoding_bytes(model: ModelConfig, length: int, dtype: str) -> int | None:
    """Return the bytes that decoding keeps per sequence after `length` tokens; None for a model that cannot decode."""
    import torch

    from megatron_lite.dtypes import DTYPES
    from models.language_model import layer_specs
    from tools.planning.meta_device import kernels_of_cuda

    if model.bidirectional_mixers():
        return None
    total = 0
    with kernels_of_cuda(), torch.no_grad():
        x = torch.zeros(1, length, dtype=torch.int64, device="meta")
        for spec in layer_specs(model)[:-1]:
            with torch.device("meta"):
                layer = spec.build()
            x, state = layer.to("meta", DTYPES[dtype])(x, return_state=True)
            total += sum(tensor.nbytes for tensor in state.values())
    return total
