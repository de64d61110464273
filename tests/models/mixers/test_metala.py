"""The MetaLA mixer: golden values, presets and ablations, padding, packing, decoding, precision."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from models.config import ModelConfig
from models.mixers.metala import MetaLA, MetaLAOptions

from .golden.make_metala import VARIANTS

NAMES = {
    "conv": "conv.weight",
    "q": "q_proj.weight",
    "a": "a_proj.weight",
    "k": "k_proj.weight",
    "v": "v_proj.weight",
    "g": "gate_proj.weight",
    "g_bias": "gate_proj.bias",
    "o": "out_proj.weight",
    "aug": "aug_weight",
}


def mixer(size: int = 32, heads: int = 4, dtype: torch.dtype = torch.float64, **options) -> MetaLA:
    config = ModelConfig(vocab_size=8, num_layers=2, hidden_size=size, num_heads=heads)
    layer = MetaLA(config, 0, MetaLAOptions(**options)).to(dtype)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.4)
    return layer


def load(layer: MetaLA, values) -> None:
    state = {}
    for name, target in NAMES.items():
        if target in layer.state_dict() and f"w_{name}" in values:
            weight = torch.from_numpy(values[f"w_{name}"])
            state[target] = weight[:, -layer.options.conv_kernel :] if name == "conv" else weight
    layer.load_state_dict(state)


@pytest.mark.parametrize("variant", VARIANTS)
def test_golden_values(variant):
    values = np.load(Path(__file__).parent / "golden" / "metala.npz")
    layer = mixer(12, 3, **VARIANTS[variant])
    load(layer, values)
    y, state = layer(torch.from_numpy(values["x"]), return_state=True)
    torch.testing.assert_close(y, torch.from_numpy(values[f"y_{variant}"]), rtol=0, atol=1e-10)
    torch.testing.assert_close(state["recurrent"], torch.from_numpy(values[f"state_{variant}"]), rtol=0, atol=1e-10)


@pytest.mark.parametrize(
    ("variant", "options"),
    [("released", {}), ("paper", {"preset": "paper"}), ("released_no_selfaug", {"self_augmentation": False})],
)
def test_shared_golden_values(shared_golden, variant, options):
    values = np.load(shared_golden / "metala_layer.npz")
    layer = mixer(32, 4, **options)
    load(layer, values)
    y, state = layer(torch.from_numpy(values["x"]), return_state=True)
    torch.testing.assert_close(y, torch.from_numpy(values[f"y_{variant}"]), rtol=0, atol=1e-10)
    if f"state_{variant}" in values:
        expected = torch.from_numpy(values[f"state_{variant}"])
        torch.testing.assert_close(state["recurrent"], expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize(("size", "heads", "kernel"), [(32, 4, 4), (64, 2, 2)])
def test_parameter_count(size, heads, kernel):
    """4 d^2 + d bias + d / 2 augmentation + kernel d convolution."""
    layer = mixer(size, heads, conv_kernel=kernel)
    assert sum(p.numel() for p in layer.parameters()) == 4 * size**2 + size + size // 2 + kernel * size


def test_initial_values():
    config = ModelConfig(vocab_size=8, num_layers=2, hidden_size=256, num_heads=4)
    layer = MetaLA(config, 0, MetaLAOptions())
    assert torch.equal(layer.aug_weight, torch.zeros(128))
    assert torch.equal(layer.gate_proj.bias, torch.zeros(256))
    assert layer.conv.weight.abs().max() <= 0.5
    assert abs(layer.conv.weight.std().item() - 1 / 12**0.5) < 0.02


@pytest.mark.parametrize("options", VARIANTS.values(), ids=VARIANTS)
def test_decode_equals_forward(options):
    layer = mixer(**options)
    x = torch.randn(2, 20, 32, dtype=torch.float64)
    expected = layer(x)
    y, state = layer(x[:, :13], return_state=True)
    outputs = [y]
    for t in range(13, 20):
        y, state = layer(x[:, t : t + 1], state=state, return_state=True)
        outputs.append(y)
    torch.testing.assert_close(torch.cat(outputs, 1), expected, rtol=0, atol=1e-10)


def test_decode_without_prefill_equals_forward():
    layer = mixer()
    x = torch.randn(2, 6, 32, dtype=torch.float64)
    outputs, state = [], None
    for t in range(6):
        y, state = layer(x[:, t : t + 1], state=state, return_state=True)
        outputs.append(y)
    torch.testing.assert_close(torch.cat(outputs, 1), layer(x), rtol=0, atol=1e-10)


def padded(x: Tensor, left: list[int], right: list[int]) -> tuple[Tensor, Tensor]:
    """Return rows of x with random padding on both sides, and their mask. All rows have one length."""
    length = x.shape[1] + max(a + b for a, b in zip(left, right, strict=True))
    rows, mask = torch.randn(len(x), length, x.shape[2], dtype=x.dtype) * 100, torch.zeros(len(x), length)
    for i, a in enumerate(left):
        rows[i, a : a + x.shape[1]] = x[i]
        mask[i, a : a + x.shape[1]] = 1
    return rows, mask.bool()


@pytest.mark.parametrize(("left", "right"), [([3, 0], [0, 3]), ([5, 5], [0, 0]), ([0, 0], [2, 2]), ([1, 2], [4, 3])])
def test_padding_changes_no_real_token(left, right):
    """Compare outputs and states of two consecutive padded calls with one call without padding."""
    layer = mixer()
    x = torch.randn(2, 18, 32, dtype=torch.float64)
    expected = layer(x)
    rows, mask = padded(x[:, :11], left, right)
    y, state = layer(rows, mask=mask, return_state=True)
    torch.testing.assert_close(y[mask].view(2, 11, 32), expected[:, :11], rtol=0, atol=1e-10)
    rows, mask = padded(x[:, 11:], right, left)
    y, state = layer(rows, mask=mask, state=state, return_state=True)
    torch.testing.assert_close(y[mask].view(2, 7, 32), expected[:, 11:], rtol=0, atol=1e-10)
    _, expected_state = layer(x, return_state=True)
    torch.testing.assert_close(state, expected_state, rtol=0, atol=1e-10)


def test_row_of_padding_keeps_its_state():
    layer = mixer()
    x = torch.randn(2, 9, 32, dtype=torch.float64)
    _, state = layer(x, return_state=True)
    mask = torch.tensor([[True] * 4, [False] * 4])
    _, after = layer(torch.randn(2, 4, 32, dtype=torch.float64), mask=mask, state=state, return_state=True)
    for name in state:
        assert torch.equal(after[name][1], state[name][1])
        assert not torch.equal(after[name][0], state[name][0])


def test_padding_has_no_gradient_and_adds_none():
    layer = mixer()
    x = torch.randn(2, 8, 32, dtype=torch.float64)
    layer(x).square().sum().backward()
    expected = {name: p.grad.clone() for name, p in layer.named_parameters()}
    layer.zero_grad()
    rows, mask = padded(x, [4, 0], [0, 4])
    rows.requires_grad_()
    layer(rows, mask=mask)[mask].square().sum().backward()
    for name, p in layer.named_parameters():
        torch.testing.assert_close(p.grad, expected[name], rtol=1e-10, atol=1e-10)
    assert torch.equal(rows.grad[~mask], torch.zeros_like(rows.grad[~mask]))


def test_packed_segments_equal_runs_apart():
    """Test segments shorter than the kernel, and empty ones. The next packed call continues each state."""
    layer = mixer()
    bounds = [0, 7, 7, 9, 10, 30]
    x = torch.randn(1, 30, 32, dtype=torch.float64)
    y, state = layer(x, cu_seqlens=torch.tensor(bounds), return_state=True)
    more = torch.randn(1, 5, 32, dtype=torch.float64)
    z, _ = layer(more, cu_seqlens=torch.arange(6), state=state, return_state=True)
    for i, (a, b) in enumerate(pairwise(bounds)):
        together = torch.cat([x[:, a:b], more[:, i : i + 1]], 1)
        apart = layer(together)
        torch.testing.assert_close(torch.cat([y[:, a:b], z[:, i : i + 1]], 1), apart, rtol=0, atol=1e-10)


def test_head_count_follows_from_weight_shapes():
    """Cut a layer to half its heads: it computes its half of the sum over heads."""
    whole = mixer()
    x = torch.randn(2, 10, 32, dtype=torch.float64)
    total = 0
    for part in range(2):
        cut = mixer()
        cut.load_state_dict(whole.state_dict())
        for name, spec in MetaLA.tensor_parallel_plan.items():
            target = getattr(cut, name)
            if spec == "column" and target is not None:
                target.weight.data = target.weight.chunk(2, 0)[part]
                if target.bias is not None:
                    target.bias.data = target.bias.chunk(2, 0)[part]
            elif spec == "row":
                target.weight.data = target.weight.chunk(2, 1)[part]
            elif spec == "heads" and target is not None:
                target.data = target.chunk(2, 0)[part]
        total = total + cut(x)
    torch.testing.assert_close(total, whole(x), rtol=0, atol=1e-10)


def test_bfloat16_keys_are_computed_in_float32():
    """k = -expm1(g) in float32: 1 - exp(g) in bfloat16 is wrong by 3 % and more."""
    layer = mixer(64, 2).float()
    x = torch.randn(2, 50, 64)
    expected = layer(x)
    actual = layer.bfloat16()(x.bfloat16()).float()
    assert ((actual - expected).norm() / expected.norm()).item() < 2e-2


def test_small_outputs_are_accurate():
    """Subtract the 1/2 of the sigmoid at zero augmentation exactly, so that a float32 layer keeps its precision."""
    layer = mixer()
    with torch.no_grad():
        layer.aug_weight.zero_()
        layer.v_proj.weight.mul_(1e-2)
    x = torch.randn(2, 40, 32, dtype=torch.float64)
    expected = layer(x)
    actual = layer.float()(x.float())
    assert ((actual - expected).norm() / expected.norm()).item() < 2e-6


def test_gradcheck_of_the_layer():
    layer = mixer(8, 2)
    x = torch.randn(1, 6, 8, dtype=torch.float64, requires_grad=True)
    parameters = dict(layer.named_parameters())

    def function(x, *values):
        return torch.func.functional_call(layer, dict(zip(parameters, values, strict=True)), (x,))

    assert torch.autograd.gradcheck(function, (x, *parameters.values()), atol=1e-7)


def test_wrong_options_are_refused():
    with pytest.raises(ValueError, match=r"model\.mixer_options\.metala\.conv_kernel = 0: must be at least 1"):
        MetaLAOptions(conv_kernel=0)
    with pytest.raises(ValueError, match=r"metala\.expand_k = nan: must be greater than 0"):
        MetaLAOptions(expand_k=float("nan"))
