"""Decoding with a CUDA graph equals eager decoding."""

from __future__ import annotations

import pytest
import torch

from models.config import ModelConfig
from models.language_model import LanguageModel
from tools.inference.cuda_graph import graphed_step


def model(mixers: tuple[str, ...], window: int | None = None) -> LanguageModel:
    options = {"attention": {"window": window}} if window else {}
    config = ModelConfig(512, num_layers=2, hidden_size=256, num_heads=2, mixers=mixers, mixer_options=options)
    with torch.device("cuda"):
        return LanguageModel(config, seed=0).to(torch.bfloat16).eval().requires_grad_(False)


@pytest.mark.parametrize(
    ("mixers", "window"),
    [
        (("metala",), None),
        (("retnet", "hgrn2"), None),
        (("gated_delta_net", "attention"), 64),
        (("gated_delta_net", "attention"), None),
    ],
)
@torch.inference_mode()
def test_graphed_decoding_equals_eager_decoding(mixers, window):
    lm = model(mixers, window)
    prompt = torch.randint(0, 512, (4, 100), device="cuda")
    logits, state = lm(prompt, return_state=True)
    step = graphed_step(lm, state, 4, 12)
    token = logits[:, -1:].argmax(-1)
    for _ in range(12):
        logits, state = lm(token, state=state, return_state=True)
        replayed = step(token)
        torch.testing.assert_close(replayed, logits[:, 0], rtol=2e-2, atol=2e-2)
        token = logits.argmax(-1)
    with pytest.raises(ValueError, match="max_tokens 12: the state has no room for more tokens"):
        step(token)
