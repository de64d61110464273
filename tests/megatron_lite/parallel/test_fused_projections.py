"""Fused projections: several linears of one input in one autograd node equal separate linears."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from megatron_lite.parallel.fused_projections import project_inputs
from models.layers.projections import apply_each


@pytest.mark.parametrize("return_input", [False, True])
def test_fused_projections_equal_separate_linears(return_input: bool) -> None:
    """Compare with separate linears; with return_input one more matmul reads x, whose gradient is accumulated in place."""
    torch.manual_seed(0)
    linears = [nn.Linear(6, 4), nn.Linear(6, 5, bias=False), nn.Linear(6, 4)]
    weight, x = torch.randn(3, 6), torch.randn(2, 7, 6)
    results = []
    for apply in (apply_each, lambda *arguments, **options: project_inputs(None, *arguments, **options)):
        leaves = [t.clone().double().requires_grad_() for t in (x, weight)]
        for linear in linears:
            linear.double().zero_grad()
        outputs = list(apply(leaves[0], linears, return_input=return_input))
        assert len(outputs) == 3 + return_input
        if return_input:
            outputs[3] = outputs[3] @ leaves[1].t()
        sum((y * torch.linspace(-1, 1 + i, y.numel()).view_as(y)).sum() for i, y in enumerate(outputs)).backward()
        gradients = [p.grad.clone() for linear in linears for p in linear.parameters()]
        results.append(
            [*(y.detach() for y in outputs), leaves[0].grad, *([leaves[1].grad] if return_input else []), *gradients]
        )
    for actual, expected in zip(*reversed(results), strict=True):
        torch.testing.assert_close(actual, expected)


class _AdjacentGradients(torch.autograd.Function):
    """Return the tensors; their gradients are adjacent in memory, as MetaLA's and SwiGLU's kernels write them."""

    @staticmethod
    def forward(ctx: Any, *several: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(x.clone() for x in several)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return torch.cat(gradients, -1).split([x.shape[-1] for x in gradients], -1)


@pytest.mark.parametrize("return_input", [False, True])
@pytest.mark.parametrize("flat", [True, False])
def test_adjacent_weights_and_gradients_use_one_matmul(
    flat: bool, return_input: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights are adjacent in a trainer's flat memory, and gradients in the output of one kernel."""
    sizes, memory = (3, 5, 4), torch.randn(12 * 6, dtype=torch.float64)
    linears, at = [], 0
    for size in sizes:
        linears.append(nn.Linear(6, size, bias=size == 5, dtype=torch.float64))
        if flat:
            linears[-1].weight.data = memory[at : at + 6 * size].view(size, 6)
        at += 6 * size
    matmul_sizes, mm = [], torch.mm
    monkeypatch.setattr(torch, "mm", lambda x, y: matmul_sizes.append(x.shape[1]) or mm(x, y))
    results = []
    for adjacent in (True, False):
        x = torch.linspace(-1, 1, 2 * 7 * 6, dtype=torch.float64).view(2, 7, 6).requires_grad_()
        outputs = list(project_inputs(None, x, linears, return_input=return_input))
        last = outputs.pop() if return_input else None
        if adjacent:
            outputs = list(_AdjacentGradients.apply(*outputs))
        loss = sum((y * (i + y)).sum() for i, y in enumerate(outputs)) + (0.0 if last is None else last.square().sum())
        parameters = [p for linear in linears for p in linear.parameters()]
        results.append(torch.autograd.grad(loss, [x, *parameters]))
        if adjacent and not return_input:
            # The gradients of x, summed in place where there are several, then those of the weights.
            assert matmul_sizes == ([12, 14] if flat else [3, 14, 14, 14])
    for actual, expected in zip(*results, strict=True):
        torch.testing.assert_close(actual, expected)
