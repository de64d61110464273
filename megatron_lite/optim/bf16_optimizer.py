"""Replace the gradient accumulation and the update of DeepSpeed's bf16 optimizer by few large kernels, with equal results.

DeepSpeed accumulates gradients through float32 copies and zeroes buffers several times per step. It flattens, reduces and
unflattens all gradients even on one process, which rounds the sums over micro-batches to bf16. It handles the norm and the
clipping tensor by tensor, synchronises twice, and writes the 16-bit weights in a separate pass.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf, isfinite, nan
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_lite.optim.muon import ADAMW_RMS
from megatron_lite.parallel.collectives import async_to_host, reduce_scatter_single

_BUCKET = 1 << 26  # elements per reduce-scatter


def patch_bf16_optimizer(engine: Any, zero: Any, replicas: int, *, release: bool, kernels: bool = False) -> None:
    """Patch DeepSpeed's bf16 optimizer to read, write and store gradients less. Other optimizers do not change.

    Afterwards `zero.skip_next()` makes the next step change nothing, as a non-finite gradient does.

    Args:
        replicas: processes whose gradients are summed.
        release: free the float32 sums after each step. Useful with a caching allocator, as CUDA's.
        kernels: use Triton. It needs no float32 sums with one process and one micro-batch, or with one process, ZeRO 1 and all
            state in bf16, where autograd accumulates.
    """
    from deepspeed.runtime.bf16_optimizer import BF16_Optimizer

    pipeline = hasattr(engine, "pipeline_enable_backward_allreduce")
    alone = kernels and replicas == 1 and not pipeline
    has_only_bf16 = getattr(zero, "bf16_master_weights_and_gradients", False) and hasattr(zero, "bit16_groups")
    autograd_accumulates = alone and has_only_bf16 and not zero.partition_gradients
    if autograd_accumulates:
        _add_bf16_names(zero)
    elif not isinstance(zero, BF16_Optimizer):
        return
    if replicas == 1:
        engine.enable_backward_allreduce = False
        if pipeline:
            engine.pipeline_enable_backward_allreduce = False

    def reduce(**_: Any) -> None:
        for flat, group in zip(zero.fp32_groups_gradients_flat, zero.real_dp_process_group, strict=True):
            average_local_slice(flat, group, engine.communication_data_type)

    def reads_in_place() -> bool:
        return autograd_accumulates or (alone and engine.gradient_accumulation_steps() == 1)

    engine.buffered_allreduce_fallback = reduce
    step = PatchedStep(zero, reads_in_place, release, _KernelPasses(zero) if kernels else _TorchPasses(zero))
    zero.update_hp_grads, zero.step, zero.skip_next = step.add, step.step, step.skip_next
    zero.clear_lp_grads = zero.clear_hp_grads = zero.zero_grad = _nothing


def _add_bf16_names(zero: Any) -> None:
    """Give the ZeRO 1 optimizer with all state in bf16 the attribute names of the bf16 optimizer."""
    zero.bf16_groups, zero.bf16_groups_flat = zero.bit16_groups, zero.bit16_groups_flat
    zero.bf16_partitioned_groups = zero.parallel_partitioned_bit16_groups
    zero.fp32_groups_flat_partition = zero.single_partition_of_fp32_groups
    none = [flat.new_empty(0) for flat in zero.bit16_groups_flat]  # float32 sums
    zero.fp32_groups_gradients_flat = none
    zero.fp32_groups_gradients = [[flat] * len(group) for flat, group in zip(none, zero.bit16_groups, strict=True)]


def _nothing(*_: Any, **__: Any) -> None:
    """Do nothing where DeepSpeed would set gradients to zero: there are none."""


class PatchedStep:
    """Replaces `update_hp_grads` and `step` of DeepSpeed's bf16 optimizer.

    Args:
        zero: DeepSpeed's optimizer.
        reads_in_place: returns whether the update reads the 16-bit gradients, without float32 sums.
        release: free the float32 sums after each step.
        passes: computes sums, norm and update.
    """

    def __init__(
        self, zero: Any, reads_in_place: Callable[[], bool], release: bool, passes: _TorchPasses | _KernelPasses
    ) -> None:
        self._zero, self._reads_in_place, self._release, self._passes = zero, reads_in_place, release, passes
        self._skip, self._fresh = False, True
        for parameters, totals in zip(zero.bf16_groups, zero.fp32_groups_gradients, strict=True):
            for parameter, total in zip(parameters, totals, strict=True):
                parameter._hp_grad = total  # DeepSpeed reduces it over the stages that share a weight
        self._clear()

    @torch.no_grad()
    def add(self, clear_lp_grads: bool = False) -> None:
        """Add the gradients of a backward pass to the float32 sums."""
        if self._reads_in_place():
            return
        zero = self._zero
        for group, (parameters, flat) in enumerate(zip(zero.bf16_groups, zero.fp32_groups_gradients_flat, strict=True)):
            memory = flat.untyped_storage()
            if not memory.size():
                memory.resize_(flat.nbytes)
                self._padding(group).zero_()
            self._passes.add(group, [parameter.grad for parameter in parameters], self._fresh)
        self._fresh = False
        self._drop()

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """Clip the gradients, update the master weights of this process and gather the 16-bit weights.

        A gradient that is not finite changes nothing and sets DeepSpeed's `overflow`, as a skipped step does.
        """
        zero, norm = self._zero, inf
        if not self._skip:
            gradients = None
            if self._reads_in_place():
                gradients = [[parameter.grad for parameter in parameters] for parameters in zero.bf16_groups]
            square = self._passes.square(gradients)
            if dist.get_world_size(zero.dp_process_group) > 1:
                dist.all_reduce(square, group=zero.dp_process_group)
            # Last, so that tensor ranks and stages clip the weights that they share by the same bits. Sums over different
            # groups of replicas may differ in their order.
            if zero.mpu is not None:
                dist.all_reduce(square, group=zero.mpu.get_model_parallel_group())
            length = square.sqrt()
            # The copy to the host starts before the update is queued, so that the host does not wait for the update.
            fetch_norm = async_to_host(length)
            factor = (zero.clip_grad / (length + 1e-6)).clamp(max=1) if zero.clip_grad > 0 else torch.ones_like(length)
            self._passes.update(gradients, torch.where(length.isfinite(), factor, nan).float())
            self._gather()
            (norm,) = fetch_norm()
            self._passes.count_update(isfinite(norm))
        self._skip, zero.overflow = False, not isfinite(norm)
        zero._global_grad_norm = inf if zero.overflow else norm
        if self._reads_in_place():
            self._drop()
        self._clear()

    def skip_next(self) -> None:
        """Make the next step change nothing."""
        self._skip = True

    def _drop(self) -> None:
        """Free the 16-bit gradients, so that the next backward pass writes them instead of adding to zeros."""
        for parameters in self._zero.bf16_groups:
            for parameter in parameters:
                parameter.grad = None

    def _clear(self) -> None:
        """Discard the float32 sums."""
        self._fresh = True
        if self._release:
            for flat in self._zero.fp32_groups_gradients_flat:
                flat.untyped_storage().resize_(0)  # shared by all its views

    def _padding(self, group: int) -> Tensor:
        used = self._zero.fp32_groups_actual_gradients_flat[group].numel()
        return self._zero.fp32_groups_gradients_flat[group][used:]

    def _gather(self) -> None:
        from deepspeed.runtime.utils import all_gather_dp_groups

        zero = self._zero
        all_gather_dp_groups(
            groups_flat=zero.bf16_groups_flat,
            partitioned_param_groups=zero.bf16_partitioned_groups,
            dp_process_group=zero.real_dp_process_group,
            start_alignment_factor=zero.nccl_start_alignment_factor,
            allgather_bucket_size=zero.allgather_bucket_size,
        )


def _local_sums(zero: Any, group: int) -> list[tuple[Tensor, bool]]:
    """Return the float32 sums of a group per parameter, cut to the optimizer state of this process.

    The second of each pair says whether this process counts the part in the norm: one process does for all copies.
    """
    from deepspeed.runtime.utils import bwc_tensor_model_parallel_rank, is_model_parallel_parameter

    first = bwc_tensor_model_parallel_rank(mpu=zero.mpu) == 0
    length = zero.fp32_groups_flat_partition[group].numel()
    begin = dist.get_rank(zero.real_dp_process_group[group]) * length
    sums, offset = [], 0
    for parameter in zero.bf16_groups[group]:
        counted = first or is_model_parallel_parameter(parameter)
        start, end = (min(max(at, begin), begin + length) for at in (offset, offset + parameter.numel()))
        part = zero.fp32_groups_gradients_flat[group][start:end]
        sums.append((part, counted and not getattr(parameter, "ds_pipe_replicated", False)))
        offset += parameter.numel()
    return sums


class _TorchPasses:
    """The passes over gradients, master weights and moments with PyTorch's functions.

    gradients: the 16-bit gradients per group; None if the float32 sums hold them. This class reads only the sums.
    """

    def __init__(self, zero: Any) -> None:
        self._zero = zero
        sums = [_local_sums(zero, group) for group in range(len(zero.bf16_groups))]
        self._counted = [part for group in sums for part, counted in group if counted and part.numel()]

    def add(self, group: int, gradients: list[Tensor | None], fresh: bool) -> None:
        """Add to the float32 sums, which are empty if `fresh`."""
        for total, gradient in zip(self._zero.fp32_groups_gradients[group], gradients, strict=True):
            if gradient is not None:
                total.copy_(gradient.view(-1)) if fresh else total.add_(gradient.view(-1))
            elif fresh:
                total.zero_()

    def square(self, gradients: list[list[Tensor | None]] | None) -> Tensor:
        """Return the sum of squares over the gradients that this process counts."""
        if not self._counted:
            return self._zero.fp32_groups_flat_partition[0].new_zeros(1)
        return torch.stack(torch._foreach_norm(self._counted)).square().sum().view(1)

    def update(self, gradients: list[list[Tensor | None]] | None, factor: Tensor) -> None:
        """Run AdamW with the gradients times the scalar `factor`; NaN changes nothing."""
        zero = self._zero
        if factor.isnan():
            return
        for master, gradient in zip(
            zero.fp32_groups_flat_partition, zero.fp32_groups_gradient_flat_partition, strict=True
        ):
            master.grad = gradient.mul_(factor) if factor != 1 else gradient
        zero.optimizer.step()
        for weight, master in zip(_local_weights(zero), zero.fp32_groups_flat_partition, strict=True):
            weight.copy_(master)

    def count_update(self, applied: bool) -> None:
        """Record whether the update was applied, as soon as the host knows it."""


class _KernelPasses:
    """The passes of `_TorchPasses` with Triton, one launch per group."""

    def __init__(self, zero: Any) -> None:
        from megatron_lite.optim.fused_adamw import FlatSegments, GradientPointers

        self._zero, self._device = zero, zero.fp32_groups_flat_partition[0].device
        sums = [_local_sums(zero, group) for group in range(len(zero.bf16_groups))]
        self._local_sums = [[part for part, _ in group] for group in sums]
        counted = [[counts for _, counts in group] for group in sums]

        def segments(tensors: list[list[Tensor]]) -> list[FlatSegments]:
            return [
                FlatSegments([tensor.numel() for tensor in group], self._device, counts)
                for group, counts in zip(tensors, counted, strict=True)
            ]

        self._segments = segments(zero.bf16_groups)
        alone = all(dist.get_world_size(group) == 1 for group in zero.real_dp_process_group)
        self._local_segments = self._segments if alone else segments(self._local_sums)
        self._partitions = [FlatSegments([master.numel()], self._device) for master in zero.fp32_groups_flat_partition]
        self._pointers: list[GradientPointers] = []

    def add(self, group: int, gradients: list[Tensor | None], fresh: bool) -> None:
        segments = self._segments[group]
        segments.add(segments.pointers(_contiguous(gradients)), self._zero.fp32_groups_gradients_flat[group], fresh)

    def square(self, gradients: list[list[Tensor | None]] | None) -> Tensor:
        every = self._local_segments if gradients is None else self._segments
        tensors: Sequence[Sequence[Tensor | None]] = self._local_sums
        if gradients is not None:
            tensors = [_contiguous(group) for group in gradients]
        self._pointers = [segments.pointers(group) for segments, group in zip(every, tensors, strict=True)]
        counts = [segments.programs for segments in every]
        out = torch.empty(sum(counts), dtype=torch.float32, device=self._device)
        for segments, pointers, part in zip(every, self._pointers, out.split(counts), strict=True):
            segments.squares(pointers, part)
        return out.sum(dtype=torch.float64).view(1)

    def update(self, gradients: list[list[Tensor | None]] | None, factor: Tensor) -> None:
        zero, segments, pointers = self._zero, self._segments, self._pointers
        if gradients is None:
            partitions = zero.fp32_groups_gradient_flat_partition
            segments = self._partitions
            pointers = [whole.pointers([partition]) for whole, partition in zip(segments, partitions, strict=True)]
        weights = _local_weights(zero)
        for group, master in enumerate(zero.fp32_groups_flat_partition):
            state, options = zero.optimizer.state[master], zero.optimizer.param_groups[group]
            state["step"] = state["step"].cpu()
            if options.get("muon"):
                muon = zero.optimizer
                # The padding at the end, which belongs to no segment, stays zero.
                direction = torch.zeros_like(master, dtype=muon.compute_dtype)
                mu, nesterov = muon.settings.momentum, muon.settings.nesterov
                segments[group].momentum(pointers[group], state["exp_avg"], direction, factor, mu, nesterov)
                muon.orthogonalize(direction)
                partition, lr = self._partitions[group], options["lr"]
                decay, rate = lr * options["weight_decay"], lr * ADAMW_RMS
                partition.decay_and_add(partition.pointers([direction]), master, weights[group], factor, decay, rate)
                continue
            segments[group].adamw(
                pointers[group],
                master,
                state["exp_avg"],
                state["exp_avg_sq"],
                weights[group],
                factor,
                step=int(state["step"].item()) + 1,
                lr=options["lr"],
                betas=options["betas"],
                eps=options["eps"],
                weight_decay=options["weight_decay"],
            )

    def count_update(self, applied: bool) -> None:
        self._pointers = []
        for master in self._zero.fp32_groups_flat_partition:
            self._zero.optimizer.state[master]["step"] += applied


def _local_weights(zero: Any) -> list[Tensor]:
    """Return the part of each group's 16-bit weights whose master weights this process holds."""
    return [
        partitions[dist.get_rank(group)]
        for partitions, group in zip(zero.bf16_partitioned_groups, zero.real_dp_process_group, strict=True)
    ]


