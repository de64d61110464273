"""Build a DeepSpeed engine from a list of layers; run its training and evaluation steps.

The rest of the trainer uses only `Engine`.
"""

from __future__ import annotations

import contextlib
import io
import math
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from megatron_lite.config.schema import Config
from megatron_lite.engine.activation_checkpointing import Recompute
from megatron_lite.engine.deepspeed import deepspeed_config, import_deepspeed, restore_linear, share_weights
from megatron_lite.engine.model_shard import LayerSpec, ModelShard
from megatron_lite.engine.optimizer import optimizer_of
from megatron_lite.engine.parallelize import ContextParallel, parallelize
from megatron_lite.engine.precision import check_dtype, fp8_summary
from megatron_lite.engine.sequential import Batch, Sequential
from megatron_lite.metrics.per_source_loss import per_source_loss, with_loss_weight_grad
from megatron_lite.optim.bf16_optimizer import patch_bf16_optimizer
from megatron_lite.optim.zero_state import OptimizerState
from megatron_lite.parallel.collectives import all_reduce_async, all_reduce_sum, broadcast
from megatron_lite.parallel.context_parallel import context_parallel_group, local_shard
from megatron_lite.parallel.fp8_projections import check_device
from megatron_lite.parallel.grid import Grid
from megatron_lite.planning.memory import Setting


@dataclass(frozen=True)
class StepResult:
    """Result of one training step.

    Attributes:
        loss: sum(weight * nll) / sum(weight) over all micro-batches and data ranks, nats per token; NaN if all weights are 0.
        gradient_norm: global L2 norm before clipping; infinite if the step was skipped.
        skipped: the parameters did not change.
        loss_scale: 1 unless fp16.
        by_source: (sum of weight * nll, sum of weight) per source of the text; empty without `num_sources`.
        accuracy: weight of the correctly predicted tokens / total weight; None unless the engine counts them.
    """

    loss: float
    gradient_norm: float
    skipped: bool
    loss_scale: float
    by_source: tuple[tuple[float, float], ...] = ()
    accuracy: float | None = None


class EvaluationSums(NamedTuple):
    """Sums over the micro-batches of all data ranks: weight * nll, weight, and weight of the correctly predicted tokens.

    `num_correct` is None unless the engine counts them.
    """

    nll: float
    weight: float
    num_correct: float | None


