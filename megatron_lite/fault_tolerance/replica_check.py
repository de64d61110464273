"""Compare replicas, which are bitwise equal unless memory or a link has a fault.

Data and context ranks hold equal weights (ZeRO 1 and 2; under ZeRO 3 the small ones). Tensor ranks hold equal copies of
tensors with the sharding spec "replicated", and of their optimizer state. Each rank hashes its copies on its device. Weights are
hashed before every update, so that a wrong value that lasts one step is detected. The hashes of many steps are combined, and
compared every `interval` steps with one small collective.
"""

from __future__ import annotations

import socket
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from megatron_lite.fault_tolerance.rank_consistency import rank_words
from megatron_lite.optim.zero_state import NamedBuffer, OptimizerState, concatenated
from megatron_lite.parallel.collectives import all_gather_single, async_to_host, gather
from megatron_lite.parallel.grid import Grid

# Hashing the weights once takes 0.07 % of the forward and backward pass over this many tokens (H200, bf16) at any model size.
_TOKENS_PER_HASH = 65536
_STEP = 0x5851F42D4C957F2D  # odd multipliers: no bit of a difference is lost
_PLACE = 0x2545F4914F6CDD1D


class ReplicasDifferError(RuntimeError):
    """Replicas of a tensor differ; the message names the tensor and the ranks."""


