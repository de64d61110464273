"""Measure the memory of each layer of a model on one process, without computing: on the device "meta", as on CUDA."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_lite.config.fp8_schema import Fp8Config
from megatron_lite.config.schema import ParallelConfig
from megatron_lite.engine.activation_checkpointing import checkpointed, mode_of
from megatron_lite.engine.parallelize import shard_and_fuse
from megatron_lite.engine.precision import is_fp8_layer
from megatron_lite.optim.param_groups import matrices_of
from megatron_lite.parallel.context_parallel import ContextParallelGroup
from megatron_lite.parallel.layout import Layout
from megatron_lite.parallel.tensor_parallel import TensorGroup
from megatron_lite.planning.memory import LayerCost, layer_cost
from models.config import ModelConfig
from models.language_model import example_batch, layer_specs
from models.operators.context_parallel import context_parallel as on_local_shard
from models.recompute import recompute_elementwise
from tools.planning.meta_device import kernels_of_cuda


def layer_costs(
    model: ModelConfig,
    *,
    dtype: torch.dtype,
    micro_batch_size: int,
    sequence_length: int,
    layout: Layout,
    parallel: ParallelConfig,
    fp8: Fp8Config | None = None,
    device: str = "meta",
) -> list[LayerCost]:
    """Return the cost of each layer, sharded and called as the engine does for `layout`. Equal blocks run once.

    Args:
        parallel: read for activation checkpointing, `compile`, and whether the ZeRO stage is 3.
        fp8: which blocks multiply in FP8; None for none.
        device: "meta" takes the paths of CUDA; "cpu" executes the layers.
    """
    specs = layer_specs(model)
    length = sequence_length // layout.context
    # Between the tensor-parallel regions.
    residual_length = length // layout.tensor if layout.sequence_parallel else length
    group = _SilentGroup(0, 1)
    tensor = None
    if layout.tensor > 1:
        selective = parallel.activation_checkpointing.mode == "selective"
        tensor = TensorGroup(group, 0, layout.tensor, sequence=layout.sequence_parallel, stores_matmuls=selective)
    # The last context rank, which receives a state from every previous rank.
    ranks = ContextParallelGroup(group, layout.context - 1, layout.context) if layout.context > 1 else None
    with torch.device(device):
        batch = example_batch(model, micro_batch_size, length)
        tokens = batch.pop("tokens")
    costs: list[LayerCost] = []
    known: dict[str, LayerCost] = {}
    with kernels_of_cuda() if device == "meta" else contextlib.nullcontext():
        for index, spec in enumerate(specs):
            block = 0 < index < len(specs) - 1
            mode = mode_of(index, len(specs), parallel)
            kind = f"{mixer_kind(model, index - 1)} {mode}" if block else spec.name
            # The values of the first layer of a value residual, of this rank's heads and all tokens.
            values = (
                model.hidden_size * length // (layout.tensor * residual_length) if model.reads_values(index - 1) else 0
            )
            in_fp8 = fp8 is not None and is_fp8_layer(fp8, index, len(specs))
            kind += f" {values} {in_fp8}"
            if kind not in known:
                with torch.device(device):
                    layer = spec.build(None if device == "meta" else 0)
                muon_names = matrices_of(layer) if block else {}  # before tensor parallelism replaces linear layers
                shard_and_fuse(layer, tensor, parallel, in_fp8)
                layer = layer.to(dtype)
                shape = (micro_batch_size, residual_length, model.hidden_size + values)
                x = tokens if index == 0 else torch.zeros(shape, dtype=dtype, device=device)
                call = checkpointed(partial(_on_rank, ranks, layer), mode, recompute_elementwise)
                extra = batch if index == len(specs) - 1 else {}
                parameters = sum(p.numel() for p in layer.parameters())
                matrices = sum(p.numel() for name, p in layer.named_parameters() if name in muon_names)
                if spec.tied_to is not None:
                    parameters -= layer.weight.numel()  # type: ignore[union-attr,operator]
                known[kind] = layer_cost(layer, call, x, parameters=parameters, matrices=matrices, **extra)
            costs.append(known[kind])
    return costs


def mixer_kind(model: ModelConfig, layer_index: int) -> str:
    """Return a name that blocks with equal mixers share: the mixer, and its options that list this block."""
    name = model.mixer_of(layer_index)
    options = vars(model.options_of(name)).items()
    return " ".join([name, *(key for key, value in options if isinstance(value, tuple) and layer_index in value)])


def _on_rank(ranks: ContextParallelGroup | None, layer: Callable[..., Tensor], x: Tensor, **context: Tensor) -> Tensor:
    with on_local_shard(ranks):
        return layer(x, **context)


class _SilentGroup(dist.ProcessGroup):
    """Stand for a process group without communication. Received data are zero, because some forms read their values."""

    def allreduce(self, *_: Any) -> None: ...

    def _allgather_base(self, out: Tensor, *_: Any) -> None:
        out.zero_()

    _reduce_scatter_base = _allgather_base
    # The names in torch 2.13.
    all_gather_single = reduce_scatter_single = _allgather_base
