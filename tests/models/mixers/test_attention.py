"""The softmax attention mixer and its options: the formula, transformers, cache, padding, packing, refused values."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import Qwen3Config, Qwen3NextConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextAttention, Qwen3NextRotaryEmbedding

from models.config import ModelConfig
from models.mixers.attention import Attention, AttentionOptions
from models.operators.dot_product import dot_product
from models.operators.rotary import rotary

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
    dim, options = layer.head_dim, layer.options
    project = [getattr(layer, name)(x).unflatten(-1, (-1, dim)) for name in ("q_proj", "k_proj", "v_proj")]
    for i, gain in enumerate((layer.q_norm_weight, layer.k_norm_weight) if options.qk_norm else ()):
        project[i] = project[i] / (project[i].square().mean(-1, keepdim=True) + 1e-5).sqrt() * gain
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
            read = slice(max(0, t + 1 - (layer.window or t + 1)), t + 1) if options.causal else slice(None)
            scores = torch.einsum("bd,bjd->bj", q[:, t, h], k[:, read, group]) * dim**-0.5
            out[:, t, h] = torch.einsum("bj,bjd->bd", scores.softmax(-1), v[:, read, group])
    out = out.flatten(-2)
    return layer.out_proj(out / (1 + (-layer.gate_proj(x)).exp()) if options.output_gate else out)


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
    {"window": 3, "num_kv_heads": 2},
    {"window": 1},
    {"window": 100, "qk_norm": True},
    {"window": 4, "full_layers": (0,), "nope_layers": (1,)},
    {"qk_norm": True, "output_gate": True, "bias": True, "head_dim": 12},
    {"causal": False},
]


YARN = {"yarn_factor": 4.0, "yarn_original_length": 64, "rotary_pct": 0.5, "window": 4}


@pytest.mark.parametrize("options", OPTIONS)
def test_equals_the_formula(options):
    layer = mixer(**options)
    x = torch.randn(2, 9, SIZE, dtype=torch.float64)
    torch.testing.assert_close(layer(x), formula(layer, x), rtol=0, atol=1e-12)


@pytest.mark.parametrize("options", [*OPTIONS[:-1], YARN])
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


def test_decoding_does_not_copy_keys_for_each_query_head(monkeypatch):
    layer = mixer(num_kv_heads=1)
    x = torch.randn(2, 9, SIZE, dtype=torch.float64)
    _, state = layer(x[:, :8], return_state=True)
    heads = []
    monkeypatch.setattr(layer, "dot_product", lambda q, k, *more: heads.append(k.shape[1]) or dot_product(q, k, *more))
    y, _ = layer(x[:, 8:], state=state, return_state=True)
    assert heads == [1]
    torch.testing.assert_close(y, layer(x)[:, 8:], rtol=0, atol=1e-10)


@pytest.mark.parametrize("options", [{"num_kv_heads": 2}, {"window": 3}])
def test_text_without_padding_is_read_in_parts_without_a_mask(options, monkeypatch):
    layer, x = mixer(**options), torch.randn(2, 12, SIZE, dtype=torch.float64)
    _, state = layer(x[:, :5], return_state=True)
    masks = []
    monkeypatch.setattr(
        layer, "dot_product", lambda q, k, v, *more: masks.append(more[0]) or dot_product(q, k, v, *more)
    )
    y, state = layer(x[:, 5:11], state=state, return_state=True)
    z = layer(x[:, 11:], state=state)
    assert masks[0] is None
    assert (masks[1] is None) == (layer.window is None), "one token needs a mask only for the keys of a window"
    torch.testing.assert_close(torch.cat([y, z], 1), layer(x)[:, 5:], rtol=0, atol=1e-10)


@pytest.mark.parametrize("options", [{"num_kv_heads": 2}, {"window": 3}])
@pytest.mark.parametrize("padded", [0, 2])
def test_preallocated_cache_is_updated_in_place(options, padded):
    layer, x = mixer(**options), torch.randn(2, 9, SIZE, dtype=torch.float64)
    mask = torch.ones(2, 5 + padded, dtype=torch.bool)
    mask[:, :padded] = False
    prompt = F.pad(x[:, :5], (0, 0, padded, 0))
    _, state = layer(prompt, mask=mask if padded else None, return_state=True)
    if layer.window is None:
        assert [layer.preallocate(state, tokens)["key"].shape[1] for tokens in (57, 100)] == [64, 128]
    state = layer.preallocate(state, 4)
    place, outputs = state["key"].data_ptr(), []
    for t in range(5, 9):
        y, state = layer(x[:, t : t + 1], state=state, return_state=True)
        outputs.append(y)
    torch.testing.assert_close(torch.cat(outputs, 1), layer(x)[:, 5:], rtol=0, atol=1e-10)
    if layer.window is None:
        assert (state["key"].data_ptr(), state["used"].item()) == (place, 9 + padded)
        with pytest.raises(ValueError, match="2 tokens: a preallocated state takes one token per step"):
            layer(x[:, :2], state=state)
        for padding in ({"mask": torch.tensor([[True], [False]])}, {"cu_seqlens": torch.tensor([0, 1, 1])}):
            with pytest.raises(ValueError, match=r"1 tokens: .* one token per step, without mask or cu_seqlens"):
                layer(x[: 1 if "cu_seqlens" in padding else 2, :1], state=state, **padding)


@pytest.mark.parametrize("options", [{}, {"window": 3}, {"causal": False}])
@pytest.mark.parametrize("left", [0, 5])
def test_padding_changes_no_real_token(options, left):
    layer = mixer(**options)
    x = torch.randn(2, 8, SIZE, dtype=torch.float64)
    rows = torch.randn(2, 13, SIZE, dtype=torch.float64) * 100
    mask = torch.zeros(2, 13, dtype=torch.bool)
    rows[:, left : left + 8], mask[:, left : left + 8] = x, True
    y = layer(rows, mask=mask)
    assert y.isfinite().all()
    torch.testing.assert_close(y[:, left : left + 8], layer(x), rtol=0, atol=1e-6)


@pytest.mark.parametrize("options", [{}, {"window": 3}, {"window": 8}])
def test_decode_after_padding_equals_forward(options):
    layer = mixer(**options)
    x = torch.randn(2, 10, SIZE, dtype=torch.float64)
    rows, mask = torch.randn(2, 9, SIZE, dtype=torch.float64), torch.ones(2, 9, dtype=torch.bool)
    rows[0, 3:], mask[0, :3] = x[0, :6], False
    rows[1, :6], mask[1, 6:] = x[1, :6], False
    _, state = layer(rows, mask=mask, return_state=True)
    outputs = []
    for part in (x[:, 6:8], x[:, 8:]):
        y, state = layer(part, state=state, return_state=True)
        outputs.append(y)
    torch.testing.assert_close(torch.cat(outputs, 1), layer(x)[:, 6:], rtol=0, atol=1e-6)


def test_padding_between_real_tokens_does_not_shorten_a_window():
    layer = mixer(window=3)
    x, mask = torch.randn(1, 9, SIZE, dtype=torch.float64), torch.ones(1, 9, dtype=torch.bool)
    mask[0, 4:6] = False
    real = torch.cat([x[:, :4], x[:, 6:]], 1)
    torch.testing.assert_close(layer(x, mask=mask)[mask][None], layer(real), rtol=0, atol=1e-6)


def test_window_keeps_a_cache_of_constant_size():
    layer = mixer(window=4, num_kv_heads=2)
    shapes, state = set(), None
    for length in (2, 1, 9, 1):
        _, state = layer(torch.randn(2, length, SIZE, dtype=torch.float64), state=state, return_state=True)
        shapes.add(tuple((name, x.shape) for name, x in state.items()))
        assert all(x.untyped_storage().nbytes() == x.nbytes for x in state.values()), "the prompt's keys are freed"
    assert len(shapes) == 1
    assert state["key"].shape == (2, 3, 2, SIZE // HEADS)
    assert state["seen"].tolist() == [[13], [13]]


@pytest.mark.parametrize("options", [{}, {"window": 3}, {"causal": False}])
def test_packed_segments_equal_runs_apart(options):
    layer = mixer(**options)
    bounds = [0, 7, 7, 8, 20]
    x = torch.randn(1, 20, SIZE, dtype=torch.float64)
    y = layer(x, cu_seqlens=torch.tensor(bounds))
    for a, b in pairwise(bounds):
        torch.testing.assert_close(y[:, a:b], layer(x[:, a:b]), rtol=0, atol=1e-10)
    if layer.options.causal:
        y, state = layer(x, cu_seqlens=torch.tensor(bounds), return_state=True)
        torch.testing.assert_close(y, layer(x, cu_seqlens=torch.tensor(bounds)), rtol=0, atol=1e-10)
        assert state["seen"][:, 0].tolist() == [b - a for a, b in pairwise(bounds)]
        kept = 2 if layer.window else 20
        assert state["mask"].sum(1).tolist() == [min(b - a, kept) for a, b in pairwise(bounds)]


def test_bidirectional_attention_refuses_a_state():
    """Earlier outputs would depend on later tokens."""
    layer = mixer(causal=False)
    x = torch.randn(1, 8, SIZE, dtype=torch.float64)
    for packed in ({}, {"cu_seqlens": torch.tensor([0, 8])}):
        with pytest.raises(ValueError, match="causal = false sees both directions and has no state to decode from"):
            layer(x, return_state=True, **packed)
        with pytest.raises(ValueError, match="causal = false sees both directions and has no state to decode from"):
            layer(x, state={}, **packed)


@pytest.mark.parametrize("options", [{}, {"window": 5}])
def test_packed_state_continues_each_segment(options):
    layer = mixer(**options)
    bounds = [0, 4, 10]
    x, more = torch.randn(1, 10, SIZE, dtype=torch.float64), torch.randn(1, 2, SIZE, dtype=torch.float64)
    _, state = layer(x, cu_seqlens=torch.tensor(bounds), return_state=True)
    z, _ = layer(more, cu_seqlens=torch.arange(3), state=state, return_state=True)
    for i, (a, b) in enumerate(pairwise(bounds)):
        together = layer(torch.cat([x[:, a:b], more[:, i : i + 1]], 1))
        torch.testing.assert_close(z[:, i], together[:, -1], rtol=0, atol=1e-6)


@pytest.fixture
def flash(monkeypatch) -> list[tuple[int, int]]:
    """Select FlashAttention, by a stand-in that aligns the last query with the last key. Return the windows it computed."""
    windows: list[tuple[int, int]] = []

    def varlen_attn(q, k, v, cu_q, cu_k, max_q, max_k, window_size):
        assert cu_q.dtype == cu_k.dtype == torch.int32
        assert int(cu_q.diff().max()) <= max_q
        assert int(cu_k.diff().max()) <= max_k
        windows.append(window_size)
        left, right = (len(k) if side < 0 else side for side in window_size)
        rows = []
        for a, b, c, d in zip(cu_q[:-1], cu_q[1:], cu_k[:-1], cu_k[1:], strict=True):
            distance = (torch.arange(b - a) + (d - c) - (b - a))[:, None] - torch.arange(d - c)
            row = [x.transpose(0, 1) for x in (q[a:b], k[c:d], v[c:d])]
            allowed = (distance <= left) & (distance >= -right)
            rows.append(F.scaled_dot_product_attention(*row, attn_mask=allowed).transpose(0, 1))
        return torch.cat(rows)

    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", varlen_attn)
    for module in ("models.operators.dot_product", "models.mixers.attention"):
        monkeypatch.setattr(f"{module}.supports_flash", lambda _: True)
    return windows


def test_window_by_flash_attention(flash, monkeypatch):
    q, k, v = torch.randn(3, 2, 4, 9, 8)
    cases = [(q, 3), (q, 1), (q[:, :, -2:], 4)]
    computed = [dot_product(x, k, v, None, True, window) for x, window in cases]
    assert flash == [(2, 0), (0, 0), (3, 0)]
    monkeypatch.undo()
    for (x, window), o in zip(cases, computed, strict=True):
        torch.testing.assert_close(o, dot_product(x, k, v, None, True, window))
    assert len(flash) == 3


@pytest.mark.parametrize(
    ("options", "window"), [({"num_kv_heads": 2}, (-1, 0)), ({"window": 3}, (2, 0)), ({"causal": False}, (-1, -1))]
)
def test_packed_segments_by_flash_attention(options, window, flash, monkeypatch):
    layer = mixer(**options)
    x, cu_seqlens = torch.randn(1, 20, SIZE, dtype=torch.float64), torch.tensor([0, 7, 7, 8, 20, 20])
    y = layer(x, cu_seqlens=cu_seqlens)
    monkeypatch.undo()
    torch.testing.assert_close(y, layer(x, cu_seqlens=cu_seqlens), rtol=0, atol=1e-10)
    assert flash == [window]


def test_options_of_qwen3_and_qwen3_next_equal_transformers():
    """Compare QK-norm, YaRN and window with Qwen3's attention, the output gate with Qwen3-Next's, for grouped queries."""
    rope = {"rope_type": "yarn", "rope_theta": 500.0, "factor": 8.0, "original_max_position_embeddings": 32}
    dim = 12
    shape = {"hidden_size": SIZE, "num_attention_heads": HEADS, "num_key_value_heads": 2, "head_dim": dim}
    more = {"attn_implementation": "eager", "max_position_embeddings": 256, "rms_norm_eps": 1e-5}
    yarn = {"yarn_factor": 8.0, "yarn_original_length": 32, "rotary_base": 500.0}
    layer = mixer(head_dim=dim, num_kv_heads=2, qk_norm=True, output_gate=True, **yarn).float()
    x, position = torch.randn(2, 40, SIZE), torch.arange(40)[None]
    future = torch.full((40, 40), -torch.inf).triu(1)[None, None]
    ours = {name.removesuffix("_weight") if "norm" in name else name: p for name, p in layer.named_parameters()}
    ours = {name.replace("norm", "norm.weight").replace("out_proj", "o_proj"): p for name, p in ours.items()}

    config = Qwen3NextConfig(**shape, **more, rope_parameters={**rope, "partial_rotary_factor": 1.0})
    cos_sin = Qwen3NextRotaryEmbedding(config)(x, position)
    theirs = Qwen3NextAttention(config, 0)
    query_and_gate = [ours[name].unflatten(0, (HEADS, dim)) for name in ("q_proj.weight", "gate_proj.weight")]
    weights = {name: p for name, p in ours.items() if name != "gate_proj.weight"}
    weights["q_proj.weight"] = torch.cat(query_and_gate, 1).flatten(0, 1)
    # Qwen3-Next multiplies by 1 + weight.
    weights |= {name: ours[name] - 1 for name in ("q_norm.weight", "k_norm.weight")}
    theirs.load_state_dict(weights)
    torch.testing.assert_close(layer(x), theirs(x, cos_sin, future)[0], rtol=1e-4, atol=1e-5)

    layer.gate_proj = None
    theirs = Qwen3Attention(Qwen3Config(**shape, **more, rope_parameters=rope), 0)
    theirs.load_state_dict({name: p for name, p in ours.items() if name != "gate_proj.weight"})
    torch.testing.assert_close(layer(x), theirs(x, cos_sin, future)[0], rtol=1e-4, atol=1e-5)

    theirs.sliding_window, layer.window = 7, 7
    near = future + torch.full((40, 40), -torch.inf).tril(-7)
    torch.testing.assert_close(layer(x), theirs(x, cos_sin, near)[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("changes", [{}, {"beta_fast": 8.0, "beta_slow": 2.0, "attention_factor": 1.5}])
@pytest.mark.parametrize(("factor", "length", "base"), [(4.0, 4096, 1e4), (40.0, 4096, 1e6), (1.0, 32, 500.0)])
def test_yarn_equals_transformers(changes, factor, length, base):
    rope = {"rope_type": "yarn", "rope_theta": base, "factor": factor, "original_max_position_embeddings": length}
    config = Qwen3Config(head_dim=64, rope_parameters=rope | changes, max_position_embeddings=int(factor * length))
    frequency, scale = ROPE_INIT_FUNCTIONS["yarn"](config, torch.device("cpu"))
    yarn = AttentionOptions(
        yarn_factor=factor, yarn_original_length=length, **{f"yarn_{key}": value for key, value in changes.items()}
    ).yarn
    plain = base ** (-torch.arange(0, 64, 2, dtype=torch.float32) / 64)
    torch.testing.assert_close(yarn.frequencies(plain, base), frequency)
    assert yarn.scale == pytest.approx(scale)
    cos, sin = rotary(torch.tensor([[3]]), 64, base, torch.float32, yarn)
    torch.testing.assert_close(torch.hypot(cos, sin), torch.full_like(cos, scale))


def test_flops_count_the_window():
    plain, windowed, gated = (mixer(**options) for options in ({}, {"window": 4}, {"output_gate": True}))
    for length in (1, 4, 7):
        keys = sum(min(t + 0.5, 4) for t in range(length)) / length  # the diagonal counts half
        scores = windowed.flops_per_token(length) - plain.flops_per_token(0)
        assert scores == pytest.approx(4 * SIZE * keys, rel=0.15)
    assert plain.flops_per_token(4) == windowed.flops_per_token(4)
    assert gated.flops_per_token(9) - plain.flops_per_token(9) == 2 * SIZE * SIZE


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_kv_heads": 3}, "num_kv_heads = 3 does not divide model.num_heads = 8; nearest that do: 2 or 4"),
        ({"head_dim": 0}, "head_dim = 0: must be at least 1"),
        ({"rotary_base": 1.0}, "rotary_base = 1.0: must be above 1 and finite; 10000 is common"),
        ({"rotary_base": float("inf")}, "rotary_base = inf: must be above 1 and finite"),
        (
            {"rotary_pct": 0.4},
            "rotary_pct = 0.4 rotates no pair of the 4 channels of a head: allowed is at least 2 / 4, or 0",
        ),
        ({"window": 0}, "window = 0: must be at least 1; set null to attend to all earlier tokens"),
        ({"window": 8, "causal": False}, "window = 8 with causal = false: set causal = true, or remove window"),
        ({"full_layers": [0]}, r"full_layers = \[0\] needs window: set it, or remove full_layers"),
        (
            {"nope_layers": [0], "rotary_pct": 0},
            r"nope_layers = \[0\] with rotary_pct = 0, .*: set rotary_pct, or remove",
        ),
        (
            {"yarn_factor": 0.5},
            "yarn_factor = 0.5: must be at least 1 and finite; set the new length divided by yarn_original_length",
        ),
        ({"yarn_factor": float("nan")}, "yarn_factor = nan: must be at least 1"),
        ({"yarn_factor": float("inf")}, "yarn_factor = inf: must be at least 1 and finite"),
        ({"yarn_beta_fast": float("inf")}, "yarn_beta_fast = inf: must be greater than 0 and finite"),
        (
            {"yarn_factor": 2.0, "yarn_original_length": 8, "rotary_pct": 0.0},
            "yarn_factor = 2.0 scales rotary positions, and rotary_pct = 0: set rotary_pct above 0, or remove yarn_factor",
        ),
        (
            {"yarn_original_length": 8},
            "yarn_original_length = 8 needs yarn_factor: set it, or remove yarn_original_length",
        ),
        ({"yarn_attention_factor": 2.0}, "yarn_attention_factor = 2.0 needs yarn_factor"),
        ({"yarn_beta_fast": 16.0}, "yarn_beta_fast = 16.0 needs yarn_factor: set it, or remove yarn_beta_fast"),
        ({"yarn_factor": 4.0}, "yarn_factor = 4.0 needs yarn_original_length: set it to the length"),
        ({"yarn_original_length": 0}, "yarn_original_length = 0: must be at least 1"),
        ({"yarn_beta_fast": 1.0}, "yarn_beta_fast = 1.0: must be greater than yarn_beta_slow = 1.0"),
        ({"yarn_beta_slow": 0.0}, "yarn_beta_slow = 0.0: must be greater than 0"),
        ({"yarn_attention_factor": 0.0}, "yarn_attention_factor = 0.0: must be greater than 0"),
        ({"nope_layers": [1]}, r"nope_layers: layer 1 has no attention; allowed are \[0\]"),
        ({"window": 2, "full_layers": [2]}, r"full_layers: layer 2 has no attention; allowed are \[0\]"),
        (
            {"yarn_factor": 2.0, "yarn_original_length": 8, "nope_layers": [0]},
            "yarn_factor = 2.0: nope_layers exempts every layer; remove yarn_factor, or layers of nope_layers",
        ),
        ({"window": 2, "full_layers": [0]}, "window = 2: full_layers exempts every layer; remove window, or layers of"),
    ],
)
def test_wrong_options_are_refused(options, message):
    with pytest.raises(ValueError, match=f"model.mixer_options.attention.{message}"):
        ModelConfig(8, 2, 32, 8, mixers=("attention", "retnet"), mixer_options={"attention": options})
