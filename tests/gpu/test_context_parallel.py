"""Mixers on local shards of a sequence with CUDA kernels, compared with the whole sequence in float32."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.models.mixer_cases import build, name_of, tokens
from tests.models.rank_threads import over_ranks

CASES: list[tuple[str, dict[str, Any]]] = [
    *((name, {}) for name in ("metala", "metala_bidirectional", "gla", "retnet", "mamba2", "mamba", "hgrn", "rwkv4")),
    *((name, {}) for name in ("linear_attention", "lion", "rg_lru", "delta_net", "gated_delta_net", "kda")),
    *(("lion", {"variant": variant, "causal": False}) for variant in ("s", "d", "lit", "lstm")),
    *(("lion", {"decay_per": "channel", "causal": causal}) for causal in (True, False)),
    ("lion", {"decay_per": "value_channel", "causal": False}),
]


def results(module: nn.Module, x: Tensor, weight: Tensor, **context: Any) -> list[Tensor]:
    """Return the output, the gradient of x and the gradients of the parameters."""
    module.zero_grad()
    x = x.clone().requires_grad_()
    y = module(x, **context)
    # Run the backward pass in the calling thread. A device has one backward thread, and the ranks wait for one another.
    with torch.autograd.set_multithreading_enabled(False):
        (y * weight).sum().backward()
    return [t.detach().double() for t in (y, x.grad, *(p.grad for p in module.parameters()))]


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_local_shards_equal_the_whole_sequence_on_kernels(case: tuple[str, dict[str, Any]], packed: bool) -> None:
    pytest.importorskip("fla")
    batch, length, count = (1 if packed else 2), 600, 2
    context = {"cu_seqlens": torch.tensor([0, 100, 100, 290, 410, 600], device="cuda")} if packed else {}
    mixer = build(case, torch.bfloat16, size=128, heads=2).cuda()
    x = tokens(length, batch, size=128).bfloat16().cuda()
    weight = torch.randn(x.shape, generator=torch.Generator().manual_seed(8)).bfloat16().cuda()
    exact = results(copy.deepcopy(mixer).float(), x.float(), weight.float(), **context)
    whole = results(mixer, x, weight, **context)
    copies = [copy.deepcopy(mixer) for _ in range(count)]

    def work(index: int) -> list[Tensor]:
        return results(copies[index], x.chunk(count, 1)[index], weight.chunk(count, 1)[index], **context)

    parts = over_ranks(count, work)
    joined = [torch.cat(pieces, 1) for pieces in list(zip(*parts, strict=True))[:2]]
    joined += [sum(pieces) for pieces in list(zip(*parts, strict=True))[2:]]
    for number, (got, reference, wanted) in enumerate(zip(joined, whole, exact, strict=True)):
        error, usual = ((t - wanted).norm() / wanted.norm() for t in (got, reference))
        assert got.isfinite().all(), number
        assert error < max(2e-2, 2 * usual), (number, error.item(), usual.item())
