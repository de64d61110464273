"""Gated linear attention with kernels of flash-linear-attention, and MetaLA, on a CUDA device in 16 bits."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from models.config import ModelConfig
from models.language_model import LanguageModel
from models.operators.gla.gated_linear_attention import gated_linear_attention


def relative(actual: Tensor, expected: Tensor) -> float:
    return ((actual.double() - expected.double()).norm() / expected.double().norm()).item()


@pytest.mark.parametrize(
    ("dtype", "scalar", "decay"),
    [
        (torch.bfloat16, False, "mild"),
        (torch.bfloat16, False, "strong"),
        (torch.bfloat16, False, "-inf"),
        (torch.bfloat16, True, "mild"),
        (torch.bfloat16, True, "strong"),
        (torch.bfloat16, True, "-inf"),
        (torch.bfloat16, True, "fixed"),
        (torch.float16, False, "mild"),
    ],
)
@pytest.mark.parametrize("packed", [False, True])
def test_kernels_equal_the_reference(dtype, packed, scalar, decay):
    """Compare outputs, states and all gradients; packed inputs have an empty segment."""
    pytest.importorskip("fla")
    generator = torch.Generator("cuda").manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, device="cuda", generator=generator)

    batch, length, heads, dim_k, dim_v = (1 if packed else 2), 300, 4, 32, 64
    cu_seqlens = torch.tensor([0, 70, 70, 200, 300], device="cuda") if packed else None
    q, k, v = (
        normal(batch, length, heads, dim_k),
        normal(batch, length, heads, dim_k),
        normal(batch, length, heads, dim_v),
    )
    log_decay = torch.rand(batch, length, heads, 1 if scalar else dim_k, device="cuda", generator=generator)
    log_decay = -log_decay * (40.0 if decay == "strong" else 0.1)
    if decay == "-inf":
        log_decay[:, 5::37] = -torch.inf
    if decay == "fixed":
        log_decay = -torch.tensor([0.0, 0.01, 0.1, 1.0], device="cuda")[:, None].expand(batch, length, heads, 1)
    state = normal(4 if packed else batch, heads, dim_k, dim_v)
    q, k, v = (x.to(dtype) for x in (q, k, v))
    weights = normal(*v.shape), normal(*state.shape)
    results = []
    for exact in (True, False):
        leaves = [x.double() if exact else x.clone() for x in (q, k, v, state)]
        leaves = [x.requires_grad_() for x in leaves]
        decays = log_decay  # the expanded view selects the kernel of fixed decays
        if decay != "fixed":
            decays = (log_decay.double() if exact else log_decay.clone()).requires_grad_()
            leaves.append(decays)
        o, final = gated_linear_attention(
            *leaves[:3], decays, scale=0.2, initial_state=leaves[3], cu_seqlens=cu_seqlens
        )
        loss = (o * weights[0]).sum() + (final * weights[1]).sum()
        results.append((o, final, torch.autograd.grad(loss, leaves)))
    (o, final, gradients), (fast_o, fast_final, fast_gradients) = results
    assert fast_o.dtype == dtype
    assert fast_final.dtype == torch.float32
    assert relative(fast_o, o) < 1e-2
    assert relative(fast_final, final) < 1e-2
    for name, actual, expected in zip(("q", "k", "v", "state", "decay"), fast_gradients, gradients, strict=False):
        assert actual.isfinite().all(), name
        assert relative(actual, expected) < 2e-2, name


@pytest.mark.parametrize("scalar", [False, True])
@pytest.mark.parametrize("length", [1, 7, 100])
def test_inference_kernels_equal_the_reference(scalar, length):
    pytest.importorskip("fla")
    q, k = (torch.randn(2, length, 4, 32, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    v = torch.randn(2, length, 4, 64, device="cuda", dtype=torch.bfloat16)
    log_decay = -torch.rand(2, length, 4, 1 if scalar else 32, device="cuda") * 0.1
    state = torch.randn(2, 4, 32, 64, device="cuda")
    with torch.no_grad():
        fast = gated_linear_attention(q, k, v, log_decay, scale=0.2, initial_state=state)
        expected = gated_linear_attention(q, k, v, log_decay, scale=0.2, initial_state=state, form="recurrent")
    assert relative(fast[0], expected[0]) < 1e-2
    assert relative(fast[1], expected[1]) < 1e-2


def test_metala_gradients_equal_those_on_the_cpu():
    pytest.importorskip("fla")
    config = ModelConfig(vocab_size=512, num_layers=3, hidden_size=128, num_heads=4)
    lm = LanguageModel(config, seed=1).bfloat16()
    tokens, labels = torch.randint(0, 512, (2, 256)), torch.randint(0, 512, (2, 256))
    expected = lm.float()(tokens, labels)
    expected.backward()
    wanted = {name: p.grad.cuda() for name, p in lm.named_parameters()}
    lm.zero_grad()
    lm = lm.to("cuda", torch.bfloat16)
    actual = lm(tokens.cuda(), labels.cuda())
    actual.backward()
    assert abs(actual.item() / expected.item() - 1) < 2e-3
    for name, p in lm.named_parameters():
        assert relative(p.grad, wanted[name]) < 0.1, name


def test_metala_decoding_equals_the_forward_pass():
    pytest.importorskip("fla")
    config = ModelConfig(vocab_size=512, num_layers=3, hidden_size=128, num_heads=4)
    lm = LanguageModel(config, seed=1).to("cuda", torch.bfloat16).eval()
    tokens = torch.randint(0, 512, (2, 120), device="cuda")
    with torch.no_grad():
        expected = lm(tokens)
        logits, state = lm(tokens[:, :100], return_state=True)
        outputs = [logits]
        for t in range(100, 120):
            logits, state = lm(tokens[:, t : t + 1], state=state, return_state=True)
            outputs.append(logits)
    assert relative(torch.cat(outputs, 1), expected) < 2e-2
