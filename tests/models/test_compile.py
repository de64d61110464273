"""A compiled block equals the block."""

from __future__ import annotations

import pytest
import torch

from models.backend import disable_compile
from models.block import Block
from models.config import ModelConfig


def block(mixer: str) -> Block:
    return Block(ModelConfig(vocab_size=8, num_layers=2, hidden_size=32, num_heads=2, mixers=(mixer,)), 0)


@pytest.mark.parametrize("mixer", ["metala", "attention"])
def test_graphs_and_their_gradients(mixer):
    """Trace without generated code, which takes long to build. tests/gpu/test_compile.py builds it."""
    plain, compiled = block(mixer), block(mixer)
    compiled.load_state_dict(plain.state_dict())
    compiled.compile(backend="aot_eager")
    x = torch.randn(2, 40, 32)
    results = []
    for run in (plain, compiled):
        leaf = x.clone().requires_grad_()
        y = run(leaf)
        results.append([y, *torch.autograd.grad(y.square().sum(), [leaf, *run.parameters()])])
    for actual, expected in zip(*results, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)


def test_function_left_out_of_graphs_runs_eagerly():
    traced = []

    @disable_compile
    def kernel(x: torch.Tensor) -> torch.Tensor:
        traced.append(torch.compiler.is_compiling())
        return x + 1

    compiled = torch.compile(lambda x: kernel(x) * 2, backend="eager")
    assert compiled(torch.ones(2)).tolist() == [4, 4]
    assert traced == [False]