class Engine:
    """A model under DeepSpeed. Pipelines use its 1F1B engine with ZeRO 1; all other layouts its plain engine with ZeRO 1 to 3.

    Args:
        config: the configuration of the run. `specs` describe the model; `config.model` is not read. Unless `data.objective`
            is causal, the engine also counts correct predictions.
        grid: has the sizes of `config.parallel`.
        dtype: "bf16", "fp16" or "fp32". The caller resolves `precision.dtype` "auto".
        specs: the layers, in order.
        context_parallel: a context in which the layers treat their inputs as the local shard of a sequence.
        recompute: a context in which the layers recompute elementwise results instead of storing them.

    Raises:
        ValueError: the device cannot train in this dtype or in FP8, or no projection can run in FP8; or as `ModelShard` and
            `optimizer_of`.

    Attributes:
        grid, dtype: as given.
        zero_stage: the ZeRO stage that runs, 1 to 3.
        model: all layers at full width on the device "meta", for counting.
        layers: the sharded layers of this process's stage.
        sharding_specs: sharding spec of every parameter of the model, by canonical name.
        fp8_summary: one line that names the projections in FP8 and the others; empty without FP8.
        optimizer_state: master weights, moments and loss scale of this process.
        muon_parameters: names of the parameters that Muon updates, of all processes.
    """

    def __init__(
        self,
        config: Config[Any],
        grid: Grid,
        dtype: str,
        *,
        specs: Sequence[LayerSpec],
        context_parallel: ContextParallel,
        recompute: Recompute,
    ) -> None:
        parallel, fp8 = config.parallel, config.precision.fp8
        check_dtype(dtype, grid.device)
        if fp8.recipe != "none":
            check_device(grid.device, dtype, fp8.recipe)
        self.grid, self.dtype, self.zero_stage = grid, dtype, parallel.effective_zero_stage
        self._num_correct: Tensor | None = None
        if config.data.objective != "causal":
            self._num_correct = torch.zeros((), dtype=torch.float64, device=grid.device)
        import_deepspeed()
        self._shard = shard = ModelShard(config, grid, specs)
        self.fp8_summary = fp8_summary(fp8, shard.model, grid.tensor_size, dtype)
        self.model, self.layers, self.sharding_specs = shard.model, list(shard.layers.values()), shard.sharding_specs
        self._context = context_parallel_group(grid)
        optimizer, fillers = optimizer_of(config, shard, grid, dtype)
        self.muon_parameters = set(shard.matrices) if config.optimizer.name == "muon" else set()
        memory = Setting(dtype, self.zero_stage, grid.replicas, optimizer_state=config.precision.optimizer_state)
        calls = parallelize(
            shard.layers,
            len(specs),
            parallel,
            grid,
            context_parallel=context_parallel,
            recompute=recompute,
            keep_gradients=memory.keeps_gradients,
        )
        settings = deepspeed_config(config, self.layers, grid, dtype)
        zero = self._start_deepspeed(calls, optimizer, fillers, settings)
        self.optimizer_state = OptimizerState(
            zero,
            optimizer,
            list(shard.sharded_parameters()),
            stage=self.zero_stage,
            dtype=dtype,
            grid=grid,
            ema_decay=config.optimizer.ema_decay,
        )

    def train_step(
        self,
        micro_batches: Sequence[Batch],
        *,
        lr: float,
        should_skip: Callable[[float], bool] | None = None,
        num_sources: int = 0,
    ) -> StepResult:
        """Run one optimizer step over this process's micro-batches; return its loss and gradient norm.

        Args:
            micro_batches: the same number on every process.
            lr: the learning rate of this step.
            should_skip: called with the loss before the update; True skips the update, as a non-finite gradient does.
            num_sources: above 0, also compute the loss per `source` of the batches, int64 of the labels' shape.
        """
        self.optimizer_state.set_learning_rate(lr)
        self._set_accumulation(len(micro_batches))
        batches = [self._local_shard(batch) for batch in micro_batches]
        # Summed on the host: the device may still compute the previous update.
        (weight,) = all_reduce_sum([sum(batch["loss_weight"].double().sum().item() for batch in batches)], self.grid)
        if num_sources:
            batches = [with_loss_weight_grad(self._to_device(batch)) for batch in batches]
        # DeepSpeed averages over micro-batches and replicas. This factor undoes it, so that the loss is sum(weight * nll) over
        # the global sum(weight) in every layout. A micro-batch without weight then adds zero instead of NaN.
        scale = len(micro_batches) * self.grid.replicas / max(weight, 1e-30)
        if not self._engine.module.training:  # `train` visits every module, which takes time
            self._engine.train()
        loss, num_correct, invalid, scaler = math.nan, 0.0, False, self.optimizer_state.loss_scaler_state
        if self._num_correct is not None:
            self._num_correct.zero_()

        def decide(sums: Callable[[], list[float]]) -> None:
            nonlocal loss, num_correct, invalid
            loss, num_correct = (value / (weight or math.nan) for value in sums())
            invalid = should_skip is not None and should_skip(loss)
            if invalid:
                self.optimizer_state.mark_step_invalid()

        if self._stage is not None:
            on_device = [self._to_device(batch) for batch in batches]
            self._stage.train_step(self._engine, on_device, scale, lambda nll: decide(self._sums(nll)))
        else:
            self._accumulate(batches, scale, decide)
        if invalid:  # not an overflow, so the loss scale stays
            self.optimizer_state.loss_scaler_state = scaler
        skipped = not self._engine.was_step_applied()
        if not skipped:
            self.optimizer_state.update_average()
        norm = self._engine.get_global_grad_norm()
        by_source = per_source_loss(batches, num_sources, loss * weight, self.grid) if num_sources else ()
        loss_scale = self.optimizer_state.loss_scale
        return StepResult(
            loss, float(norm), skipped, loss_scale, by_source, None if self._num_correct is None else num_correct
        )

    def _accumulate(
        self, batches: Sequence[Batch], scale: float, decide: Callable[[Callable[[], list[float]]], None]
    ) -> None:
        """Run the passes of all micro-batches and the update, without pipeline stages. The loss is scale * sum(weight * nll).

        decide: called with the function of `_sums` after the last backward pass and before the update.
        """
        total = torch.zeros((), dtype=torch.float64, device=self.grid.device)
        for index, batch in enumerate(batches):
            nll = self._engine(self._to_device(batch))
            total += nll.detach()
            last = index == len(batches) - 1
            # The copy to the host starts before the backward pass, so that the host does not wait for that pass.
            sums = self._sums(total) if last else None
            self._engine.backward(nll * scale)
            if sums is not None:
                decide(sums)
            self._engine.step()

    @contextlib.contextmanager
    def evaluating(self) -> Iterator[None]:
        """Set evaluation mode without gradients, for forward passes of any length through `layers` (one stage only)."""
        self._engine.eval()
        tensor = self._shard.tensor
        sequence = tensor is not None and tensor.sequence
        if tensor is not None:
            tensor.sequence = False
        try:
            with torch.no_grad():
                yield
        finally:
            if tensor is not None:
                tensor.sequence = sequence
            self._engine.train()

    def evaluate(self, micro_batches: Iterable[Batch]) -> EvaluationSums:
        """Return sums over the micro-batches of all data ranks."""
        self._pop_num_correct()
        nll, weight = self._evaluate_local(micro_batches)
        nll, weight, num_correct = all_reduce_sum([nll, weight, self._pop_num_correct()], self.grid)
        return EvaluationSums(nll, weight, None if self._num_correct is None else num_correct)

    def recompute_loss(self, micro_batches: Sequence[Batch]) -> tuple[bool, bool]:
        """Recompute the loss of the last step's micro-batches of this process. Every process calls it; training is unaffected.

        Returns:
            whether the summed loss was finite in the step, and whether the recomputed one is.
        """
        first = math.isfinite(self._nll.item())
        nll, _ = self._evaluate_local(micro_batches)
        return first, math.isfinite(nll)

    def _evaluate_local(self, micro_batches: Iterable[Batch]) -> tuple[float, float]:
        """Return sums of weight * nll and of the weight over this process's micro-batches, in evaluation mode."""
        self._engine.eval()
        nll = weight = 0.0
        with torch.no_grad():
            for batch in map(self._local_shard, micro_batches):
                weight += batch["loss_weight"].double().sum().item()
                batch = self._to_device(batch)
                loss = self._engine(batch) if self._stage is None else self._stage.evaluate(self._engine, batch)
                nll += loss.item()
        self._engine.train()
        return nll, weight

    def measure_step_seconds(self, micro_batches: Sequence[Batch]) -> float:
        """Return the seconds per training step with these micro-batches. The weights do not change. Every process calls it."""
        times: list[float] = []
        # Rank 0 decides for all: a step is collective, and every process has its own clock.
        while broadcast(len(times) < 4 or sum(times[2:]) < 3.0, self.grid):
            start = time.perf_counter()
            self.train_step(micro_batches, lr=0.0, should_skip=lambda _: True)
            self.optimizer_state.compute_muon_update()
            times.append(time.perf_counter() - start)
        return statistics.median(times[2:])  # the first two allocate and compile

    @property
    def layout(self) -> dict[str, Any]:
        """Return the parallel sizes, ZeRO stage and dtype, as a checkpoint records them."""
        grid = self.grid
        return {
            "world_size": grid.world_size,
            "data": grid.data_size,
            "tensor": grid.tensor_size,
            "pipeline": grid.pipe_size,
            "context": grid.context_size,
            "zero_stage": self.zero_stage,
            "dtype": self.dtype,
        }

    def parameter_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the full shape of every parameter of the model by canonical name, a tied one once."""
        return dict(self._shard.shapes)

    def close(self) -> None:
        """Release DeepSpeed's hooks and buffers, so that another engine can be built in this process."""
        self._engine.destroy()
        import deepspeed

        # DeepSpeed stores bound methods on parameters. This reference cycle would keep weights and float32 gradients in memory.
        for _, parameter, _ in self._shard.named_parameters():
            for name, value in list(vars(parameter).items()):
                if getattr(value, "__self__", None) is parameter:
                    delattr(parameter, name)

        deepspeed.utils.groups.mpu = None
        restore_linear()

    def _start_deepspeed(
        self,
        calls: Mapping[int, Callable[..., Tensor]],
        optimizer: torch.optim.Optimizer,
        fillers: Sequence[nn.Parameter],
        settings: Mapping[str, Any],
    ) -> Any:
        """Build DeepSpeed's engine around the layers and return its ZeRO optimizer, patched.

        calls: from `parallelize`. optimizer, fillers: from `optimizer_of`. settings: from `deepspeed_config`.
        """
        import deepspeed

        with contextlib.redirect_stdout(io.StringIO()):  # DeepSpeed prints memory statistics
            model, mpu = self._module(calls)
            for index, filler in enumerate(fillers):
                model.register_parameter(f"filler{index}", filler)
            self._engine, zero, _, _ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings, mpu=mpu)
        share_weights(zero)
        cuda = self.grid.device.type == "cuda"
        kernels = cuda and find_spec("triton") is not None
        patch_bf16_optimizer(self._engine, zero, self.grid.replicas, release=cuda, kernels=kernels)
        return zero

    def _module(self, calls: Mapping[int, Callable[..., Tensor]]) -> tuple[nn.Module, Any]:
        """Return the module for DeepSpeed, and its "mpu" unless the module has its own."""
        self._stage: Any = None
        if self.grid.pipe_size > 1:
            from megatron_lite.engine.pipeline_stage import Stage

            self._stage = Stage(self._shard, calls, self.grid)
            return self._stage, None
        mpu = None
        if self.grid.tensor_size > 1:
            from megatron_lite.engine.pipeline_stage import model_parallel_unit

            mpu = model_parallel_unit(self.grid)
        return Sequential(self.layers, list(calls.values())), mpu

    def _set_accumulation(self, micro_batches: int) -> None:
        """Set the micro-batches per step, which a batch ramp changes during a run."""
        if micro_batches != self._engine.gradient_accumulation_steps():
            ranks = self._engine.dp_world_size
            self._engine.set_train_batch_size(micro_batches * self._engine.train_micro_batch_size_per_gpu() * ranks)
            self._engine.micro_steps = 0  # a step ends when this counter is a multiple of the accumulation

    def _local_shard(self, batch: Batch) -> Batch:
        return batch if self._context is None else local_shard(batch, self._context)

    def _sums(self, nll: Tensor) -> Callable[[], list[float]]:
        """Start to sum nll, a float64 scalar, and the weight of the correct predictions over the replicas."""
        self._nll = nll.detach().clone()
        num_correct = torch.zeros_like(nll) if self._num_correct is None else self._num_correct
        return all_reduce_async(torch.stack([nll, num_correct]), self.grid)

    def _pop_num_correct(self) -> float:
        """Return the weight of this process's correct predictions since the last call; 0 if it is not counted."""
        if self._num_correct is None:
            return 0.0
        value = self._num_correct.item()
        self._num_correct.zero_()
        return value

    def _to_device(self, batch: Batch) -> dict[str, Tensor]:
        counted = {} if self._num_correct is None else {"num_correct": self._num_correct}
        return {key: value.to(self.grid.device, non_blocking=True) for key, value in batch.items()} | counted
