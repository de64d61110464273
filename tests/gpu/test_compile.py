"""A block compiled by torch.compile equals the block, and so do its gradients."""

from __future__ import annotations

import pytest
import torch

from models.block import Block
from models.config import ModelConfig


@pytest.mark.parametrize("mixer", ["metala", "metala_bidirectional", "lion", "gated_delta_net", "attention"])
def test_generated_code(mixer: str) -> None:
    config = ModelConfig(vocab_size=8, num_layers=2, hidden_size=128, num_heads=2, mixers=(mixer,))
    plain, compiled = (Block(config, 0).to("cuda", torch.bfloat16) for _ in range(2))
    compiled.load_state_dict(plain.state_dict())
    compiled.compile()
    x = torch.randn(2, 128, 128, device="cuda", dtype=torch.bfloat16)
    results = []
    for run in (plain, compiled):
        leaf = x.clone().requires_grad_()
        y = run(leaf)
        results.append([y, *torch.autograd.grad(y.float().square().sum(), [leaf, *run.parameters()])])
    for actual, expected in zip(*results, strict=True):
        difference = (actual.float() - expected.float()).norm() / expected.float().norm().clamp_min(1e-6)
        assert difference < 2e-2
