"""Memory of one process: what is allocated by whom, as arithmetic, and the peak of a training step.

What DeepSpeed's optimizers hold was read from allocations (deepspeed 0.19.8, `tests/tools/planning/test_plan.py`
repeats it): bytes a
parameter of this process, n processes sharing the optimizer state, b = elements of a reduction bucket.

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

* On a GPU from the end of a step's first backward pass to the end of the step, and not at all where one process has one micro
batch a step (bf16_optimizer.py).

Blocks that are recorded as CUDA graphs (captured.py) keep their memory for good: their activations, what one of them needs at
work and their 16-bit gradients lie in a pool of the graphs' own, so that the head and the optimizer's update come on top of
what otherwise makes room for them. torch.cuda.max_memory_allocated does not see it: of a pool it counts what is alive while
Python runs, and between replays that is little.
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

GIB = 2**30
BUCKET = 500_000_000  # elements, DeepSpeed's default and ours (deepspeed_setup.py)
LIVE_PARAMETERS = 1_000_000_000  # ZeRO 3 keeps so many gathered (stage3_max_live_parameters)


@dataclass(frozen=True)
class LayerCost:
    """One layer on one process, for one micro batch.

    Attributes:
        parameters: elements of its weights here (a tied weight counts where it is owned).
        largest: elements of its largest weight.
        kept: bytes that its forward pass leaves for the backward pass, its output included.
        forward: most bytes during the forward pass, beyond what was there before.
        backward: most bytes during the backward pass beyond what was kept, gradients of its weights included.
    """

    parameters: int
    largest: int
    kept: float
    forward: float
    backward: float


@dataclass(frozen=True)
class Setting:
    """What decides the memory of a process besides its layers.

    Attributes:
        dtype: "bf16", "fp16" or "fp32".
        zero_stage: 1, 2 or 3.
        replicas: processes that share the optimizer state (data ranks x context ranks).
        accumulation: micro batches of a step.
        in_flight: micro batches whose activations are held at once (pipelines; else 1).
        overlap: reductions run beside the backward pass, in two buckets (CUDA).
        released: bf16's float32 gradients leave their memory to others between steps (CUDA).
        optimizer_state: "fp32" or "bf16", of `precision.optimizer_state`.
        graphs: all layers but the first and the last are recorded as CUDA graphs.
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

    @property
    def keeps_gradients(self) -> bool:
        """Whether gradients outlive the next backward pass, and so are copied out of the graphs that made them."""
        return self.dtype != "bf16" or self.narrow or self.zero_stage > 1

    @property
    def narrow(self) -> bool:
        """Whether weights, moments and gradients are all kept in bf16."""
        return self.optimizer_state == "bf16"


def state_bytes(parameters: int, setting: Setting) -> dict[str, float]:
    """Bytes that stay from step to step, by part."""
    width = 4 if setting.dtype == "fp32" else 2
    n, stage = setting.replicas, setting.zero_stage
    parts = {"weights": width * parameters / (n if stage == 3 else 1)}
    if stage == 3:
        parts["gradients"] = (2 if setting.narrow else 4) * parameters / n + width * parameters / n
    elif setting.dtype == "bf16" and stage == 1 and not setting.narrow:
        parts["gradients"] = 0.0 if setting.released else 4.0 * parameters
    else:
        parts["gradients"] = 0.0  # made anew in every step: see `step_bytes`
    # ZeRO 1 and 2 have the master weights in the weights' own memory (`share_weights` in deepspeed_setup.py).
    parts["optimizer"] = (12 if not setting.narrow else 6 if stage == 3 else 4) * parameters / n
    return parts


