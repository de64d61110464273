"""Several linears of one input in one autograd node: outputs and gradients of the linears by themselves."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from megatron_lite.parallel.fused_projections import fan_out
from models.layers.projections import apply_each


@pytest.mark.parametrize("again", [False, True])
def test_outputs_and_gradients_of_the_linears_by_themselves(again: bool) -> None:
    """again: x goes on to one more product, whose gradient of x is added to in place."""
    torch.manual_seed(0)
    linears = [nn.Linear(6, 4), nn.Linear(6, 5, bias=False), nn.Linear(6, 4)]
    weight, x = torch.randn(3, 6), torch.randn(2, 7, 6)
    results = []
    for apply in (apply_each, lambda *arguments, **options: fan_out(None, *arguments, **options)):
        leaves = [t.clone().double().requires_grad_() for t in (x, weight)]
        for linear in linears:
            linear.double().zero_grad()
        outputs = list(apply(leaves[0], linears, again=again))
        assert len(outputs) == 3 + again
        if again:
            outputs[3] = outputs[3] @ leaves[1].t()
        sum((y * torch.linspace(-1, 1 + i, y.numel()).view_as(y)).sum() for i, y in enumerate(outputs)).backward()
        gradients = [p.grad.clone() for linear in linears for p in linear.parameters()]
        results.append(
            [*(y.detach() for y in outputs), leaves[0].grad, *([leaves[1].grad] if again else []), *gradients]
        )
    for found, wanted in zip(*reversed(results), strict=True):
        torch.testing.assert_close(found, wanted)


class _Beside(torch.autograd.Function):
    """The identity of several tensors; their gradients lie side by side, as MetaLA's and SwiGLU's kernels write them."""

    @staticmethod
    def forward(ctx: Any, *several: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(x.clone() for x in several)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return torch.cat(gradients, -1).split([x.shape[-1] for x in gradients], -1)


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("flat", [True, False])
def test_what_lies_side_by_side_is_one_product(flat: bool, again: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights as they lie in a trainer's flat memory, and gradients from one kernel; the sums are the same."""
    sizes, memory = (3, 5, 4), torch.randn(12 * 6, dtype=torch.float64)
    linears, at = [], 0
    for size in sizes:
        linears.append(nn.Linear(6, size, bias=size == 5, dtype=torch.float64))
        if flat:
            linears[-1].weight.data = memory[at : at + 6 * size].view(size, 6)
        at += 6 * size
    products, mm = [], torch.mm
    monkeypatch.setattr(torch, "mm", lambda x, y: products.append(x.shape[1]) or mm(x, y))
    results = []
    for beside in (True, False):
        x = torch.linspace(-1, 1, 2 * 7 * 6, dtype=torch.float64).view(2, 7, 6).requires_grad_()
        *outputs, last = fan_out(None, x, linears, again=again) if again else (*fan_out(None, x, linears), None)
        if beside:
            outputs = list(_Beside.apply(*outputs))
        loss = sum((y * (i + y)).sum() for i, y in enumerate(outputs)) + (0.0 if last is None else last.square().sum())
        parameters = [p for linear in linears for p in linear.parameters()]
        results.append(torch.autograd.grad(loss, [x, *parameters]))
        if beside and not again:
            # The gradients of x, summed in place where there are several, then those of the weights.
            assert products == ([12, 14] if flat else [3, 14, 14, 14])
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected)
