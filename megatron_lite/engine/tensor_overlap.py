"""A micro batch in two halves, so that the sums of tensor parallelism travel while something is computed.

Rows of a micro batch know nothing of one another between the embedding and the head. The blocks are applied to the first half
on the stream of the caller and to the second on a stream of its own, part by part in turn: while one half waits for the sum at
the end of a part, the device computes the other (as Wang et al. 2024, arXiv 2409.15241). The backward pass does the same by
itself, since autograd runs a node on the stream of its forward pass and the latest node first. The sums of both halves follow
one another in one communicator, in the order in which this file starts them, equal on all processes; they keep the halves a sum
apart, so that neither has to wait for long.

    first half     mix     | (sum)    finish      | (sum)    mix ...
    second half    mix        | (sum)    finish      | (sum)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from megatron_lite.config.schema import ParallelConfig
from megatron_lite.engine.activation_checkpointing import checkpointed, mode_of

Part = Callable[..., Any]


def overlap_parts(
    layer: Any,
    index: int,
    count: int,
    parallel: ParallelConfig,
    recompute: Callable[[], AbstractContextManager[None]] | None,
) -> list[Part]:
    """The parts of a block, under activation checkpointing; arguments as `checkpointed`.

    A block that is computed again is so as a whole: what lies between its parts would have to be kept.
    """
    whole = mode_of(index, count, parallel) not in ("none", "elementwise")
    parts = (layer,) if whole else (layer.mix, layer.finish)
    return [checkpointed(part, index, count, parallel, recompute) for part in parts]


class MicroBatchOverlap:
    """Consecutive blocks as one call, (hidden, **context) -> hidden, all [batch, length, ...].

    Args:
        blocks: of each block the parts that it consists of. The first takes hidden and the context, every other what the one
            before gave; the last gives hidden.
        parameters: of the blocks.

    Micro batches of an odd number of rows stay whole.
    """

    def __init__(
        self, blocks: Sequence[Sequence[Part]], parameters: Iterable[nn.Parameter], device: torch.device
    ) -> None:
        self._blocks, self._parameters = list(blocks), list(parameters)
        self._side = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._known: set[tuple[torch.Size, bool]] = set()
        self._accumulators: list[Any] = []

    def __call__(self, hidden: Tensor, **context: Tensor) -> Tensor:
        if len(hidden) % 2:
            return self._through([(hidden, context)])[0]
        pair = [
            (half, {key: value.chunk(2)[index] for key, value in context.items()})
            for index, half in enumerate(hidden.chunk(2))
        ]
        side = self._other_stream(hidden)
        if side is not None:
            self._accumulate_here()
            main = torch.cuda.current_stream()
            side.wait_stream(main)
            for x in (hidden, *context.values()):
                x.record_stream(side)
        halves = self._through(pair, side)
        if side is not None:
            main.wait_stream(side)
            halves[1].record_stream(main)
        return torch.cat(halves)

    def _through(
        self, pieces: Sequence[tuple[Tensor, Mapping[str, Tensor]]], side: torch.cuda.Stream | None = None
    ) -> list[Tensor]:
        states: list[Any] = [hidden for hidden, _ in pieces]
        for parts in self._blocks:
            for number, part in enumerate(parts):
                for index, (_, context) in enumerate(pieces):
                    with torch.cuda.stream(side) if index and side is not None else nullcontext():
                        states[index] = part(*states[index]) if number else part(states[index], **context)
        return states

    def _other_stream(self, hidden: Tensor) -> torch.cuda.Stream | None:
        """That of the second half; None on a CPU, and the first time that anything of this shape comes: what operations make
        once and keep is made on one stream, or the other half might read it before it is there."""
        case = (hidden.shape, torch.is_grad_enabled())
        known = case in self._known
        self._known.add(case)
        return self._side if known else None

    def _accumulate_here(self) -> None:
        """Have gradients be accumulated on the caller's stream, where the optimizer reads them.

        It is done on the stream on which a parameter is first used. Not before here: the trainer may have given the parameter
        another type since this was built.
        """
        if not self._accumulators:
            with torch.enable_grad():
                views = [parameter.view_as(parameter) for parameter in self._parameters]
            self._accumulators = [view.grad_fn.next_functions[0][0] for view in views if view.grad_fn is not None]
            quiet = getattr(torch.autograd.graph, "set_warn_on_accumulate_grad_stream_mismatch", None)
            if quiet is not None:
                quiet(False)
