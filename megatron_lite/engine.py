"""From a list of layers to a DeepSpeed engine: one training step, one evaluation step, and the pieces of its state.

The rest of the trainer sees only `Engine`.
"""

from __future__ import annotations

import contextlib
import io
import math
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from megatron_lite.activation_checkpointing import checkpointed
from megatron_lite.config_schema import OptimizerConfig, ParallelConfig, PrecisionConfig
from megatron_lite.deepspeed_setup import deepspeed_config, import_deepspeed, restore_linear
from megatron_lite.grid import Grid, reduce_sum
from megatron_lite.optimizer import build_optimizer
from megatron_lite.tensor_parallel import partition_words

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}

Batch = Mapping[str, Tensor]


class LayerSpec(Protocol):
    """One layer of the model, not built yet: a canonical name, how to build it, and whose weight it shares."""

    @property
    def name(self) -> str: ...
    @property
    def tied_to(self) -> str | None: ...


class Sequential(nn.Module):
    """The layers one after another; `forward` is the summed loss of a batch.

    The first layer takes tokens, the last one hidden states, labels and loss weights.
    """

    def __init__(self, layers: Sequence[nn.Module], parallel: ParallelConfig) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self._run = [checkpointed(layer, index, len(layers), parallel) for index, layer in enumerate(layers)]

    def forward(self, batch: Batch) -> Tensor:
        """sum(loss_weight * nll), a float32 scalar. `batch`: tokens, labels [batch, length] int64, loss_weight float32
        of the same shape, and optionally `mask` [batch, length] and `cu_seqlens` [segments + 1]."""
        context = {key: batch[key] for key in ("mask", "cu_seqlens") if key in batch}
        hidden = batch["tokens"]
        for run in self._run[:-1]:
            hidden = run(hidden, **context)
        return self._run[-1](hidden, labels=batch["labels"], loss_weight=batch["loss_weight"])


@dataclass(frozen=True)
class StepResult:
    """What one training step did.

    Attributes:
        loss: sum(weight * nll) / sum(weight) over all micro batches and data ranks, nats a token.
        gradient_norm: global L2 norm before clipping; infinite when the step was skipped for a non-finite gradient.
        skipped: the parameters were left alone.
        loss_scale: 1 unless fp16.
    """

    loss: float
    gradient_norm: float
    skipped: bool
    loss_scale: float


@dataclass(frozen=True)
class Fragment:
    """The part of one parameter's training state that this process owns.

    Attributes:
        name: canonical parameter name.
        start: offset of the fragment in the flattened parameter.
        tensors: "weight", "exp_avg", "exp_avg_sq": float32 views [numel] of the live state; writing to them changes it.
    """

    name: str
    start: int
    tensors: dict[str, Tensor]


