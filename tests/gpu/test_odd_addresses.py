"""Kernels with parameters at unaligned addresses, as in a trainer's flat buffers."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from models.config import ModelConfig
from models.language_model import LanguageModel

LION = {"mixers": ["lion"], "mixer_options": {"lion": {"causal": False}}, "norm": "layernorm", "mlp": "gelu"}


def step(lm: nn.Module, tokens: Tensor) -> list[Tensor]:
    lm.zero_grad()
    loss = lm(tokens, tokens)
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in lm.parameters())]


def move(lm: nn.Module, first: int) -> None:
    """Move all parameters into one buffer, from element `first` on."""
    parameters = list(lm.parameters())
    buffer = torch.empty(first + sum(p.numel() for p in parameters), device="cuda", dtype=parameters[0].dtype)
    for p in parameters:
        p.data = buffer[first : first + p.numel()].copy_(p.data.flatten()).view(p.shape)
        first += p.numel()


@pytest.mark.parametrize("options", [{}, LION], ids=["metala", "lion"])
def test_parameters_at_any_address(options: dict[str, object]) -> None:
    pytest.importorskip("fla")
    config = ModelConfig(vocab_size=512, num_layers=2, hidden_size=192, num_heads=3, **options)
    lm = LanguageModel(config, seed=1).to("cuda", torch.bfloat16)
    tokens = torch.randint(0, 512, (2, 100), generator=torch.Generator().manual_seed(0))
    exact = [x.double().cuda() for x in step(copy.deepcopy(lm).float().cpu(), tokens)]

    def errors() -> list[float]:
        actual = step(lm, tokens.cuda())
        return [((x.double() - y).norm() / y.norm().clamp_min(1e-9)).item() for x, y in zip(actual, exact, strict=True)]

    expected = errors()
    for first in (1, 4, 0):
        move(lm, first)
        for moved, original in zip(errors(), expected, strict=True):
            # Matmuls of another alignment may add in another order.
            assert moved < max(2 * original, 1e-2), f"error {moved}, and {original} at the original addresses"
