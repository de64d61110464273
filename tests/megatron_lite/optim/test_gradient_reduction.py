"""The mean over replicas of a rank's slice of the gradients, bucket by bucket."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_lite.optim import bf16_optimizer


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bucket", [12, 15, 1 << 20])
def test_local_slice_is_the_mean_and_the_others_stay(monkeypatch, dtype, bucket):
    """Run process 1 of 3, whose collective writes the sum when it is waited for."""
    flats = [torch.randn(3 * 10, generator=torch.Generator().manual_seed(rank)) for rank in range(3)]
    gradients, at = flats[1].clone(), 0

    def reduce_scatter(total: Tensor, sent: Tensor, group: Any, async_op: bool) -> SimpleNamespace:
        nonlocal at
        assert (group, async_op, total.dtype) == ("replicas", True, dtype)
        rows = [flat.view(3, 10)[:, at : at + total.numel()].to(dtype) for flat in flats]
        assert torch.equal(sent, rows[1].flatten())
        at += total.numel()
        return SimpleNamespace(wait=lambda: total.copy_(rows[0][1] + rows[1][1] + rows[2][1]))

    monkeypatch.setattr(bf16_optimizer, "_BUCKET", bucket)
    monkeypatch.setattr(dist, "get_world_size", lambda group: 3)
    monkeypatch.setattr(dist, "get_rank", lambda group: 1)
    monkeypatch.setattr(bf16_optimizer, "reduce_scatter_single", reduce_scatter)
    bf16_optimizer.average_local_slice(gradients, "replicas", dtype)
    a, b, c = (flat.view(3, 10)[1].to(dtype) for flat in flats)
    assert at == 10
    assert torch.equal(gradients.view(3, 10)[1], (a + b + c).float() / 3)
    assert torch.equal(gradients.view(3, 10)[::2], flats[1].view(3, 10)[::2])
