"""Pipeline parallelism: consecutive layers on different processes, with DeepSpeed's 1F1B schedule.

Narayanan et al. 2021, arXiv 2104.04473. Stages exchange only activations. All stages of a data rank read the same samples, so
each stage has the labels, masks and document boundaries of its micro-batches.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.pipe import PipelineModule, TiedLayerSpec
from deepspeed.runtime.pipe.schedule import OptimizerStep, ReduceTiedGrads
from deepspeed.runtime.pipe.topology import PipelineParallelGrid, PipeModelDataParallelTopology
from torch import Tensor, nn

from megatron_lite.engine.model_shard import ModelShard
from megatron_lite.engine.sequential import Batch, block_inputs, chain, head_inputs
from megatron_lite.parallel.grid import Grid


def topology(grid: Grid) -> PipeModelDataParallelTopology:
    """Return DeepSpeed's topology of the grid. Its data ranks are this project's data and context ranks."""
    return PipeModelDataParallelTopology(num_pp=grid.pipe_size, num_mp=grid.tensor_size, num_dp=grid.replicas)


def model_parallel_unit(grid: Grid) -> PipelineParallelGrid:
    """Return the "mpu" that gives DeepSpeed's engine without pipeline its tensor-parallel groups."""
    return PipelineParallelGrid(topology=topology(grid))


class Stage(PipelineModule):
    """The layers of one stage, for DeepSpeed's pipeline engine.

    Args:
        shard: the layers. If one is tied, it is the last one of the model, which shares `weight` with the first.
        calls: from `parallelize`.
    """

    def __init__(self, shard: ModelShard, calls: Mapping[int, Callable[..., Tensor]], grid: Grid) -> None:
        self._bounds, layers = shard.bounds, shard.layers
        count = self._bounds[-1]
        entries = [layers.get(index, nn.Identity()) for index in range(count)]
        if shard.tied:
            for index in (0, count - 1):
                entries[index] = _Tied(layers.get(index))
        super().__init__(entries, topology=topology(grid))
        self._is_last = grid.is_last_stage
        self._calls = list(calls.values())
        self._batches: deque[Batch] = deque()
        self._scale = 1.0
        self._shape: torch.Size | None = None
        self._nll = torch.zeros((), dtype=torch.float64, device=grid.device)
        if shard.tied and self._is_last:
            # DeepSpeed excludes every parameter of the tied layer from the gradient norm, even those that are not tied.
            for name, parameter in layers[count - 1].named_parameters():
                parameter.ds_pipe_replicated = name == "weight"  # type: ignore[attr-defined]

    def train_step(self, engine: Any, batches: Sequence[Batch], scale: float, decide: Callable[[Tensor], None]) -> None:
        """Run one step of the schedule. The loss of a micro-batch is scale * sum(weight * nll).

        decide: called with the summed nll of this process after the backward passes and before the update.
        """

        def optimizer_step(engine: Any, **options: Any) -> None:
            decide(self._nll)
            type(engine)._exec_optimizer_step(engine, **options)

        changed = {OptimizerStep: optimizer_step, ReduceTiedGrads: _reduce_tied_gradients}
        engine._INSTRUCTION_MAP = {**type(engine)._INSTRUCTION_MAP, **changed}
        self._feed(engine, batches, scale)
        engine.train_batch(iter([(batch["tokens"], batch["labels"]) for batch in batches]))
        # DeepSpeed keeps its last instruction. With `decide` that would be a reference cycle with the trainer's engine.
        del engine._INSTRUCTION_MAP, engine._exec_instr

    def evaluate(self, engine: Any, batch: Batch) -> Tensor:
        """Return sum(weight * nll) of one micro-batch; zero on all stages except the last."""
        self._feed(engine, [batch], 1.0)
        engine.eval_batch(iter([(batch["tokens"], batch["labels"])]), bcast_loss=False, num_micro_batches=1)
        return self._nll

    def _feed(self, engine: Any, batches: Sequence[Batch], scale: float) -> None:
        shape = batches[0]["tokens"].shape
        if shape != self._shape:  # DeepSpeed caches the shapes that it sends and receives
            engine.reset_activation_shape()
        self._batches, self._scale, self._shape = deque(batches), scale, shape
        self._nll.zero_()

    def forward(self, hidden: Tensor) -> Tensor:
        """Apply this stage to the next micro-batch. `hidden` holds its tokens on the first stage."""
        batch = self._batches.popleft()
        if not self._is_last:
            return chain(self._calls)(hidden, **block_inputs(batch))
        hidden = chain(self._calls[:-1])(hidden, **block_inputs(batch))
        nll = self._calls[-1](hidden, **head_inputs(batch))
        self._nll += nll.detach()
        return nll * self._scale

    def _partition_layers(self, method: str = "") -> None:
        self.parts = self._bounds
        self._set_bounds(self._bounds[self.stage_id], self._bounds[self.stage_id + 1])


def _reduce_tied_gradients(engine: Any) -> None:
    """Sum the gradients of weights that stages share.

    In fp16 DeepSpeed accumulates gradients in the attribute `grad_accum`, but sums `grad`, which is None then.
    """
    if not getattr(engine.optimizer, "use_grad_accum_attribute", False):
        type(engine)._exec_reduce_tied_grads(engine)
        return
    for weight, group in engine.module.get_tied_weights_and_groups():
        dist.all_reduce(weight.grad_accum, group=group)


class _Tied(TiedLayerSpec):
    """A layer that is already built and shares its `weight` with the first or last layer of the model."""

    def __init__(self, layer: nn.Module | None) -> None:
        super().__init__("tied", nn.Module, tied_weight_attr=["weight"])
        self._layer = layer

    def build(self, log: bool = False) -> nn.Module:
        if self._layer is None:
            raise ValueError("a tied layer of another stage")
        return self._layer