def step_bytes(layers: Sequence[LayerCost], setting: Setting) -> dict[str, float]:
    """Bytes of one process at the fullest moment of a step, by part; their sum is the estimate.

    Args:
        layers: those of this process, first to last.
    """
    parameters = sum(layer.parameters for layer in layers)
    width = 4 if setting.dtype == "fp32" else 2
    bucket = width * min(BUCKET, parameters)
    largest = max(layer.largest for layer in layers)
    state = state_bytes(parameters, setting)
    held = _gradient_bytes(parameters, setting, width, bucket, largest)
    gathered = width * min(parameters, LIVE_PARAMETERS) if setting.zero_stage == 3 and setting.replicas > 1 else 0.0
    others = sum(layer.kept for layer in layers) * (setting.in_flight - 1)
    if setting.graphs:
        activations, more, work = max(_moments_beside_graphs(layers, setting, held, width), key=sum)
        state["gradients"] += more
        return {**state, "activations": activations, "at work": work}

    moments: list[tuple[float, float, float]] = []  # activations, gradients with buffers, at work
    kept, gradients = others, 0
    for layer in layers:
        moments.append((kept, gathered + held.before, max(layer.forward, layer.kept)))
        kept += layer.kept
    for layer in reversed(layers):
        early = held.buffers if gradients else held.before
        moments.append((kept, gathered + early + held.each * gradients, layer.backward))
        kept -= layer.kept
        gradients += layer.parameters
    moments.append((others, held.after, 0.0))
    activations, more, work = max(moments, key=sum)
    state["gradients"] += more
    return {**state, "activations": activations, "at work": work}


def _moments_beside_graphs(
    layers: Sequence[LayerCost], setting: Setting, held: _Held, width: int
) -> Iterator[tuple[float, float, float]]:
    """Activations, gradients with buffers, and what is at work, of one process whose blocks are two graphs."""
    first, *blocks, last = layers
    recorded = sum(block.parameters for block in blocks)
    kept = sum(block.kept for block in blocks)
    pool, gradients, before = 0.0, 0.0, 0.0
    for block in blocks:
        pool = max(pool, before + max(block.forward, block.kept))
        before += block.kept
    for block in reversed(blocks):
        pool = max(pool, kept + gradients + block.backward)
        kept -= block.kept
        gradients += width * block.parameters
    # The graphs' input and the gradient of their output, each as large as what the first layer makes.
    pool = max(pool, gradients) + 3 * first.kept
    yield pool, held.before, max(first.forward, last.forward, last.kept)
    yield pool + last.kept, held.before, last.backward
    copied = recorded if setting.keeps_gradients else 0
    yield pool, held.buffers + max(held.each * (last.parameters + copied), width * copied), first.backward
    yield pool, held.after - (0 if setting.keeps_gradients else width * recorded), 0.0


@dataclass(frozen=True)
class _Held:
    """Bytes of gradients and buffers that do not stay: before the first gradient, after it, a gradient of a parameter that
    is through, and when all are."""

    before: float
    buffers: float
    each: float
    after: float


def _gradient_bytes(parameters: int, setting: Setting, width: int, bucket: float, largest: int) -> _Held:
    n, stage = setting.replicas, setting.zero_stage
    buckets = bucket * (2 if setting.overlap else 1)
    if stage == 3:
        cast = 0.0 if setting.narrow else (4 - width) * bucket / width / n
        return _Held(0.0, buckets, 0.0, buckets + bucket + cast)
    if setting.narrow:
        return _narrow_gradient_bytes(parameters, setting, buckets)
    if setting.dtype == "bf16" and stage == 1:
        # After a backward pass the optimizer adds the 16-bit gradients to its float32 sums and frees them; what is sent of
        # these is a small bucket.
        if setting.released and n == setting.accumulation == 1:
            return _Held(0.0, 0.0, 2.0, 2.0 * parameters)  # nothing to sum
        sums = 4.0 * parameters if setting.released else 0.0
        before = sums if setting.accumulation > 1 else 0.0
        return _Held(before, before, 2.0, sums + 2.0 * parameters)
    if stage == 1:
        sums = 4.0 * parameters if setting.accumulation > 1 else 0.0
        return _Held(sums, sums, width, width * parameters + sums + bucket)
    partition = 4 * parameters / n
    sums = partition if setting.accumulation > 1 and width == 4 else 0.0
    full = setting.accumulation > 1 or parameters > BUCKET  # a bucket was reduced before all layers are through
    before = partition + sums if setting.accumulation > 1 else 0.0
    cast = bucket + 4 * largest if width == 2 else 0.0
    return _Held(before, buckets + (partition + sums + cast if full else 0.0), 0.0, partition + sums + buckets + cast)


