"""Tensor-parallel overlap: order of the all-reduces, and values of even and odd numbers of rows."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron_lite.engine.tensor_overlap import MicroBatchOverlap, overlap_parts
from megatron_lite.parallel.fused_projections import project_inputs
from megatron_lite.parallel.grid import init_grid
from megatron_lite.parallel.tensor_parallel import TensorGroup


class TwoParts(nn.Module):
    """A block whose parts each enter a parallel region and leave it."""

    def __init__(self, tensor: TensorGroup) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
        self._tensor = tensor

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return self.finish(*self.mix(x, mask))

    def mix(self, x: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        (y,) = project_inputs(self._tensor, x, (self.first,))
        return x, self._tensor.leave(2 * y if mask is None else y * mask.unsqueeze(-1))

    def finish(self, x: Tensor, mixed: Tensor) -> Tensor:
        (y,) = project_inputs(self._tensor, x + mixed, (self.second,))
        return mixed + self._tensor.leave(y / 2)


@pytest.fixture
def all_reduces(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the chunk of each all-reduce; values and gradients of the second chunk are a thousand times larger."""
    init_grid("cpu")
    seen: list[str] = []
    real = dist.all_reduce

    def recorded(x: Tensor, *arguments: object, **options: object) -> object:
        seen.append("second" if x.abs().max() > 30 else "first")
        return real(x, *arguments, **options)

    monkeypatch.setattr(dist, "all_reduce", recorded)
    return seen


def build(mode: str, count: int = 3) -> tuple[nn.ModuleList, MicroBatchOverlap]:
    torch.manual_seed(0)
    tensor = TensorGroup(dist.group.WORLD, 0, 1)
    layers = nn.ModuleList(TwoParts(tensor) for _ in range(count))
    parts = [overlap_parts(layer, mode, nullcontext) for layer in layers]
    return layers, MicroBatchOverlap(parts, list(layers.parameters()), torch.device("cpu"))


def batch(rows: int) -> Tensor:
    x = torch.randn(rows, 3, 4).clamp(-1, 1)
    x[rows // 2 :] *= 1000
    return x.requires_grad_()


def test_all_reduces_of_the_chunks_alternate(all_reduces: list[str]) -> None:
    _, overlap = build("none")
    x = batch(4)
    y = overlap(x)
    assert all_reduces == ["first", "second"] * 6
    all_reduces.clear()
    weight = torch.ones(4, 1, 1)
    weight[2:] = 1000
    (y * weight).sum().backward()
    assert all_reduces == ["second", "first"] * 6


@pytest.mark.parametrize("mode", ["none", "full"])
@pytest.mark.parametrize("rows", [4, 3])
def test_values_and_gradients_equal_those_without_overlap(mode: str, rows: int) -> None:
    init_grid("cpu")
    results = []
    for overlapped in (False, True):
        layers, overlap = build(mode)
        x = batch(rows)
        mask = torch.arange(rows * 3).view(rows, 3) % 4 != 0
        y = overlap(x, mask=mask) if overlapped else x
        for layer in () if overlapped else layers:
            y = layer(y, mask=mask)
        y.square().sum().backward()
        results.append([y, x.grad, *(p.grad for p in layers.parameters())])
    for actual, expected in zip(*reversed(results), strict=True):
        torch.testing.assert_close(actual, expected)
