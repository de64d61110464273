"""Find tensors and losses that are not finite, on all ranks of a run."""

from __future__ import annotations

import socket
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from megatron_lite.fault_tolerance.rank_consistency import rank_words
from megatron_lite.optim.zero_state import OptimizerState
from megatron_lite.parallel.collectives import any_rank, gather
from megatron_lite.parallel.grid import Grid

if TYPE_CHECKING:
    from megatron_lite.engine.engine import Engine
    from megatron_lite.engine.sequential import Batch


class Fault(NamedTuple):
    """The reason for a non-finite loss: `kind` is "transient_fault" or "persistent_fault", `text` a sentence with the ranks."""

    kind: str
    text: str


def is_finite(x: Tensor) -> Tensor:
    """Return whether every element is finite, a bool scalar on the device of `x`. It needs one pass and no copy."""
    if not x.numel():
        return torch.ones((), dtype=torch.bool, device=x.device)
    return torch.stack(x.detach().aminmax()).isfinite().all()  # minimum and maximum of a NaN are NaN


def names_not_finite(tensors: Iterable[tuple[str, Tensor]]) -> list[str]:
    """Return the names of the tensors that hold a NaN or an infinity."""
    flags = {name: is_finite(tensor) for name, tensor in tensors if tensor.is_floating_point()}
    return [name for name, finite in flags.items() if not finite]


def state_not_finite(state: OptimizerState, grid: Grid) -> list[str]:
    """Return the master weights and moments of the run that are not finite, with their ranks. Every rank calls this.

    Returns:
        "exp_avg of blocks.0.norm.weight (rank 1)", ...: the same on every rank; empty for a healthy state.
    """
    # The flat buffers first, in few reductions.
    healthy = torch.stack([is_finite(buffer) for buffer in state.buffers()]).all().item()
    if not any_rank([not healthy], grid)[0]:
        return []
    local = {
        f"{kind} of {fragment.name}": tensor
        for fragment in state.fragments()
        for kind, tensor in fragment.tensors.items()
    }
    ranks: dict[str, list[int]] = {}
    for rank, names in enumerate(gather(names_not_finite(local.items()), grid)):
        for name in names:
            ranks.setdefault(name, []).append(rank)
    return [f"{name} ({rank_words(owners)})" for name, owners in ranks.items()]


def fault_of_loss(engine: Engine, micro_batches: Sequence[Batch]) -> Fault | None:
    """Recompute a non-finite loss to distinguish transient from persistent faults. Every rank calls this.

    Args:
        micro_batches: those of the last step of this process, whose update was skipped.

    Returns:
        The same on every rank; None if every rank's loss is finite, because no token of the step had a weight.
    """
    verdicts = gather((*engine.recompute_loss(micro_batches), socket.gethostname()), engine.grid)
    first, recomputed = ([rank for rank, verdict in enumerate(verdicts) if not verdict[i]] for i in (0, 1))
    hosts = [verdict[2] for verdict in verdicts]
    if recomputed:
        text = f"the loss of {rank_words(recomputed, hosts)} is not finite, and neither is its recomputation"
        return Fault("persistent_fault", f"{text}: a persistent fault of weights, samples or dtype")
    if first:
        text = (
            f"the loss of {rank_words(first, hosts)} was not finite; computed once more from equal inputs it is finite"
        )
        return Fault("transient_fault", f"{text}: a transient fault")
    return None
