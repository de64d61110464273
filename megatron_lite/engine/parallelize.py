"""Everything that is wrapped around the layers of a model, from the inside out:

- build: at full width, from the layer's seed (`ModelShard`);
- shard: over the tensor-parallel group (`shard_and_fuse`);
- quantise: FP8 matmuls in the projections that allow them (`shard_and_fuse`);
- fuse: projections of one input, in one autograd node (`shard_and_fuse`);
- compile: each block with torch.compile (`parallelize`, as all that follows);
- context: the inputs are a local shard of the sequence;
- recompute: activations, elementwise, selective or whole blocks;
- overlap: two chunks of a micro-batch through all blocks;
- graph: all blocks of a micro-batch as two CUDA graphs, forward and backward.

DeepSpeed's engine, which reduces gradients and shards the optimizer, is wrapped around the result (`engine.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor, nn

from megatron_lite.config.schema import ParallelConfig
from megatron_lite.engine.activation_checkpointing import Recompute, checkpointed, mode_of
from megatron_lite.engine.cuda_graph import GraphedBlocks
from megatron_lite.engine.sequential import chain
from megatron_lite.engine.tensor_overlap import MicroBatchOverlap, overlap_parts
from megatron_lite.parallel.context_parallel import ContextParallelGroup, context_parallel_group
from megatron_lite.parallel.fp8_projections import select_projections, use_fp8
from megatron_lite.parallel.fused_projections import fuse_projections
from megatron_lite.parallel.grid import Grid
from megatron_lite.parallel.tensor_parallel import TensorGroup, shard_layer

Call = Callable[..., Tensor]
ContextParallel = Callable[[ContextParallelGroup], AbstractContextManager[None]]


def shard_and_fuse(layer: nn.Module, tensor: TensorGroup | None, parallel: ParallelConfig, in_fp8: bool) -> None:
    """Shard a full-width layer in place over the tensor-parallel group, and fuse its projections where that is possible.

    in_fp8: whether the projections that allow it run in FP8.

    Raises:
        ValueError: as `shard_layer`.
    """
    names = select_projections(layer, 1 if tensor is None else tensor.count)[0] if in_fp8 else []
    if tensor is not None:
        shard_layer(layer, tensor)
    use_fp8(layer, names, tensor)
    # ZeRO 3 gathers the weights of a module when it is called, and torch.compile fuses by itself.
    if parallel.zero_stage < 3 and not parallel.compile:
        fuse_projections(layer, tensor)


def parallelize(
    layers: Mapping[int, nn.Module],
    count: int,
    parallel: ParallelConfig,
    grid: Grid,
    *,
    context_parallel: ContextParallel,
    recompute: Recompute,
    keep_gradients: bool,
) -> dict[int, Call]:
    """Return the calls of this rank's layers in a training step, by index.

    With overlap or a CUDA graph all blocks are one call, under the index of the first.

    Args:
        layers: this stage's layers by index, sharded and fused. Layer 0 is the embedding, layer `count` - 1 the head.
        context_parallel, recompute: as in `Engine`.
        keep_gradients: gradients outlive the next micro-batch, so a CUDA graph copies them out of its memory.
    """
    blocks = {index: layer for index, layer in layers.items() if 0 < index < count - 1}
    if parallel.compile:
        for block in blocks.values():
            block.compile()

    group = context_parallel_group(grid)
    modes = {index: mode_of(index, count, parallel) for index in layers}
    calls: dict[int, Call] = {}
    for index, layer in layers.items():
        # Context parallelism inside recomputation, because the backward pass recomputes a layer in another thread.
        call = layer if group is None else _on_local_shard(layer, group, context_parallel)
        calls[index] = checkpointed(call, modes[index], recompute)

    graph = parallel.cuda_graph and grid.device.type == "cuda"
    if not blocks or not (parallel.tensor_overlap or graph):
        return calls
    all_blocks = eager = chain([calls[index] for index in blocks])
    if parallel.tensor_overlap:
        all_blocks = MicroBatchOverlap(
            [overlap_parts(block, modes[index], recompute) for index, block in blocks.items()],
            [parameter for block in blocks.values() for parameter in block.parameters()],
            grid.device,
        )
    if graph:
        all_blocks = GraphedBlocks(all_blocks, eager, list(blocks.values()), keep_gradients=keep_gradients)
    first = min(blocks)
    calls[first] = all_blocks
    return {index: call for index, call in calls.items() if index == first or index not in blocks}


def _on_local_shard(layer: nn.Module, group: ContextParallelGroup, context_parallel: ContextParallel) -> Call:
    def call(hidden: Tensor, **context: Any) -> Tensor:
        with context_parallel(group):
            return layer(hidden, **context)

    return call
