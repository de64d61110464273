"""Learned positions: decoding continues them, padding and packing do not change them, longer sequences are refused."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_lite.optim.param_groups import parameter_kind
from megatron_lite.parallel.sharding_plan import sharding_specs
from models.config import ModelConfig
from models.language_model import LanguageModel

LONGEST = 24


def model(mixer: str = "lion", **options: Any) -> LanguageModel:
    config = ModelConfig(
        vocab_size=61,
        num_layers=2,
        hidden_size=32,
        num_heads=4,
        mixers=(mixer,),
        mixer_options={mixer: {"variant": "lit"} | options if mixer == "lion" else options},
        intermediate_size=48,
        positions="learned",
        max_positions=LONGEST,
        init_method="normal",
        init_std=0.3,
    )
    return LanguageModel(config, seed=1).eval()


def ids(*shape: int) -> Tensor:
    return torch.randint(0, 61, shape, generator=torch.Generator().manual_seed(4))


def test_position_vector_is_added_to_the_token() -> None:
    embedding, tokens = model().embedding, ids(2, 9)
    assert embedding.positions.weight.std().item() == pytest.approx(0.3, rel=0.1)
    expected = embedding.weight[tokens] + embedding.positions.weight[:9]
    torch.testing.assert_close(embedding(tokens), expected, rtol=0, atol=0)
    embedding(tokens).sum().backward()
    gradient = embedding.positions.weight.grad
    assert (gradient[:9] == 2).all()
    assert (gradient[9:] == 0).all()


def test_bidirectional_model_without_decay_depends_on_order() -> None:
    """Without positions, LION-lit does not depend on the order of tokens."""
    lm, tokens = model(causal=False), ids(1, 9)
    swapped = tokens[:, [0, 1, 5, 3, 4, 2, 6, 7, 8]]
    assert (lm(tokens) - lm(swapped))[0, 0].abs().max() > 1e-3
    with torch.no_grad():
        lm.embedding.positions.weight.zero_()
    torch.testing.assert_close(lm(tokens)[0, 0], lm(swapped)[0, 0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("mixer", ["lion", "attention"])
def test_decoding_continues_positions(mixer: str) -> None:
    lm, tokens = model(mixer), ids(2, LONGEST)
    expected = lm(tokens)
    logits, state = lm(tokens[:, :9], return_state=True)
    parts = [logits]
    for t in range(9, LONGEST):
        logits, state = lm(tokens[:, t : t + 1], state=state, return_state=True)
        parts.append(logits)
    torch.testing.assert_close(torch.cat(parts, 1), expected, rtol=1e-5, atol=1e-5)
    with pytest.raises(ValueError, match=r"a sequence of 25 tokens has more positions than model\.max_positions = 24"):
        lm(tokens[:, :1], state=state, return_state=True)


@pytest.mark.parametrize("mixer", ["lion", "attention"])
def test_padding_has_no_position(mixer: str) -> None:
    lm, tokens = model(mixer, causal=False), ids(1, 7)
    expected = lm(tokens)
    for left, right in ((3, 0), (0, 3), (LONGEST, 2)):
        padded = F.pad(tokens, (left, right))
        mask = F.pad(torch.ones(1, 7, dtype=torch.bool), (left, right))
        got = lm(padded, mask=mask)[:, left : left + 7]
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


def test_packed_documents_each_begin_at_position_zero() -> None:
    lm, bounds = model(), [0, 11, 11, LONGEST + 11]
    tokens = ids(1, bounds[-1])
    packed = lm(tokens, cu_seqlens=torch.tensor(bounds))
    apart = [lm(tokens[:, a:b]) for a, b in pairwise(bounds) if a < b]
    torch.testing.assert_close(packed, torch.cat(apart, 1), rtol=1e-5, atol=1e-5)
    with pytest.raises(ValueError, match="a sequence of 25 tokens"):
        lm(tokens, cu_seqlens=torch.tensor([0, 10, bounds[-1]]))


def test_sequence_longer_than_max_positions_is_refused() -> None:
    with pytest.raises(ValueError, match=r"25 tokens .* model.max_positions = 24, .*; use shorter sequences"):
        model()(ids(2, LONGEST + 1))


def test_sharding_spec_and_parameter_kind() -> None:
    embedding = model().embedding
    assert sharding_specs(embedding) == {"weight": "vocab", "positions.weight": "partial_grad"}
    assert parameter_kind(embedding, "positions.weight") == "embedding"
