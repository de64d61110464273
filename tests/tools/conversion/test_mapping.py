"""The tensors that an import makes from those of another codebase."""

from __future__ import annotations

import torch

from models.config import ModelConfig
from tools.conversion.foreign.mapping import Foreign, Source, make


def test_tensors_of_sixteen_bits_are_combined_in_float32():
    model = ModelConfig(vocab_size=8, num_layers=1, hidden_size=4, num_heads=1, mixers=("gla",))
    product = Source(("w", "gain"), lambda weight, gain: weight * gain)
    foreign = Foreign(model, {"out": product, "same": Source(("w",)), "none": None})
    weight, gain = (torch.tensor([1 + 1 / 128, 3.0]).bfloat16() for _ in range(2))
    tensors = {"w": weight, "gain": gain}
    made = {name: make(foreign, name, tensors, (2,)) for name in foreign.sources}
    assert {tensor.dtype for tensor in made.values()} == {torch.float32}
    assert made["out"].tolist() == [(1 + 1 / 128) ** 2, 9.0], "not rounded to 16 bits"
    assert made["same"].tolist() == [1 + 1 / 128, 3.0]
    assert made["none"].tolist() == [0.0, 0.0]
