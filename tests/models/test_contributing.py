"""The mixer in CONTRIBUTING.md works as printed."""

from __future__ import annotations

import importlib.util
import re
import sys

import pytest
import torch

from models.config import ModelConfig
from models.language_model import LanguageModel
from models.mixers import MIXERS

from .conftest import ROOT


@pytest.fixture
def decayed(tmp_path, monkeypatch):
    page = (ROOT / "CONTRIBUTING.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    path = tmp_path / "decayed.py"
    path.write_text(code)
    spec = importlib.util.spec_from_file_location("models.mixers.decayed", path)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    (name, mixer) = re.search(r'^    "(\w+)": (\w+),$', page, re.MULTILINE).groups()
    monkeypatch.setitem(MIXERS, name, getattr(module, mixer))
    return name


def test_trains_and_decodes(decayed):
    config = ModelConfig(
        vocab_size=61,
        num_layers=2,
        hidden_size=32,
        num_heads=4,
        mixers=(decayed, "attention"),
        mixer_options={decayed: {"half_life": 8.0}},
    )
    lm = LanguageModel(config, seed=1)
    tokens, labels = torch.randint(0, 61, (2, 40)), torch.randint(0, 61, (2, 40))
    optimizer = torch.optim.AdamW(lm.parameters(), lr=1e-2)
    losses = []
    for _ in range(3):
        loss = lm(tokens, labels) / labels.numel()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[2] < losses[0]
    assert all(p.grad.abs().sum() > 0 for p in lm.parameters())

    expected = lm(tokens)
    logits, state = lm(tokens[:, :25], return_state=True)
    outputs = [logits]
    for t in range(25, 40):
        logits, state = lm(tokens[:, t : t + 1], state=state, return_state=True)
        outputs.append(logits)
    torch.testing.assert_close(torch.cat(outputs, 1), expected, rtol=1e-5, atol=1e-5)
    rows = torch.cat([torch.zeros(2, 5, dtype=torch.long), tokens], 1)
    padded = lm(rows, mask=torch.arange(45).expand(2, 45) >= 5)
    torch.testing.assert_close(padded[:, 5:], expected, rtol=1e-5, atol=1e-5)
    packed = lm(tokens.view(1, -1), cu_seqlens=torch.tensor([0, 40, 80]))
    torch.testing.assert_close(packed.view_as(expected), expected, rtol=1e-5, atol=1e-5)


def test_its_options_are_checked(decayed):
    shape = {"vocab_size": 61, "num_layers": 2, "hidden_size": 32, "num_heads": 4, "mixers": (decayed,)}
    with pytest.raises(ValueError, match="half_life = 0: must be greater than 0"):
        ModelConfig(**shape, mixer_options={decayed: {"half_life": 0}})
    with pytest.raises(ValueError, match="did you mean half_life"):
        ModelConfig(**shape, mixer_options={decayed: {"halflife": 3}})
