"""Several linears of one input in one autograd node: outputs and gradients of the linears by themselves."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from megatron_lite.fan_out import fan_out
from models.fan_out import apply_each


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