def _contiguous(gradients: list[Tensor | None]) -> list[Tensor | None]:
    return [None if gradient is None else gradient.contiguous() for gradient in gradients]


def average_local_slice(flat: Tensor, group: Any, dtype: torch.dtype) -> None:
    """Replace this rank's slice of `flat` by its mean over the group (ZeRO 1, Rajbhandari et al. 2020, arXiv 1910.02054).

    Args:
        flat: [processes x elements]; slice r belongs to process r. The other slices do not change.
        group: the process group of the replicas.
        dtype: of the communication and the sum.
    """
    replicas = dist.get_world_size(group)
    rows = flat.view(replicas, -1)
    local = rows[dist.get_rank(group)]
    previous = None
    for columns, into in zip(rows.split(_BUCKET // replicas, dim=1), local.split(_BUCKET // replicas), strict=True):
        sent = columns.to(dtype).contiguous()
        total = torch.empty_like(into, dtype=dtype)
        work = reduce_scatter_single(total, sent.view(-1), group=group, async_op=True)
        # The previous bucket is copied while this one is reduced.
        if previous is not None:
            _finish_bucket(*previous, replicas)
        previous = work, total, into
    if previous is not None:
        _finish_bucket(*previous, replicas)


def _finish_bucket(work: Any, total: Tensor, into: Tensor, replicas: int) -> None:
    work.wait()
    into.copy_(total).div_(replicas)
