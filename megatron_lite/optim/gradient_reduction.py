"""Gradients of several replicas, averaged where their optimizer state is (ZeRO 1, Rajbhandari et al. 2020, arXiv 1910.02054)."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

_BUCKET = 1 << 26  # elements that are sent at once


def average_own(flat: Tensor, group: Any, dtype: torch.dtype) -> None:
    """Replace this process's stretch of `flat` by its mean over the group.

    Args:
        flat: [processes x elements]; the r-th stretch of so many elements is of process r. The others are left as they are.
        group: the process group of the replicas.
        dtype: in which the sum is sent and taken.
    """
    replicas = dist.get_world_size(group)
    rows = flat.view(replicas, -1)
    own = rows[dist.get_rank(group)]
    before = None
    for columns, into in zip(rows.split(_BUCKET // replicas, dim=1), own.split(_BUCKET // replicas), strict=True):
        sent = columns.to(dtype).contiguous()
        total = torch.empty_like(into, dtype=dtype)
        work = dist.reduce_scatter_tensor(total, sent.view(-1), group=group, async_op=True)
        # While this one is on its way, the one before it is put in its place.
        if before is not None:
            _finish(*before, replicas)
        before = work, total, into
    if before is not None:
        _finish(*before, replicas)


def _finish(work: Any, total: Tensor, into: Tensor, replicas: int) -> None:
    work.wait()
    into.copy_(total).div_(replicas)
