"""Parameters anywhere in memory, as they lie in a trainer's flat buffers: the kernels give what they give elsewhere."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from models.config import ModelConfig
from models.language_model import LanguageModel

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

LION = {"mixers": ["lion"], "mixer_options": {"lion": {"causal": False}}, "norm": "layernorm", "mlp": "gelu"}


def step(lm: nn.Module, tokens: Tensor) -> list[Tensor]:
    lm.zero_grad()
    loss = lm(tokens, tokens)
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in lm.parameters())]


def move(lm: nn.Module, first: int) -> None:
    """All parameters one after the other in one buffer, from element `first` on."""
    parameters = list(lm.parameters())
    buffer = torch.empty(first + sum(p.numel() for p in parameters), device="cuda", dtype=parameters[0].dtype)
    for p in parameters:
        p.data = buffer[first : first + p.numel()].copy_(p.data.flatten()).view(p.shape)
        first += p.numel()


@pytest.mark.parametrize("options", [{}, LION], ids=["metala", "lion"])
def test_parameters_anywhere(options: dict[str, object]) -> None:
    pytest.importorskip("fla")
    config = ModelConfig(vocab_size=512, num_layers=2, hidden_size=192, num_heads=3, **options)
    lm = LanguageModel(config, seed=1).to("cuda", torch.bfloat16)
    tokens = torch.randint(0, 512, (2, 100), generator=torch.Generator().manual_seed(0))
    exact = [x.double().cuda() for x in step(copy.deepcopy(lm).float().cpu(), tokens)]

    def errors() -> list[float]:
        found = step(lm, tokens.cuda())
        return [((x.double() - y).norm() / y.norm().clamp_min(1e-9)).item() for x, y in zip(found, exact, strict=True)]

    expected = errors()
    for first in (1, 4, 0):
        move(lm, first)
        for found, wanted in zip(errors(), expected, strict=True):
            # Products of another alignment may add in another order, in bf16.
            assert found < max(2 * wanted, 1e-2), f"{found} for {wanted} where they were made"