def _narrow_gradient_bytes(parameters: int, setting: Setting, buckets: float) -> _Held:
    """ZeRO 1 and 2 with all in bf16. A process alone has no buckets, which otherwise take the gradients' memory over."""
    n, partition = setting.replicas, 2.0 * parameters / setting.replicas
    summed, cut = setting.accumulation > 1, setting.zero_stage == 2
    earlier = 0.0 if not summed else partition if cut else 2.0 * parameters  # gradients of the micro batches before
    again = earlier if cut else 0.0  # ZeRO 2 adds the last micro batch's to them, ZeRO 1 has them added by autograd
    if n == 1:
        # On a GPU, ZeRO 1 reads the gradients where they lie (bf16_optimizer.py).
        copied = 0.0 if setting.released and not cut else 2.0
        return _Held(earlier, earlier, 0.0 if summed and not cut else 2.0, (2.0 + copied) * parameters + again)
    reduced = partition if parameters > BUCKET else 0.0  # a bucket was reduced before all layers are through
    ready = buckets if summed and not cut else 0.0  # they stay from micro batch to micro batch
    return _Held(earlier + ready, earlier + buckets + reduced, 0.0, buckets + 2 * partition + again)


class Allocations(TorchDispatchMode):
    """Counts the bytes of tensors made inside, on one device ("meta" too, where nothing is allocated).

    Args:
        before: tensors that were there before and stay; neither they nor views of them count.

    Attributes:
        now, peak: bytes that are alive, and the most so far.
    """

    def __init__(self, device: str, before: Iterable[Tensor] = ()) -> None:
        super().__init__()
        self._device = device
        self._before = {tensor.untyped_storage()._cdata for tensor in before}
        self._live: dict[int, tuple[Any, int]] = {}
        self.now = self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        # On CUDA the buffer beside the result is empty; "meta" gives that of a CPU.
        one = self._device == "meta" and func is torch.ops.aten.log_sigmoid_forward.default
        for leaf in tree_leaves(out[0] if one else out):
            if isinstance(leaf, Tensor) and leaf.device.type == self._device:
                self._note(leaf)
        return out

    def _note(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key in self._live or key in self._before or not size:
            return

        def freed(_reference: object) -> None:
            self.now -= self._live.pop(key)[1]

        self._live[key] = (weakref.ref(storage, freed), size)
        self.now += size
        self.peak = max(self.peak, self.now)


def layer_cost(
    layer: torch.nn.Module,
    call: Callable[..., Tensor],
    x: Tensor,
    *,
    parameters: int | None = None,
    **arguments: Tensor,
) -> LayerCost:
    """Run a layer forward and backward once and count.

    Args:
        call: the layer, or the layer under activation checkpointing.
        x: tokens or hidden states; on "meta" nothing is computed.
        parameters: how many of its weights count as its own; None: all.
    """
    if x.is_floating_point():
        x = x.requires_grad_()
    with Allocations(x.device.type, [x, *layer.parameters(), *layer.buffers(), *arguments.values()]) as count:
        out = call(x, **arguments)
        kept, forward = count.now, count.peak
        gradient = torch.empty_like(out)
        count.peak = before = count.now
        out.backward(gradient)
        backward = count.peak - before
    sizes = [p.numel() for p in layer.parameters()]
    for p in layer.parameters():
        p.grad = None
    own = sum(sizes) if parameters is None else parameters
    return LayerCost(own, max(sizes, default=0), float(kept), float(forward), float(backward))
