"""The layers that this process holds: built at full width from a seed, then sharded and tied."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import nn

from megatron_lite.config.schema import Config
from megatron_lite.engine.parallelize import shard_and_fuse
from megatron_lite.engine.precision import is_fp8_layer
from megatron_lite.optim.param_groups import matrices_of_model, parameter_kind
from megatron_lite.optim.zero_state import ShardedParameter
from megatron_lite.parallel.grid import Grid
from megatron_lite.parallel.layout import stage_bounds
from megatron_lite.parallel.sharding_plan import ShardingSpec, shard_of, sharding_specs
from megatron_lite.parallel.tensor_parallel import TensorGroup
from megatron_lite.planning.flops import forward_flops


class LayerSpec(Protocol):
    """One layer of the model before it is built.

    Attributes:
        name: canonical name.
        tied_to: name of the layer whose `weight` it shares; None for none.
    """

    @property
    def name(self) -> str: ...
    @property
    def tied_to(self) -> str | None: ...

    def build(self, seed: int | None = None) -> nn.Module:
        """Return the layer at full width. With a seed its weights are the same in every layout and on every process."""
        ...


class ModelShard:
    """The layers of this process's pipeline stage, sharded over its tensor-parallel group.

    Args:
        config, grid, specs: as in `Engine`.

    Attributes:
        model: all layers at full width on the device "meta".
        bounds: first layer of every stage, and one past the last. Stages have about equal FLOPs.
        layers: index in the model -> layer, of this stage.
        tensor: the processes that share these layers; None without tensor parallelism.
        tied: name of a layer -> name of the layer whose `weight` it shares.
        shapes, sharding_specs: full shape and sharding spec of every parameter of the model by canonical name, a tied one once.
        matrices: heads of the matrices of all blocks by canonical name (`matrices_of_model`). Embedding and head are no blocks.

    Raises:
        ValueError: as `parallelize.shard_and_fuse`.
    """

    def __init__(self, config: Config[Any], grid: Grid, specs: Sequence[LayerSpec]) -> None:
        self._grid = grid
        seed, parallel = config.run.seed, config.parallel
        with torch.device("meta"):
            self.model: list[Any] = [spec.build(seed) for spec in specs]
        self._describe(specs)
        costs = forward_flops(self.model, config.batch.sequence_length, config.data.predicted_fraction)
        self.bounds = stage_bounds(costs, grid.pipe_size)
        self.tensor: TensorGroup | None = None
        if grid.tensor_group is not None:
            self.tensor = TensorGroup(
                grid.tensor_group,
                grid.tensor_rank,
                grid.tensor_size,
                sequence=parallel.sequence_parallel,
                stores_matmuls=parallel.activation_checkpointing.mode == "selective",
            )
        self.layers: dict[int, Any] = {}
        for index in range(self.bounds[grid.pipe_rank], self.bounds[grid.pipe_rank + 1]):
            with grid.device:
                self.layers[index] = specs[index].build(seed)
            in_fp8 = is_fp8_layer(config.precision.fp8, index, len(specs))
            shard_and_fuse(self.layers[index], self.tensor, parallel, in_fp8)
        self._by_name = {specs[index].name: layer for index, layer in self.layers.items()}
        self.tied = {spec.name: spec.tied_to for spec in specs if spec.tied_to is not None}
        for name, tied_to in self.tied.items():
            if name in self._by_name and tied_to in self._by_name:
                self._by_name[name].weight = self._by_name[tied_to].weight

    def named_parameters(self) -> Iterator[tuple[str, Any, bool]]:
        """Yield (canonical name, parameter, whether it is the first copy) of this stage's parameters, a shared one once."""
        seen: set[int] = set()
        for prefix, layer in self._by_name.items():
            for key, parameter in layer.named_parameters():
                if id(parameter) not in seen:
                    seen.add(id(parameter))
                    copy = prefix in self.tied and key == "weight"
                    yield f"{self.tied[prefix] if copy else prefix}.{key}", parameter, not copy

    def parameters_with_kind(self) -> list[tuple[nn.Parameter, str]]:
        """Return this stage's parameters, each with its kind, which decides its weight decay."""
        return [
            (parameter, "matrix" if name in self.matrices else self._kinds[name])
            for name, parameter, _ in self.named_parameters()
        ]

    def sharded_parameters(self) -> Iterator[ShardedParameter]:
        """Yield this stage's parameters, each with its part of the full tensor."""
        rank, size = self._grid.tensor_rank, self._grid.tensor_size
        for name, parameter, first in self.named_parameters():
            shard = shard_of(self.sharding_specs[name], self.shapes[name], rank, size)
            primary = first and (shard.count > 1 or rank == 0)
            yield ShardedParameter(name, parameter, shard, primary, self.matrices.get(name) or 1)

    def _describe(self, specs: Sequence[LayerSpec]) -> None:
        """Set the shape, sharding spec and kind of every parameter of the model, and the matrices, by canonical name."""
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.sharding_specs: dict[str, ShardingSpec] = {}
        self._kinds: dict[str, str] = {}
        names = [spec.name for spec in specs]
        self.matrices = matrices_of_model(zip(names, self.model, strict=True))
        for spec, layer in zip(specs, self.model, strict=True):
            specs_of_layer = sharding_specs(layer)
            for key, parameter in layer.named_parameters():
                if spec.tied_to is not None and key == "weight":
                    continue
                name = f"{spec.name}.{key}"
                self.shapes[name], self.sharding_specs[name] = tuple(parameter.shape), specs_of_layer[key]
                self._kinds[name] = parameter_kind(layer, key)
