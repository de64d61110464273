"""Collect whole matrices from flat tensors that ZeRO and tensor parallelism have cut, each on one process.

Every process collects matrices of about equal total cost. It returns the results to the processes that hold the pieces. If
several processes hold equal copies of a piece, one sends its copy, and all receive the result.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_lite.parallel.sharding_plan import Shard


@dataclass(frozen=True)
class MatrixPiece:
    """A range of a matrix in the flat tensor of a process.

    Attributes:
        name, shape: of the whole matrix.
        shard: the part of the matrix that tensor parallelism gave to the process.
        start: offset of the piece in the flattened shard.
        numel: its elements.
        offset: its offset in the flat tensor.
        heads: blocks of rows of the whole matrix, each of which is orthogonalized alone.
    """

    name: str
    shape: tuple[int, int]
    shard: Shard
    start: int
    numel: int
    offset: int
    heads: int = 1

    @property
    def cost(self) -> int:
        """Return the multiply-adds of one Newton-Schulz step of the whole matrix, head by head."""
        return self.heads * newton_schulz_cost(self.shape[0] // self.heads, self.shape[1])


class WholeMatrices:
    """The plan of the exchange. Every process of the group builds it and calls `gather`, then `scatter`.

    Args:
        pieces: of this process.
        group: the process group; None: this process alone.
    """

    def __init__(self, pieces: Sequence[MatrixPiece], group: Any) -> None:
        self.pieces, self._group = list(pieces), group
        everyone: list[list[MatrixPiece]] = [self.pieces]
        if group is not None:
            everyone = [[] for _ in range(dist.get_world_size(group))]
            dist.all_gather_object(everyone, self.pieces, group=group)
        ranks = range(len(everyone))
        self.heads = {piece.name: piece.heads for local in everyone for piece in local}
        costs = {piece.name: piece.cost for local in everyone for piece in local}
        owners = assign_owners(costs, len(everyone))
        # Of equal pieces, the first process sends its own.
        sources: dict[tuple[str, Shard, int], int] = {}
        for rank, local in enumerate(everyone):
            for piece in local:
                sources.setdefault((piece.name, piece.shard, piece.start), rank)

        def sent(rank: int, owner: int) -> list[MatrixPiece]:
            return [
                piece
                for piece in everyone[rank]
                if owners[piece.name] == owner and sources[piece.name, piece.shard, piece.start] == rank
            ]

        me = 0 if group is None else dist.get_rank(group)
        self._outgoing = [sent(me, owner) for owner in ranks]
        self._incoming = [sent(rank, me) for rank in ranks]
        self._results_out = [[piece for piece in everyone[rank] if owners[piece.name] == me] for rank in ranks]
        self._results_in = [[piece for piece in self.pieces if owners[piece.name] == owner] for owner in ranks]

    def gather(self, flat: Tensor) -> dict[str, Tensor]:
        """Return the whole matrices of this process by name, from the flat tensors [elements] of all processes.

        A process alone gets views.
        """
        if self._group is None:
            return {p.name: flat.narrow(0, p.offset, p.numel).view(p.shape) for p in self.pieces}
        outgoing = [flat.narrow(0, piece.offset, piece.numel) for part in self._outgoing for piece in part]
        received = self._exchange(outgoing, self._outgoing, self._incoming, flat)
        shards: dict[tuple[str, tuple[int, int], Shard], list[tuple[int, Tensor]]] = defaultdict(list)
        for piece, tensor in received:
            shards[piece.name, piece.shape, piece.shard].append((piece.start, tensor))
        matrices: dict[str, Tensor] = {}
        for (name, shape, shard), parts in shards.items():
            whole = torch.cat([tensor for _, tensor in sorted(parts, key=lambda part: part[0])])
            whole = whole.view(shard.shape(shape))
            if shard.count == 1:
                matrices[name] = whole
            else:
                shard.cut(matrices.setdefault(name, flat.new_empty(shape))).copy_(whole)
        return {name: matrices[name] for name in sorted(matrices)}

    def scatter(self, matrices: Mapping[str, Tensor], flat: Tensor) -> None:
        """Write the pieces of this process to `flat` [elements], from the matrices of all processes."""
        if self._group is None:
            return
        flats = {
            (piece.name, piece.shard): piece.shard.cut(matrices[piece.name]).reshape(-1)
            for part in self._results_out
            for piece in part
        }
        outgoing = [
            flats[piece.name, piece.shard].narrow(0, piece.start, piece.numel)
            for part in self._results_out
            for piece in part
        ]
        for piece, tensor in self._exchange(outgoing, self._results_out, self._results_in, flat):
            flat.narrow(0, piece.offset, piece.numel).copy_(tensor)

    def _exchange(
        self,
        tensors: list[Tensor],
        outgoing: list[list[MatrixPiece]],
        incoming: list[list[MatrixPiece]],
        like: Tensor,
    ) -> list[tuple[MatrixPiece, Tensor]]:
        """Send `tensors`, one per outgoing piece; return the incoming pieces with their elements."""
        pieces = [piece for part in incoming for piece in part]
        to_receive, to_send = ([sum(piece.numel for piece in part) for part in parts] for parts in (incoming, outgoing))
        received = like.new_empty(sum(to_receive))
        dist.all_to_all_single(received, torch.cat([like[:0], *tensors]), to_receive, to_send, group=self._group)
        return list(zip(pieces, received.split([piece.numel for piece in pieces]), strict=True))


def newton_schulz_cost(rows: int, columns: int) -> int:
    """Return the multiply-adds of one Newton-Schulz step: small^2 (2 large + small) for a matrix small x large."""
    small, large = sorted((rows, columns))
    return small**2 * (2 * large + small)


def assign_owners(costs: Mapping[str, int], ranks: int) -> dict[str, int]:
    """Return the owner of every matrix: the most expensive first, each to the process with the least cost so far."""
    load = [0] * ranks
    owners: dict[str, int] = {}
    for name in sorted(costs, key=lambda name: (-costs[name], name)):
        owners[name] = min(range(ranks), key=lambda rank: load[rank])
        load[owners[name]] += costs[name]
    return owners
