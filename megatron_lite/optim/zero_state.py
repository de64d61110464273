"""Access the state of DeepSpeed's ZeRO optimizers by the names of the model's parameters.

Stages 1 and 2, stage 1 in bf16, and stage 3 store master weights and moments in flat buffers of three different formats. Only
this file reads and writes them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from megatron_lite.dtypes import DTYPES
from megatron_lite.optim.muon import Muon
from megatron_lite.optim.whole_matrices import MatrixPiece
from megatron_lite.parallel.grid import Grid
from megatron_lite.parallel.sharding_plan import Shard

AVERAGE = "ema"  # key of the average of the weights, among a fragment's tensors and in checkpoints
MOMENTS = ("exp_avg", "exp_avg_sq")  # Muon's matrices have the first alone
_SCALER_KEYS = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")
# The whole 16-bit (or float32) weights of a parameter group; stages 1 and 2; stage 1 in bf16.
_MODEL_FLATS = ("bit16_groups_flat", "bf16_groups_flat")


@dataclass(frozen=True)
class ShardedParameter:
    """A parameter of this process.

    Attributes:
        name: canonical parameter name.
        shard: the part of the full tensor that tensor parallelism gave to this process.
        primary: of the processes that hold equal values, this one writes them.
        heads: number of heads if this is the weight of a projection of queries, keys or values, else 1.
    """

    name: str
    parameter: Any
    shard: Shard
    primary: bool
    heads: int = 1


@dataclass(frozen=True)
class OptimizerFragment:
    """The part of one parameter's training state that this process owns.

    Attributes:
        name, shard, primary: as in `ShardedParameter`.
        start: offset of the fragment in the flattened shard.
        tensors: "weight", "exp_avg", "exp_avg_sq": views [numel] of the live state in float32, or bf16 if it is stored so. Muon's
            matrices have no "exp_avg_sq"; "exp_avg" is their momentum. With an average of the weights also "ema", in float32.
    """

    name: str
    shard: Shard
    start: int
    primary: bool
    tensors: dict[str, Tensor]


@dataclass(frozen=True)
class NamedBuffer:
    """A flat tensor [elements] and name -> (first element, number of elements) of the tensors in it."""

    buffer: Tensor
    ranges: dict[str, tuple[int, int]]


def concatenated(tensors: Sequence[tuple[str, Tensor]]) -> list[NamedBuffer]:
    """Return a copy of named tensors of one dtype in one buffer; an empty list without tensors."""
    if not tensors:
        return []
    starts = accumulate((tensor.numel() for _, tensor in tensors), initial=0)
    ranges = {name: (start, tensor.numel()) for (name, tensor), start in zip(tensors, starts, strict=False)}
    return [NamedBuffer(torch.cat([tensor.detach().flatten() for _, tensor in tensors]), ranges)]


class OptimizerState:
    """The optimizer's state on this process.

    Args:
        zero: DeepSpeed's ZeRO optimizer around `optimizer`.
        optimizer: AdamW or Muon, from `build_optimizer`.
        parameters: of this process's pipeline stage.
        stage: of ZeRO, 1 to 3.
        dtype: "bf16", "fp16" or "fp32".
        ema_decay: of an exponential moving average of the weights; 0 for none.

    Attributes:
        has_average: there is an average.
    """

    def __init__(
        self,
        zero: Any,
        optimizer: Any,
        parameters: Sequence[ShardedParameter],
        *,
        stage: int,
        dtype: str,
        grid: Grid,
        ema_decay: float = 0.0,
    ) -> None:
        self._zero, self._optimizer, self._parameters = zero, optimizer, list(parameters)
        self._stage, self._dtype, self._grid = stage, dtype, grid
        if dtype == "fp16":
            # At the minimum DeepSpeed would raise. Steps are skipped instead, and the trainer limits their number.
            zero.loss_scaler.raise_error_at_min_scale = False
        # AdamW creates its state at the first step, but a checkpoint may be loaded before.
        for index, flat in enumerate(self._flats):
            state = {
                "step": torch.zeros((), dtype=torch.float32, device=flat.device),
                "exp_avg": torch.zeros_like(flat.data),
            }
            if isinstance(optimizer, Muon) and optimizer.param_groups[index]["muon"]:
                state["exp_avg"] = state["exp_avg"].to(DTYPES[optimizer.settings.momentum_dtype])
                optimizer.attach(list(self._matrix_pieces(index)), self._grid.stage_group)
            else:
                state["exp_avg_sq"] = torch.zeros_like(flat.data)
            optimizer.state[flat] = state
        self._ema_decay, self._updates, self.has_average = ema_decay, 0, ema_decay > 0
        self._averages: dict[str, Tensor] = {}
        if self.has_average:
            self._averages = {
                fragment.name: fragment.tensors["weight"].detach().float().clone() for fragment in self.fragments()
            }

    def fragments(self) -> Iterator[OptimizerFragment]:
        """Yield the training state that this process owns, parameter by parameter."""
        for sharded in self._parameters:
            parameter = sharded.parameter
            if self._stage == 3:
                start, tensors = self._partition(parameter)
            elif parameter._hp_mapping is not None:  # None: another replica owns all of it
                mapping = parameter._hp_mapping
                state = self._optimizer.state[self._flats[mapping.param_group_index]]
                start, numel = mapping.hp_fragment_address.start, mapping.hp_fragment_address.numel
                tensors = {key: state[key].narrow(0, start, numel) for key in MOMENTS if key in state}
                tensors["weight"] = mapping.hp_fragment.data.view(-1)[:numel]
                start = mapping.lp_fragment_address.start
            else:
                continue
            if sharded.name in self._averages:
                tensors[AVERAGE] = self._averages[sharded.name]
            yield OptimizerFragment(sharded.name, sharded.shard, start, sharded.primary, tensors)

    def update_average(self) -> None:
        """Move the average towards the weights, after an update that was applied.

        average <- d average + (1 - d) weight with d = min(ema_decay, (1 + updates) / (10 + updates)): the first weights count
        little, as in TensorFlow's ExponentialMovingAverage.
        """
        self._updates += 1
        if self.has_average:
            share = 1 - min(self._ema_decay, (1 + self._updates) / (10 + self._updates))
            pairs = [
                (fragment.tensors[AVERAGE], fragment.tensors["weight"].detach().float())
                for fragment in self.fragments()
            ]
            if pairs:
                averages, weights = map(list, zip(*pairs, strict=True))
                torch._foreach_lerp_(averages, weights, share)

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Use the average of the weights, if there is one, in place of the weights. Every process calls it."""
        if not self.has_average:
            yield
            return
        step = self.steps
        previous = [fragment.tensors["weight"].clone() for fragment in self.fragments()]
        for fragment in self.fragments():
            fragment.tensors["weight"].copy_(fragment.tensors[AVERAGE])
        self.finish_load(step)
        try:
            yield
        finally:
            for fragment, weight in zip(self.fragments(), previous, strict=True):
                fragment.tensors["weight"].copy_(weight)
            self.finish_load(step)

    def buffers(self) -> Iterator[Tensor]:
        """Yield the flat buffers of the fragments, with padding: master weights and moments by parameter group, then averages."""
        for flat in self._flats:
            state = self._optimizer.state[flat]
            yield from (flat.data, *(state[key] for key in MOMENTS if key in state))
        yield from self._averages.values()

    def weight_buffers(self) -> list[NamedBuffer]:
        """Return the weights that the forward pass reads, as far as every data and context rank holds equal copies.

        Under stage 3 these are copies of the small weights that stay gathered, and nothing while these are partitioned.
        """
        if self._stage == 3:
            names = {id(sharded.parameter): f"weight {sharded.name}" for sharded in self._parameters}
            persistent = self._zero.persistent_parameters
            gathered = all(parameter.ds_status.name == "AVAILABLE" for parameter in persistent)
            return concatenated([(names[id(p)], p.data) for p in persistent] if gathered else [])
        flats = next(getattr(self._zero, name) for name in _MODEL_FLATS if hasattr(self._zero, name))
        return [NamedBuffer(flat, self._ranges_in(flat)) for flat in flats]

    def tensor_replicas(self) -> list[list[tuple[str, Tensor]]]:
        """Return views of the weights, master weights and moments that all ranks of a tensor group hold, with their names.

        Tensors of one list have one dtype.
        """
        weights = [
            (f"weight {sharded.name}", sharded.parameter.data)
            for sharded in self._parameters
            if sharded.shard.count == 1 and self._stage < 3
        ]
        fragments = [fragment for fragment in self.fragments() if fragment.shard.count == 1]
        kinds = {"weight": "master weight", "exp_avg": "exp_avg of", "exp_avg_sq": "exp_avg_sq of"}
        state = [
            [
                (f"{label} {fragment.name}", fragment.tensors[kind])
                for fragment in fragments
                if kind in fragment.tensors and fragment.tensors[kind].dtype == dtype
            ]
            for kind, label in kinds.items()
            for dtype in (torch.float32, torch.bfloat16)
        ]
        return [weights, *state]

    def _ranges_in(self, flat: Tensor) -> dict[str, tuple[int, int]]:
        """Return name -> (first element, number of elements) of the parameters whose memory is in `flat`."""
        begin, end = flat.data_ptr(), flat.data_ptr() + flat.nbytes
        return {
            f"weight {sharded.name}": (
                (sharded.parameter.data_ptr() - begin) // flat.element_size(),
                sharded.parameter.numel(),
            )
            for sharded in self._parameters
            if begin <= sharded.parameter.data_ptr() < end
        }

    def finish_load(self, step: int) -> None:
        """Set the step count and refresh the 16-bit or gathered copies, after the fragments were written.

        step: updates that the optimizer has applied, without skipped steps.
        """
        self._updates = step
        for state in self._optimizer.state.values():
            state["step"].fill_(float(step))
        if self._stage == 3:
            for sharded in self._parameters:
                weight = self._partition(sharded.parameter)[1]["weight"]
                sharded.parameter.ds_tensor.data.view(-1)[: weight.numel()].copy_(weight)
            # Small weights stay gathered. The next forward pass must gather them again.
            if persistent := self._zero.persistent_parameters:
                persistent[0].partition(persistent, has_been_updated=False)
        elif hasattr(self._zero, "update_lp_params"):
            self._zero.update_lp_params()
        else:
            for index, flat in enumerate(self._flats):
                group = self._zero.real_dp_process_group[index]
                partitions = self._zero.parallel_partitioned_bit16_groups[index]
                local = partitions[torch.distributed.get_rank(group)]
                local.data.copy_(flat.data)
                torch.distributed.all_gather(list(partitions), local.clone(), group)

    @property
    def steps(self) -> int:
        """Return the updates that the optimizer has applied, those before a resume included."""
        # The maximum, because AdamW does not count for a tensor without gradients.
        return max((int(state["step"].item()) for state in self._optimizer.state.values()), default=0)

    def set_learning_rate(self, lr: float) -> None:
        """Set the learning rate of the next update, for all parameters."""
        for group in self._optimizer.param_groups:
            group["lr"] = lr

    def compute_muon_update(self) -> None:
        """Orthogonalize copies of the matrices, to measure the time of Muon; nothing with AdamW. Every process calls it."""
        if isinstance(self._optimizer, Muon):
            for group, flat in zip(self._optimizer.param_groups, self._flats, strict=True):
                if group["muon"]:
                    self._optimizer.orthogonalize(flat.detach().to(self._optimizer.compute_dtype, copy=True))

    def mark_step_invalid(self) -> None:
        """Make every process skip the next update, by `skip_next` or by a NaN gradient on this process."""
        if hasattr(self._zero, "skip_next"):
            self._zero.skip_next()
        else:
            first = next(gradients[0] for gradients in self._zero.averaged_gradients.values() if gradients)
            first.fill_(math.nan)

    @property
    def loss_scale(self) -> float:
        """Return the factor of the loss; 1 unless fp16."""
        return float(self._zero.loss_scale) if self._dtype == "fp16" else 1.0

    @property
    def loss_scaler_state(self) -> dict[str, float]:
        """Return the dynamic loss scaler's numbers (fp16); empty otherwise."""
        if self._dtype != "fp16":
            return {}
        scaler = self._zero.loss_scaler
        return {key: getattr(scaler, key) for key in _SCALER_KEYS if hasattr(scaler, key)}

    @loss_scaler_state.setter
    def loss_scaler_state(self, state: Mapping[str, float]) -> None:
        for key, value in state.items() if self._dtype == "fp16" else ():  # a checkpoint of fp16 may go on in bf16
            setattr(self._zero.loss_scaler, key, value)

    @property
    def _flats(self) -> list[Tensor]:
        """Return the flat master weights of this process, one tensor per parameter group."""
        # Of stage 3; stages 1 and 2; stage 1 in bf16.
        names = ("fp32_partitioned_groups_flat", "single_partition_of_fp32_groups", "fp32_groups_flat_partition")
        return next(getattr(self._zero, name) for name in names if hasattr(self._zero, name))

    def _matrix_pieces(self, group: int) -> Iterator[MatrixPiece]:
        """Yield the pieces of matrices in the flat master weights of a parameter group, under stage 1 or 2."""
        for sharded in self._parameters:
            mapping, shard = sharded.parameter._hp_mapping, sharded.shard
            if mapping is not None and mapping.param_group_index == group and mapping.hp_fragment_address.numel:
                shape = list(sharded.parameter.shape)
                shape[shard.dim] *= shard.count
                at = mapping.hp_fragment_address
                start = mapping.lp_fragment_address.start
                heads = sharded.heads if self._optimizer.settings.per_head else 1
                yield MatrixPiece(sharded.name, (shape[0], shape[1]), shard, start, at.numel, at.start, heads)

    def _partition(self, parameter: Any) -> tuple[int, dict[str, Tensor]]:
        """Return the start of this process's part of a parameter under stage 3, and its state."""
        per_rank = parameter.ds_tensor.ds_numel
        start = self._grid.replica_rank * per_rank
        numel = max(0, min(per_rank, parameter.ds_numel - start))  # the last ranks hold padding
        tensors = {"weight": self._zero.get_local_fp32_param(parameter)}
        for key in MOMENTS:
            tensors[key] = self._zero.get_local_fp32_param(parameter, key)
        return min(start, parameter.ds_numel), {key: tensor.data.view(-1)[:numel] for key, tensor in tensors.items()}
