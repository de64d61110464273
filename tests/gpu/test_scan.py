"""Elementwise scan with kernels of flash-linear-attention, and its mixers in 16 bits, on a CUDA device."""

from __future__ import annotations

import pytest
import torch

from models.operators.scan.linear_scan import scan
from tests.models.mixer_cases import assert_close, build, tokens


# Lengths of both kernels, and with a partial chunk.
@pytest.mark.parametrize("length", [1, 100, 128, 1000])
@pytest.mark.parametrize("packed", [False, True])
def test_kernels_equal_the_chunked_form(length: int, packed: bool) -> None:
    pytest.importorskip("fla")
    generator = torch.Generator("cuda").manual_seed(0)
    batch = 1 if packed else 2
    cu_seqlens = torch.tensor([0, 0, length // 3, length], device="cuda") if packed else None
    x, decay = (torch.randn(batch, length, 96, device="cuda", generator=generator) for _ in range(2))
    log_decay = torch.nn.functional.logsigmoid(decay)
    log_decay[:, 5::37] = -200.0
    state = torch.randn(3 if packed else batch, 96, device="cuda", generator=generator)
    results = []
    for form in ("kernel", "chunked"):
        leaves = [t.clone().requires_grad_() for t in (x, log_decay, state)]
        h, final = scan(leaves[0], leaves[1], initial_state=leaves[2], cu_seqlens=cu_seqlens, form=form)
        loss = (h * x.cos()).sum() + final.square().sum()
        results.append([h.detach(), final.detach(), *torch.autograd.grad(loss, leaves)])
    for kernel, reference in zip(*results, strict=True):
        assert_close(kernel, reference, 1e-5)


@pytest.mark.parametrize("name", ["hgrn", "mamba", "mamba2", "qlstm", "rg_lru", "rwkv4", "s5"])
def test_sixteen_bits_forward_and_backward(name: str) -> None:
    """Compare with float32 on the CPU with the same parameters."""
    pytest.importorskip("fla")
    x = tokens(300, batch=2)
    mixer = build((name, {})).bfloat16()
    weight = tokens(300, batch=2).cos()
    gradients = {}
    for device in ("cuda", "cpu"):
        dtype = torch.bfloat16 if device == "cuda" else torch.float32
        mixer = mixer.to(device, dtype)
        mixer.zero_grad()
        y = mixer(x.bfloat16().to(device, dtype))
        (y.float() * weight.to(device)).sum().backward()
        gradients[device] = [y.detach().float().cpu(), *(p.grad.float().cpu() for p in mixer.parameters())]
    for index, (got, expected) in enumerate(zip(gradients["cuda"], gradients["cpu"], strict=True)):
        assert got.isfinite().all()
        assert ((got - expected).norm() / expected.norm()).item() < 0.06, index