class Engine:
    """A model under DeepSpeed: ZeRO 1 to 3 over the data-parallel group.

    Args:
        specs: the layers, in order.
        build_layer: (spec, index, seed) -> the layer at full width, with the same weights in every layout.
        dtype: "bf16", "fp16" or "fp32".
    """

    def __init__(
        self,
        specs: Sequence[LayerSpec],
        build_layer: Callable[[Any, int, int], nn.Module],
        *,
        seed: int,
        grid: Grid,
        dtype: str,
        micro_batch_size: int,
        accumulation: int,
        optimizer: OptimizerConfig,
        parallel: ParallelConfig,
        precision: PrecisionConfig,
    ) -> None:
        if dtype == "fp16" and grid.device.type == "cpu":
            raise ValueError("precision.dtype: fp16 does not train on a CPU; use bf16 or fp32")
        self.grid, self.dtype, self.accumulation = grid, dtype, accumulation
        with grid.device:
            layers = [build_layer(spec, index, seed) for index, spec in enumerate(specs)]
        by_name = {spec.name: layer for spec, layer in zip(specs, layers, strict=True)}
        for spec, layer in zip(specs, layers, strict=True):
            if spec.tied_to is not None:
                layer.weight = by_name[spec.tied_to].weight
        self.layers = layers
        self.words = {
            f"{name}.{key}": word for name, layer in by_name.items() for key, word in partition_words(layer).items()
        }
        self._prefixes = [spec.name for spec in specs]
        client = build_optimizer(
            layers,
            lr=optimizer.lr,
            betas=optimizer.betas,
            eps=optimizer.eps,
            weight_decay=optimizer.weight_decay,
            no_weight_decay=optimizer.no_weight_decay,
        )
        if parallel.compile:
            for layer in layers[1:-1]:
                layer.compile()
        deepspeed = import_deepspeed()
        settings = deepspeed_config(
            layers,
            grid=grid,
            dtype=dtype,
            micro_batch_size=micro_batch_size,
            accumulation=accumulation,
            clipping=optimizer.gradient_clipping,
            parallel=parallel,
            precision=precision,
        )
        with contextlib.redirect_stdout(io.StringIO()):  # it prints memory statistics while it builds
            self._engine, self._zero, _, _ = deepspeed.initialize(
                model=Sequential(layers, parallel), optimizer=client, config=settings
            )
        self._adamw = client
        self._zero_stage = max(1, parallel.zero_stage)
        self._create_optimizer_state()

    def train_step(
        self, micro_batches: Sequence[Batch], *, lr: float, veto: Callable[[float], bool] | None = None
    ) -> StepResult:
        """One optimizer step over this process's micro batches.

        Args:
            micro_batches: `accumulation` of them.
            lr: the learning rate of this step.
            veto: called with the step's loss before the update; True skips the update, as a non-finite gradient does.
        """
        for group in self._adamw.param_groups:
            group["lr"] = lr
        (weight,) = reduce_sum([sum(batch["loss_weight"].double().sum().item() for batch in micro_batches)], self.grid)
        # DeepSpeed averages over micro batches and data ranks. Undoing that here makes the loss sum(weight * nll) over
        # the global sum(weight), whatever the layout; a micro batch without any weight then adds zero instead of NaN.
        scale = self.accumulation * self.grid.data_size / max(weight, 1e-30)
        self._engine.train()
        total = torch.zeros((), dtype=torch.float64, device=self.grid.device)
        loss, vetoed, scaler = math.nan, False, self.loss_scale_state
        for index, batch in enumerate(micro_batches):
            nll = self._engine(self._to_device(batch))
            self._engine.backward(nll * scale)
            total += nll.detach()
            if index == len(micro_batches) - 1:
                loss = reduce_sum([total.item()], self.grid)[0] / max(weight, 1e-30)
                vetoed = veto is not None and veto(loss)
                if vetoed:
                    self._poison_gradients()
            self._engine.step()
        if vetoed:  # no overflow: the loss scale stays
            self.loss_scale_state = scaler
        skipped = not self._engine.was_step_applied()
        norm = self._engine.get_global_grad_norm()
        return StepResult(loss, float(norm), skipped, float(self._zero.loss_scale) if self.dtype == "fp16" else 1.0)

    @contextlib.contextmanager
    def evaluating(self) -> Iterator[None]:
        """Evaluation mode without gradients, for forward passes through `layers`."""
        self._engine.eval()
        try:
            with torch.no_grad():
                yield
        finally:
            self._engine.train()

    def evaluate(self, micro_batches: Iterable[Batch]) -> tuple[float, float]:
        """(sum of weight * nll, sum of weight) over the micro batches of all data ranks."""
        nll = weight = 0.0
        with self.evaluating():
            for batch in micro_batches:
                nll += self._engine(self._to_device(batch)).double().item()
                weight += batch["loss_weight"].double().sum().item()
        nll, weight = reduce_sum([nll, weight], self.grid)
        return nll, weight

    def measure_step_seconds(self, micro_batches: Sequence[Batch]) -> float:
        """Seconds that a training step of these micro batches takes here, without changing any weight."""
        times: list[float] = []
        while len(times) < 4 or sum(times) < 3.0:
            start = time.perf_counter()
            self.train_step(micro_batches, lr=0.0, veto=lambda _: True)
            times.append(time.perf_counter() - start)
        return statistics.median(times[2:])  # the first ones allocate

    def parameter_shapes(self) -> dict[str, tuple[int, ...]]:
        """Canonical name to full shape of every parameter, a tied one once."""
        return {
            name: tuple(getattr(parameter, "ds_shape", parameter.shape)) for name, parameter in self._named_parameters()
        }

    def fragments(self) -> Iterator[Fragment]:
        """The training state that this process owns, parameter by parameter."""
        for name, parameter in self._named_parameters():
            if self._zero_stage == 3:
                yield self._fragment_stage3(name, parameter)
            elif parameter._hp_mapping is not None:  # None: another data rank owns all of it
                mapping = parameter._hp_mapping
                flat = self._flats[mapping.param_group_index]
                start, numel = mapping.hp_fragment_address.start, mapping.hp_fragment_address.numel
                yield Fragment(
                    name, mapping.lp_fragment_address.start, self._state_views(flat, start, numel, mapping.hp_fragment)
                )

    def finish_load(self, step: int) -> None:
        """After the fragments were written to: set the optimizer's step count, refresh the 16-bit or gathered copies.

        Args:
            step: updates that the optimizer has applied (skipped steps do not count).
        """
        for state in self._adamw.state.values():
            state["step"].fill_(float(step))
        if self._zero_stage == 3:
            for name, parameter in self._named_parameters():
                weight = self._fragment_stage3(name, parameter).tensors["weight"]
                parameter.ds_tensor.data.view(-1)[: weight.numel()].copy_(weight)
            persistent = self._zero.persistent_parameters  # small ones, kept gathered
            if persistent:
                persistent[0].partition(persistent, has_been_updated=False)
                persistent[0].all_gather(persistent)
        elif hasattr(self._zero, "update_lp_params"):
            self._zero.update_lp_params()
        else:
            for index, flat in enumerate(self._flats):
                group = self._zero.real_dp_process_group[index]
                partitions = self._zero.parallel_partitioned_bit16_groups[index]
                own = partitions[torch.distributed.get_rank(group)]
                own.data.copy_(flat.data)
                torch.distributed.all_gather(list(partitions), own.clone(), group)

    @property
    def loss_scale_state(self) -> dict[str, float]:
        """The dynamic loss scaler's numbers (fp16); empty otherwise."""
        if self.dtype != "fp16":
            return {}
        scaler = self._zero.loss_scaler
        return {key: getattr(scaler, key) for key in _SCALER_KEYS if hasattr(scaler, key)}

    @loss_scale_state.setter
    def loss_scale_state(self, state: Mapping[str, float]) -> None:
        for key, value in state.items():
            setattr(self._zero.loss_scaler, key, value)

    def close(self) -> None:
        """Release DeepSpeed's hooks and buffers, so that another engine can be built in this process."""
        self._engine.destroy()
        import deepspeed

        deepspeed.utils.groups.mpu = None
        restore_linear()

    def _named_parameters(self) -> Iterator[tuple[str, Any]]:
        seen: set[int] = set()
        for prefix, layer in zip(self._prefixes, self.layers, strict=True):
            for name, parameter in layer.named_parameters():
                if id(parameter) not in seen:
                    seen.add(id(parameter))
                    yield f"{prefix}.{name}", parameter

    def _fragment_stage3(self, name: str, parameter: Any) -> Fragment:
        per_rank = parameter.ds_tensor.ds_numel
        start = self.grid.data_rank * per_rank
        numel = max(0, min(per_rank, parameter.ds_numel - start))  # the last ranks hold padding
        tensors = {"weight": self._zero.get_local_fp32_param(parameter)}
        for key in ("exp_avg", "exp_avg_sq"):
            tensors[key] = self._zero.get_local_fp32_param(parameter, key)
        return Fragment(
            name, min(start, parameter.ds_numel), {key: tensor.data.view(-1)[:numel] for key, tensor in tensors.items()}
        )

    def _state_views(self, flat: Tensor, start: int, numel: int, weight: Tensor) -> dict[str, Tensor]:
        state = self._adamw.state[flat]
        moments = {key: state[key].narrow(0, start, numel) for key in ("exp_avg", "exp_avg_sq")}
        return {"weight": weight.data.view(-1)[:numel], **moments}

    def _create_optimizer_state(self) -> None:
        # AdamW makes its state at the first step; a checkpoint may be loaded into it before that.
        for flat in self._flats:
            self._adamw.state[flat] = {
                "step": torch.zeros((), dtype=torch.float32, device=flat.device),
                "exp_avg": torch.zeros_like(flat.data),
                "exp_avg_sq": torch.zeros_like(flat.data),
            }

    @property
    def _flats(self) -> list[Tensor]:
        """The flat float32 master weights of this process, one tensor a parameter group; each ZeRO optimizer has a name
        of its own for them (stage 3; stages 1 and 2; stage 1 in bf16)."""
        names = ("fp32_partitioned_groups_flat", "single_partition_of_fp32_groups", "fp32_groups_flat_partition")
        return next(getattr(self._zero, name) for name in names if hasattr(self._zero, name))

    def _poison_gradients(self) -> None:
        # A non-finite gradient on one rank makes ZeRO skip the update on all of them and release its buffers properly.
        if hasattr(self._zero, "averaged_gradients"):
            first = next(gradients[0] for gradients in self._zero.averaged_gradients.values() if gradients)
        else:
            first = self._zero.fp32_groups_gradient_flat_partition[0]
        first.fill_(math.nan)

    def _to_device(self, batch: Batch) -> dict[str, Tensor]:
        return {key: value.to(self.grid.device, non_blocking=True) for key, value in batch.items()}


_SCALER_KEYS = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")


def faster_dtype(device: torch.device, hidden_size: int, tokens: int) -> str:
    """ "bf16" or "fp32", whichever does this model's matrix products faster here; always bf16 on CUDA.

    Measured, because a CPU without bf16 instructions emulates them many times slower than float32.
    """
    if device.type == "cuda":
        return "bf16"
    seconds = {}
    for name in ("fp32", "bf16"):
        x = torch.randn(min(tokens, 4096), hidden_size, dtype=DTYPES[name])
        w = torch.randn(4 * hidden_size, hidden_size, dtype=DTYPES[name])
        runs = []
        for _ in range(6):
            start = time.perf_counter()
            nn.functional.linear(x, w)
            runs.append(time.perf_counter() - start)
        seconds[name] = sorted(runs)[1]
    # bf16 also pays for conversions around the float32 gates: it must win clearly.
    return "bf16" if seconds["bf16"] < 0.7 * seconds["fp32"] else "fp32"
