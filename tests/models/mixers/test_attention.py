"""The softmax attention mixer: against the formula, its rotation, grouped queries, cache, padding, packing."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import Tensor

from models.config import ModelConfig
from models.mixers.attention import Attention, AttentionOptions

SIZE, HEADS = 32, 4


def mixer(**options) -> Attention:
    config = ModelConfig(vocab_size=8, num_layers=2, hidden_size=SIZE, num_heads=HEADS, mixers=("attention",))
    layer = Attention(config, 0, AttentionOptions(**options)).double()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.4)
    return layer


def formula(layer: Attention, x: Tensor) -> Tensor:
    """Compute softmax(q k^T / sqrt(d)) v per head and query, with rotations as complex numbers."""
    dim, options = SIZE // HEADS, layer.options
    project = [getattr(layer, name)(x).unflatten(-1, (-1, dim)) for name in ("q_proj", "k_proj", "v_proj")]
    rotary = int(dim * options.rotary_pct)
    frequency = options.rotary_base ** (-torch.arange(0, rotary, 2, dtype=torch.float64) / max(rotary, 1))
    angle = torch.arange(x.shape[1])[:, None] * frequency
    turn = torch.polar(torch.ones_like(angle), angle)[:, None]

    def rotate(y: Tensor) -> Tensor:
        half = rotary // 2
        z = torch.complex(y[..., :half], y[..., half:rotary]) * turn
        return torch.cat([z.real, z.imag, y[..., rotary:]], -1)

    q, k, v = rotate(project[0]), rotate(project[1]), project[2]
    out = torch.zeros_like(q)
    for h in range(HEADS):
        group = h * k.shape[2] // HEADS
        for t in range(x.shape[1]):
            end = t + 1 if options.causal else x.shape[1]
            scores = torch.einsum("bd,bjd->bj", q[:, t, h], k[:, :end, group]) * dim**-0.5
            out[:, t, h] = torch.einsum("bj,bjd->bd", scores.softmax(-1), v[:, :end, group])
    return layer.out_proj(out.flatten(-2))


def test_odd_rotary_channel_is_not_rotated() -> None:
    """Channels are rotated in pairs: 0.4 of 8 channels are 3, of which 2 are rotated."""
    layer, other = mixer(rotary_pct=0.4), mixer(rotary_pct=0.25)
    other.load_state_dict(layer.state_dict())
    x = torch.randn(1, 9, SIZE, dtype=torch.float64)
    assert torch.equal(layer(x), other(x))


OPTIONS = [
    {},
    {"rotary_pct": 0.25, "bias": True},
    {"rotary_pct": 0.0},
    {"num_kv_heads": 2, "rotary_base": 500.0},
    {"num_kv_heads": 1},
    {"causal": False},
]


@pytest.mark.parametrize("options", OPTIONS)
def test_equals_the_formula(options):
    layer = mixer(**options)
    x = torch.randn(2, 9, SIZE, dtype=torch.float64)
    # The rotation is in float32 at any dtype.
    torch.testing.assert_close(layer(x), formula(layer, x), rtol=0, atol=1e-5)


@pytest.mark.parametrize("options", OPTIONS[:5])
def test_decode_equals_forward(options):
    layer = mixer(**options)
    x = torch.randn(2, 12, SIZE, dtype=torch.float64)
    expected = layer(x)
    y, state = layer(x[:, :7], return_state=True)
    outputs = [y]
    for a, b in ((7, 8), (8, 11), (11, 12)):
        y, state = layer(x[:, a:b], state=state, return_state=True)
        outputs.append(y)
    torch.testing.assert_close(torch.cat(outputs, 1), expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("left", [0, 5])
def test_padding_changes_no_real_token(causal, left):
    layer = mixer(causal=causal)
    x = torch.randn(2, 8, SIZE, dtype=torch.float64)
    rows = torch.randn(2, 13, SIZE, dtype=torch.float64) * 100
    mask = torch.zeros(2, 13, dtype=torch.bool)
    rows[:, left : left + 8], mask[:, left : left + 8] = x, True
    y = layer(rows, mask=mask)
    assert y.isfinite().all()
    torch.testing.assert_close(y[:, left : left + 8], layer(x), rtol=0, atol=1e-6)


def test_decode_after_padding_equals_forward():
    layer = mixer()
    x = torch.randn(2, 10, SIZE, dtype=torch.float64)
    rows, mask = torch.randn(2, 9, SIZE, dtype=torch.float64), torch.ones(2, 9, dtype=torch.bool)
    rows[0, 3:], mask[0, :3] = x[0, :6], False
    rows[1, :6], mask[1, 6:] = x[1, :6], False
    _, state = layer(rows, mask=mask, return_state=True)
    y, _ = layer(x[:, 6:], state=state, return_state=True)
    torch.testing.assert_close(y, layer(x)[:, 6:], rtol=0, atol=1e-6)


@pytest.mark.parametrize("causal", [True, False])
def test_packed_segments_equal_runs_apart(causal):
    layer = mixer(causal=causal)
    bounds = [0, 7, 7, 8, 20]
    x = torch.randn(1, 20, SIZE, dtype=torch.float64)
    y = layer(x, cu_seqlens=torch.tensor(bounds))
    for a, b in pairwise(bounds):
        torch.testing.assert_close(y[:, a:b], layer(x[:, a:b]), rtol=0, atol=1e-10)
    if causal:
        y, state = layer(x, cu_seqlens=torch.tensor(bounds), return_state=True)
        torch.testing.assert_close(y, layer(x, cu_seqlens=torch.tensor(bounds)), rtol=0, atol=1e-10)
        assert state["mask"].sum(1).tolist() == [b - a for a, b in pairwise(bounds)]


def test_bidirectional_attention_refuses_a_state():
    """Earlier outputs would depend on later tokens."""
    layer = mixer(causal=False)
    x = torch.randn(1, 8, SIZE, dtype=torch.float64)
    for packed in ({}, {"cu_seqlens": torch.tensor([0, 8])}):
        with pytest.raises(ValueError, match="causal = false sees both directions and has no state to decode from"):
            layer(x, return_state=True, **packed)
        with pytest.raises(ValueError, match="causal = false sees both directions and has no state to decode from"):
            layer(x, state={}, **packed)


def test_packed_state_continues_each_segment():
    layer = mixer()
    bounds = [0, 4, 10]
    x, more = torch.randn(1, 10, SIZE, dtype=torch.float64), torch.randn(1, 2, SIZE, dtype=torch.float64)
    _, state = layer(x, cu_seqlens=torch.tensor(bounds), return_state=True)
    z, _ = layer(more, cu_seqlens=torch.arange(3), state=state, return_state=True)
    for i, (a, b) in enumerate(pairwise(bounds)):
        together = layer(torch.cat([x[:, a:b], more[:, i : i + 1]], 1))
        torch.testing.assert_close(z[:, i], together[:, -1], rtol=0, atol=1e-6)


def test_wrong_head_counts_are_refused():
    message = "num_kv_heads = 3 does not divide model.num_heads = 8; nearest that do: 2 or 4"
    with pytest.raises(ValueError, match=message):
        ModelConfig(8, 2, 32, 8, mixers=("attention",), mixer_options={"attention": {"num_kv_heads": 3}})