class ReplicaCheck:
    """Hashes the tensors that this rank shares with others, and compares the hashes at an interval.

    Args:
        interval: steps between two comparisons; 0: off.
        tokens: tokens per step and rank. With few tokens, a CUDA device hashes in every n-th step only.
    """

    def __init__(self, state: OptimizerState, grid: Grid, interval: int, tokens: int) -> None:
        self._state, self._grid = state, grid
        self._interval = interval if grid.replicas > 1 or grid.tensor_size > 1 else 0
        self._stride = max(1, _TOKENS_PER_HASH // tokens) if grid.device.type == "cuda" else 1
        self._hashes = _Hashes(grid.device), _Hashes(grid.device)  # over data and context ranks, over tensor ranks
        self._tensor_replicas: list[list[tuple[str, Tensor]]] = []
        self._pending: tuple[int, Callable[[], list[float]]] | None = None

    def before_update(self, step: int) -> None:
        """Hash the weights of this step; every rank calls it. It does not synchronise with the device."""
        if self._interval and (step % self._stride == 0 or step % self._interval == 0):
            self._observe()
        if self._interval and step % self._interval == 0:
            self._exchange(step)

    def finish(self) -> None:
        """Wait for a comparison that `before_update` started. Raises ReplicasDifferError on every rank."""
        if self._pending is None:
            return
        (step, fetch), self._pending = self._pending, None
        values = fetch()
        if any(
            len({values[2 * rank + kind] for rank in ranks}) > 1 for kind in (0, 1) for ranks in self._replicas(kind)
        ):
            tables, hosts = zip(
                *gather(([table.by_name() for table in self._hashes], socket.gethostname()), self._grid), strict=True
            )
            raise ReplicasDifferError(self._message(step, tables, hosts))

    def compare(self, step: int) -> None:
        """Compare now, before a save. Raises ReplicasDifferError on every rank."""
        if self._interval:
            self._observe()
            self._exchange(step)
            self.finish()

    @torch.no_grad()
    def _observe(self) -> None:
        if self._grid.replicas > 1:
            self._hashes[0].add(self._state.weight_buffers())
        if self._grid.tensor_size > 1:
            self._tensor_replicas = self._tensor_replicas or self._state.tensor_replicas()
            self._hashes[1].add([buffer for named in self._tensor_replicas for buffer in concatenated(named)])

    @torch.no_grad()
    def _exchange(self, step: int) -> None:
        local = torch.stack([hashes.digest() for hashes in self._hashes])
        everyone = local.new_empty(2 * self._grid.world_size)
        all_gather_single(everyone, local)
        self._pending = step, async_to_host(everyone)

    def _replicas(self, kind: int) -> list[list[int]]:
        """Return the groups of ranks with equal values: of data and context ranks (0), or of tensor ranks (1)."""
        groups: dict[tuple[int, int], list[int]] = defaultdict(list)
        size, replicas = self._grid.tensor_size, self._grid.replicas
        for rank in range(self._grid.world_size):
            stage, replica, tensor = rank // (size * replicas), rank // size % replicas, rank % size
            groups[stage, replica if kind else tensor].append(rank)
        return list(groups.values())

    def _message(self, step: int, tables: Sequence[Sequence[dict[str, int]]], hosts: Sequence[str]) -> str:
        limit = 8
        differing: dict[str, str] = {}
        for kind in (0, 1):
            for ranks in self._replicas(kind):
                for name in tables[ranks[0]][kind]:
                    values = {rank: tables[rank][kind][name] for rank in ranks}
                    if len(set(values.values())) > 1:
                        differing.setdefault(name, _named(values, hosts))
        shown = [f"{name}: {ranks}" for name, ranks in list(differing.items())[:limit]]
        more = f"; {len(differing) - limit} more tensors" if len(differing) > limit else ""
        return (
            f"replicas differ at step {step}: {'; '.join(shown)}{more}. The run ends and saves nothing. The same command resumes "
            "from the newest checkpoint, at which replicas were equal. If a rank is named again, its device is faulty: exclude "
            "its machine"
        )


class _Hashes:
    """64-bit hashes of the rows of named buffers, combined over calls."""

    def __init__(self, device: torch.device) -> None:
        self._rows = torch.zeros(0, dtype=torch.int64, device=device)
        self._ranges: dict[str, tuple[int, int]] = {}

    def add(self, buffers: Sequence[NamedBuffer]) -> None:
        """Add the current values of the buffers; every call has the same buffers, or none."""
        if not buffers:
            return
        widths = [_row_bytes(named.buffer) for named in buffers]
        parts = [hash_rows(named.buffer, width) for named, width in zip(buffers, widths, strict=True)]
        if not self._ranges:
            offset = 0
            for named, width, part in zip(buffers, widths, parts, strict=True):
                size = named.buffer.element_size()
                for name, (start, numel) in named.ranges.items():
                    self._ranges[name] = offset + start * size // width, offset - (-(start + numel) * size // width)
                offset += len(part)
            self._rows = torch.zeros(offset, dtype=torch.int64, device=self._rows.device)
        self._rows.mul_(_STEP).add_(torch.cat(parts))

    def digest(self) -> Tensor:
        """Return one hash of all rows, an int64 scalar."""
        return _combined(self._rows)

    def by_name(self) -> dict[str, int]:
        """Return one hash per name. Tensors that share a row share its difference."""
        return {name: int(_combined(self._rows[start:end])) for name, (start, end) in self._ranges.items()}


def hash_rows(x: Tensor, width: int) -> Tensor:
    """Return int64 [rows], a hash per `width` bytes of x [elements]; the last row is padded with zeros.

    A row's hash changes with any change of an odd number of bits at one position of its 64-bit words.
    """
    elements = width // x.element_size()
    whole = x.numel() // elements * elements
    parts = [x[:whole], pad(x[whole:], (0, -x.numel() % elements))]
    words = [part.view(torch.int64).view(-1, width // 8) for part in parts if part.numel()]
    rows = torch.cat([torch.hash_tensor(part, dim=1).view(torch.int64) for part in words])
    return rows ^ ((rows >> 32) & 0xFFFFFFFF)  # sums of 64 bits would lose the highest bits


def _row_bytes(x: Tensor) -> int:
    """Return the bytes per row: short rows separate small tensors, long rows keep the number of hashes small."""
    return 128 if x.nbytes <= 1 << 25 else 4096


def _combined(rows: Tensor) -> Tensor:
    places = torch.arange(len(rows), dtype=torch.int64, device=rows.device).mul_(_PLACE).bitwise_or_(1)
    return (rows * places).sum()


def _named(values: dict[int, int], hosts: Sequence[str]) -> str:
    """Return "rank 1 (host) differs from ranks 0, 2-3"; without a majority, "ranks 0-1 (host) differ from one another"."""
    (value, count), *_ = Counter(values.values()).most_common(1)
    usual = [rank for rank, other in values.items() if other == value]
    odd = [rank for rank in values if rank not in usual]
    if 2 * count > len(values):
        return f"{rank_words(odd, hosts)} {'differs' if len(odd) == 1 else 'differ'} from {rank_words(usual)}"
    return f"{rank_words(list(values), hosts)} differ from one another"
