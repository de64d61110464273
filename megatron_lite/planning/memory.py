"""Estimate the memory of one process by part, and the peak of a training step.

The table gives the bytes per parameter of this process with DeepSpeed, for n processes that share the optimizer state.
`tests/tools/planning/test_memory.py` checks it against allocations of DeepSpeed 0.19.8.

|                  | weights | gradients | master | moments | while the gradients are reduced                     |
|------------------|---------|-----------|--------|---------|-----------------------------------------------------|
| bf16, ZeRO 1     | 2       | 4 *       | 4 / n  | 8 / n   | 16-bit gradients 2                                  |
| 16 bit, ZeRO 2   | 2       | 4 / n     | 4 / n  | 8 / n   | buckets                                             |
| 16 bit, ZeRO 3   | 2 / n   | 6 / n     | 4 / n  | 8 / n   | buckets, and the weights that are gathered          |
| float32, ZeRO 1  | 4       | 4         | 4 / n  | 8 / n   | buckets                                             |
| float32, ZeRO 2  | 4       | 4 / n     | 4 / n  | 8 / n   | buckets                                             |
| float32, ZeRO 3  | 4 / n   | 8 / n     | 4 / n  | 8 / n   | buckets, and the weights that are gathered          |
| all bf16, 1 or 2 | 2       | 2 / n     | 0      | 4 / n   | gradients 2; n > 1: buckets; then a flat copy 2 / n |
| all bf16, ZeRO 3 | 2 / n   | 4 / n     | 2 / n  | 4 / n   | buckets, and the weights that are gathered          |

Muon's matrices have a momentum of 4 / n or 2 / n in place of the moments, and temporary tensors in its update.
An average of the weights (`optimizer.ema_decay`) adds 4 / n to the moments.

* On a GPU only from the end of the first backward pass to the end of the step. Not needed with one process and one micro-batch
per step (optim/bf16_optimizer.py).

Blocks in CUDA graphs keep their activations, workspace and 16-bit gradients in a private memory pool for the whole run. The
head and the optimizer step cannot reuse this pool. `torch.cuda.max_memory_allocated` does not include it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron_lite.optim.muon import BATCH

GIB = 2**30
BUCKET = 500_000_000  # most elements per reduction bucket, DeepSpeed's default
LIVE_PARAMETERS = 1_000_000_000  # parameters that ZeRO 3 keeps gathered (stage3_max_live_parameters)


@dataclass(frozen=True)
class LayerCost:
    """Memory cost of one layer on one process, for one micro-batch.

    Attributes:
        parameters: elements of its weights on this process (a tied weight counts on its owner).
        largest: elements of its largest weight.
        saved: bytes that its forward pass keeps for the backward pass, output included.
        forward: peak bytes during the forward pass, above the bytes before it.
        backward: peak bytes during the backward pass above `saved`, weight gradients included.
        matrices: elements of its matrices on this process, which Muon updates.
    """

    parameters: int
    largest: int
    saved: float
    forward: float
    backward: float
    matrices: int = 0


@dataclass(frozen=True)
class Setting:
    """Everything except the layers that determines the memory of a process.

    Attributes:
        dtype: "bf16", "fp16" or "fp32".
        zero_stage: 1, 2 or 3.
        replicas: processes that share the optimizer state (data ranks x context ranks).
        accumulation: micro-batches per step.
        in_flight: micro-batches whose activations are held at once (pipelines; else 1).
        overlap: reductions overlap with the backward pass, in two buckets (CUDA).
        released: the float32 gradients of bf16 are freed between steps (CUDA).
        optimizer_state: "fp32" or "bf16", from `precision.optimizer_state`.
        graphs: all layers except the first and the last run as CUDA graphs.
        momentum: bytes per element of Muon's momentum; 0 with AdamW.
        averaged: a float32 moving average of the weights is kept (`optimizer.ema_decay`).
        tensor: processes of a tensor-parallel group, which exchange Muon's matrices too.
    """

    dtype: str
    zero_stage: int
    replicas: int
    accumulation: int = 1
    in_flight: int = 1
    overlap: bool = True
    released: bool = True
    optimizer_state: str = "fp32"
    graphs: bool = False
    momentum: int = 0
    averaged: bool = False
    tensor: int = 1

    @property
    def keeps_gradients(self) -> bool:
        """Return whether gradients outlive the next backward pass and must be copied out of the CUDA graphs."""
        return self.dtype != "bf16" or self.narrow or self.zero_stage > 1

    @property
    def narrow(self) -> bool:
        """Return whether weights, moments and gradients are all stored in bf16."""
        return self.optimizer_state == "bf16"


def state_bytes(parameters: int, setting: Setting, matrices: int = 0) -> dict[str, float]:
    """Return the bytes that persist between steps, by part. matrices: elements of the parameters that Muon updates."""
    width = 4 if setting.dtype == "fp32" else 2
    n, stage = setting.replicas, setting.zero_stage
    parts = {"weights": width * parameters / (n if stage == 3 else 1)}
    if stage == 3:
        parts["gradients"] = (2 if setting.narrow else 4) * parameters / n + width * parameters / n
    elif setting.dtype == "bf16" and stage == 1 and not setting.narrow:
        parts["gradients"] = 0.0 if setting.released else 4.0 * parameters
    else:
        parts["gradients"] = 0.0  # allocated in every step: see `step_bytes`
    # With ZeRO 1 and 2 the bf16 weights share memory with the master weights (`share_weights` in engine/deepspeed.py).
    per_parameter = (12 if not setting.narrow else 6 if stage == 3 else 4) + 4 * setting.averaged
    parts["optimizer"] = per_parameter * parameters / n
    parts["optimizer"] -= ((4 if setting.narrow else 8) - setting.momentum) * matrices / n
    return parts


def muon_bytes(matrices: int, setting: Setting) -> float:
    """Return the temporary bytes of an update of `matrices` elements by Muon: the larger of two phases.

    The first holds float32 momentum and direction, unless a kernel computes them. The second holds the process's direction and
    one batch of Newton-Schulz steps: X, its successor and two square matrices. The batch has about half of the elements, those
    of the most frequent shape. Several processes also hold whole matrices, and before and after the steps the exchange buffers.
    """
    width, local = 4 if setting.dtype == "fp32" else 2, matrices / setting.replicas
    kernel = setting.released and setting.dtype == "bf16" and setting.zero_stage == 1
    elementwise = 0.0 if kernel else (14 if setting.narrow else 12 - width) * local
    steps, exchanged = 4 * width * min(local / 2, BATCH), 0.0
    if setting.replicas * setting.tensor > 1:
        steps, exchanged = steps + width * local, 3 * width * local
    return max(elementwise, width * local + max(steps, exchanged))


def step_bytes(layers: Sequence[LayerCost], setting: Setting) -> dict[str, float]:
    """Return the bytes of one process at the peak of a step, by part; their sum is the estimate.

    Args:
        layers: layers of this process, first to last.
    """
    parameters = sum(layer.parameters for layer in layers)
    width = 4 if setting.dtype == "fp32" else 2
    bucket = width * min(BUCKET, parameters)
    largest = max(layer.largest for layer in layers)
    matrices = sum(layer.matrices for layer in layers) if setting.momentum else 0
    state = state_bytes(parameters, setting, matrices)
    buffers = _gradient_bytes(parameters, setting, width, bucket, largest)
    gathered = width * min(parameters, LIVE_PARAMETERS) if setting.zero_stage == 3 and setting.replicas > 1 else 0.0
    others = sum(layer.saved for layer in layers) * (setting.in_flight - 1)
    if setting.graphs:
        activations, more, work = max(_graph_phases(layers, setting, buffers, width), key=sum)
        state["gradients"] += more
        return {**state, "activations": activations, "workspace": work}

    phases: list[tuple[float, float, float]] = []  # activations, gradients and buffers, workspace
    saved, gradients = others, 0
    for layer in layers:
        phases.append((saved, gathered + buffers.before, max(layer.forward, layer.saved)))
        saved += layer.saved
    for layer in reversed(layers):
        early = buffers.during if gradients else buffers.before
        phases.append((saved, gathered + early + buffers.per_parameter * gradients, layer.backward))
        saved -= layer.saved
        gradients += layer.parameters
    phases.append((others, buffers.after, 0.0))
    if matrices:
        phases.append(
            (others, min(buffers.after, _reduced_gradient_bytes(parameters, setting)), muon_bytes(matrices, setting))
        )
    activations, more, work = max(phases, key=sum)
    state["gradients"] += more
    return {**state, "activations": activations, "workspace": work}


def _graph_phases(
    layers: Sequence[LayerCost], setting: Setting, buffers: _GradientBuffers, width: int
) -> Iterator[tuple[float, float, float]]:
    """Yield (activations, gradients and buffers, workspace) in bytes per phase of a step with two CUDA graphs."""
    first, *blocks, last = layers
    recorded = sum(block.parameters for block in blocks)
    saved = sum(block.saved for block in blocks)
    pool, gradients, previous = 0.0, 0.0, 0.0
    for block in blocks:
        pool = max(pool, previous + max(block.forward, block.saved))
        previous += block.saved
    for block in reversed(blocks):
        pool = max(pool, saved + gradients + block.backward)
        saved -= block.saved
        gradients += width * block.parameters
    # Inputs of the graphs and the gradient of their output, each as large as the output of the first layer.
    pool = max(pool, gradients) + 3 * first.saved
    yield pool, buffers.before, max(first.forward, last.forward, last.saved)
    yield pool + last.saved, buffers.before, last.backward
    copied = recorded if setting.keeps_gradients else 0
    yield pool, buffers.during + max(buffers.per_parameter * (last.parameters + copied), width * copied), first.backward
    yield pool, buffers.after - (0 if setting.keeps_gradients else width * recorded), 0.0


@dataclass(frozen=True)
class _GradientBuffers:
    """Temporary bytes of gradients and buffers.

    Attributes:
        before, during, after: before the first gradient, during and after the backward pass.
        per_parameter: further bytes per parameter whose gradient is complete.
    """

    before: float
    during: float
    per_parameter: float
    after: float


def _gradient_bytes(parameters: int, setting: Setting, width: int, bucket: float, largest: int) -> _GradientBuffers:
    n, stage = setting.replicas, setting.zero_stage
    buckets = bucket * (2 if setting.overlap else 1)
    if stage == 3:
        cast = 0.0 if setting.narrow else (4 - width) * bucket / width / n
        return _GradientBuffers(0.0, buckets, 0.0, buckets + bucket + cast)
    if setting.narrow:
        return _narrow_gradient_bytes(parameters, setting, buckets)
    if setting.dtype == "bf16" and stage == 1:
        # After a backward pass the optimizer adds the 16-bit gradients to float32 sums and frees them. Communication uses
        # a small bucket of the sums.
        if setting.released and n == setting.accumulation == 1:
            return _GradientBuffers(0.0, 0.0, 2.0, 2.0 * parameters)  # no accumulation and no reduction
        sums = 4.0 * parameters if setting.released else 0.0
        before = sums if setting.accumulation > 1 else 0.0
        return _GradientBuffers(before, before, 2.0, sums + 2.0 * parameters)
    if stage == 1:
        sums = 4.0 * parameters if setting.accumulation > 1 else 0.0
        return _GradientBuffers(sums, sums, width, width * parameters + sums + bucket)
    partition = 4 * parameters / n
    sums = partition if setting.accumulation > 1 and width == 4 else 0.0
    full = setting.accumulation > 1 or parameters > BUCKET  # a bucket is reduced before the backward pass ends
    before = partition + sums if setting.accumulation > 1 else 0.0
    cast = bucket + 4 * largest if width == 2 else 0.0
    return _GradientBuffers(
        before, buckets + (partition + sums + cast if full else 0.0), 0.0, partition + sums + buckets + cast
    )


def _reduced_gradient_bytes(parameters: int, setting: Setting) -> float:
    """Return the temporary bytes of the gradients during the update, after their reduction."""
    if setting.dtype == "fp32":
        return 8.0 * parameters / setting.replicas
    if setting.zero_stage > 1:
        return 4.0 * parameters / setting.replicas
    if setting.narrow or (setting.released and setting.replicas == setting.accumulation == 1):
        return 2.0 * parameters
    return 4.0 * parameters if setting.released else 0.0


def _narrow_gradient_bytes(parameters: int, setting: Setting, buckets: float) -> _GradientBuffers:
    """Return the buffers of ZeRO 1 and 2 with all tensors in bf16. One process alone has no buckets."""
    n, partition = setting.replicas, 2.0 * parameters / setting.replicas
    summed, cut = setting.accumulation > 1, setting.zero_stage == 2
    earlier = 0.0 if not summed else partition if cut else 2.0 * parameters  # gradients of previous micro-batches
    again = earlier if cut else 0.0  # ZeRO 2 adds the last micro-batch itself; with ZeRO 1 autograd accumulates
    if n == 1:
        # On a GPU, ZeRO 1 reads the gradients in place (optim/bf16_optimizer.py).
        copied = 0.0 if setting.released and not cut else 2.0
        return _GradientBuffers(
            earlier, earlier, 0.0 if summed and not cut else 2.0, (2.0 + copied) * parameters + again
        )
    reduced = partition if parameters > BUCKET else 0.0  # a bucket is reduced before the backward pass ends
    ready = buckets if summed and not cut else 0.0  # buckets persist between micro-batches
    return _GradientBuffers(earlier + ready, earlier + buckets + reduced, 0.0, buckets + 2 * partition + again)


class Allocations(TorchDispatchMode):
    """Count the bytes of tensors created in the block on one device, also on "meta", where nothing is allocated.

    Args:
        device: device type.
        existing: tensors that exist already; they and their views do not count.

    Attributes:
        now, peak: live bytes, and their maximum so far.
    """

    def __init__(self, device: str, existing: Iterable[Tensor] = ()) -> None:
        super().__init__()
        self._device = device
        self._existing = {tensor.untyped_storage()._cdata for tensor in existing}
        self._live: dict[int, tuple[Any, int]] = {}
        self.now = self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        # The second output, a buffer, is empty on CUDA; "meta" returns the size of the CPU buffer.
        one = self._device == "meta" and func is torch.ops.aten.log_sigmoid_forward.default
        for leaf in tree_leaves(out[0] if one else out):
            if isinstance(leaf, Tensor) and leaf.device.type == self._device:
                self._note(leaf)
        return out

    def _note(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key in self._live or key in self._existing or not size:
            return

        def freed(_reference: object) -> None:
            self.now -= self._live.pop(key)[1]

        self._live[key] = (weakref.ref(storage, freed), size)
        self.now += size
        self.peak = max(self.peak, self.now)


def idle_bytes_in_graph_pools() -> int:
    """Return the bytes that CUDA graphs hold for intermediate results, which PyTorch does not count as allocated."""
    segments = [part for part in torch.cuda.memory_snapshot() if tuple(part["segment_pool_id"]) != (0, 0)]
    return sum(part["total_size"] - part["allocated_size"] for part in segments)


def layer_cost(
    layer: torch.nn.Module,
    call: Callable[..., Tensor],
    x: Tensor,
    *,
    parameters: int | None = None,
    matrices: int = 0,
    **arguments: Tensor,
) -> LayerCost:
    """Return the cost of a layer, measured in one forward and backward pass.

    Args:
        call: the layer, or the layer under activation checkpointing.
        x: tokens [batch, length] or hidden states [batch, length, hidden]; on "meta" nothing is computed.
        parameters: weight elements that count for this layer; None: all.
        matrices: as in `LayerCost`.
        arguments: further tensors that `call` takes.
    """
    if x.is_floating_point():
        x = x.requires_grad_()
    with Allocations(x.device.type, [x, *layer.parameters(), *layer.buffers(), *arguments.values()]) as count:
        out = call(x, **arguments)
        saved, forward = count.now, count.peak
        gradient = torch.empty_like(out)
        count.peak = start = count.now
        out.backward(gradient)
        backward = count.peak - start
    sizes = [p.numel() for p in layer.parameters()]
    for p in layer.parameters():
        p.grad = None
    local = sum(sizes) if parameters is None else parameters
    return LayerCost(local, max(sizes, default=0), float(saved), float(forward), float(backward), matrices)
