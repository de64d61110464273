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
    for apply in (apply_each, lambda *arguments, **options: fan_out(None, None, *arguments, **options)):
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


def test_sums_that_are_at_hand_are_the_gradients_of_biases() -> None:
    """And others are formed: of the first linear none are at hand here."""
    linears, x = [nn.Linear(6, 4), nn.Linear(6, 5)], torch.randn(2, 7, 6)
    asked: list[torch.Size] = []

    def sums(gradient: torch.Tensor) -> torch.Tensor | None:
        asked.append(gradient.shape)
        return torch.arange(5.0) if gradient.shape[1] == 5 else None

    sum(y.sum() for y in fan_out(None, sums, x, linears)).backward()
    assert asked == [(14, 4), (14, 5)]
    torch.testing.assert_close(linears[0].bias.grad, torch.full((4,), 14.0))
    torch.testing.assert_close(linears[1].bias.grad, torch.arange(5.0))
