"""Tensor-parallel overlap: a micro-batch in two chunks, so that all-reduces of one overlap with computation of the other.

Rows of a micro-batch are independent between the embedding and the head. The first chunk runs on the caller's stream, the
second on a side stream, part by part in turn. While one chunk waits for the all-reduce at the end of a part, the device
computes the other (as Wang et al. 2024, arXiv 2409.15241). The backward pass overlaps likewise: autograd runs a node on the
stream of its forward pass, the latest node first. All all-reduces use one communicator, in an order that all processes share.

    first chunk     mix     | (all-reduce)    finish      | (all-reduce)    mix ...
    second chunk    mix        | (all-reduce)    finish      | (all-reduce)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from megatron_lite.engine.activation_checkpointing import Recompute, checkpointed

Part = Callable[..., Any]


def overlap_parts(block: Any, mode: str, recompute: Recompute) -> list[Part]:
    """Return the parts of a block under activation checkpointing; `mode` and `recompute` as in `checkpointed`.

    A block that is recomputed has one part, because the tensors between parts would have to be stored.
    """
    parts = (block.mix, block.finish) if mode in ("none", "elementwise") else (block,)
    return [checkpointed(part, mode, recompute) for part in parts]


class MicroBatchOverlap:
    """Consecutive blocks as one call, (hidden, **context) -> hidden, all [batch, length, ...].

    Args:
        blocks: the parts of each block. The first part takes hidden and the context, every other the outputs of the previous
            part; the last returns hidden.
        parameters: of the blocks.

    Micro-batches with an odd number of rows are not split.
    """

    def __init__(
        self, blocks: Sequence[Sequence[Part]], parameters: Iterable[nn.Parameter], device: torch.device
    ) -> None:
        self._blocks, self._parameters = list(blocks), list(parameters)
        self._side = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._shapes: set[tuple[torch.Size, bool]] = set()
        self._accumulators: list[Any] = []

    def __call__(self, hidden: Tensor, **context: Tensor) -> Tensor:
        if len(hidden) % 2:
            return self._apply([(hidden, context)])[0]
        pair = [
            (chunk, {key: value.chunk(2)[index] for key, value in context.items()})
            for index, chunk in enumerate(hidden.chunk(2))
        ]
        side = self._side_stream(hidden)
        if side is not None:
            self._pin_accumulation()
            main = torch.cuda.current_stream()
            side.wait_stream(main)
            for x in (hidden, *context.values()):
                x.record_stream(side)
        outputs = self._apply(pair, side)
        if side is not None:
            main.wait_stream(side)
            outputs[1].record_stream(main)
        return torch.cat(outputs)

    def _apply(
        self, chunks: Sequence[tuple[Tensor, Mapping[str, Tensor]]], side: torch.cuda.Stream | None = None
    ) -> list[Tensor]:
        states: list[Any] = [hidden for hidden, _ in chunks]
        for parts in self._blocks:
            for number, part in enumerate(parts):
                for index, (_, context) in enumerate(chunks):
                    with torch.cuda.stream(side) if index and side is not None else nullcontext():
                        states[index] = part(*states[index]) if number else part(states[index], **context)
        return states

    def _side_stream(self, hidden: Tensor) -> torch.cuda.Stream | None:
        """Return the stream of the second chunk; None on a CPU and for the first call with this shape.

        Operations cache tensors in the first call. With two streams, one could read such a tensor before the other wrote it.
        """
        case = (hidden.shape, torch.is_grad_enabled())
        known = case in self._shapes
        self._shapes.add(case)
        return self._side if known else None

    def _pin_accumulation(self) -> None:
        """Accumulate gradients on the caller's stream, where the optimizer reads them.

        Autograd accumulates on the stream where a parameter is first used. This runs at the first call, because the trainer may
        change the dtype of parameters before.
        """
        if not self._accumulators:
            with torch.enable_grad():
                views = [parameter.view_as(parameter) for parameter in self._parameters]
            self._accumulators = [view.grad_fn.next_functions[0][0] for view in views if view.grad_fn is not None]
            quiet = getattr(torch.autograd.graph, "set_warn_on_accumulate_grad_stream_mismatch", None)
            if quiet is not None:
                quiet(False)
