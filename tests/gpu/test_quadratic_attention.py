"""Kernels of the quadratic form in 16 bits on a CUDA device, in the shapes of generated tasks, compared with float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from models.operators.gla.gated_linear_attention import gated_linear_attention
from models.operators.gla.normalized import linear_attention_with_normalizer, short_attention

WHOLE = {"cu_seqlens": None, "initial_state": None, "return_state": False}


def reference(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None, scale: float, taylor: bool, normalized: bool
) -> Tensor:
    if taylor:
        s = torch.einsum("bihd,bjhd->bhij", q, k) * scale
        a = (1 + s + s**2 / 2).tril()
        return torch.einsum("bhij,bjhe->bihe", a / a.sum(-1, keepdim=True), v)
    log_decay = log_decay.unsqueeze(-1)
    if not normalized:
        return gated_linear_attention(q, k, v, log_decay, scale=scale, form="parallel")[0]
    num, den, _ = linear_attention_with_normalizer(q, k, v, log_decay)
    return num / den


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("kind", "heads", "dim_k", "dim_v"),
    [
        ("taylor", 1, 16, 64),
        ("taylor", 1, 16, 128),
        ("decayed", 2, 128, 64),
        ("decayed", 2, 64, 128),
        ("normalized", 2, 32, 32),
        ("normalized", 2, 64, 64),
        ("normalized", 2, 128, 128),
    ],
)
@pytest.mark.parametrize("length", [256, 300, 512])
def test_quadratic_form_equals_float64(
    kind: str, heads: int, dim_k: int, dim_v: int, length: int, dtype: torch.dtype
) -> None:
    generator = torch.Generator("cuda").manual_seed(0)

    def draw(*size: int) -> Tensor:
        return torch.randn(2, length, heads, *size, device="cuda", generator=generator)

    q, k, v, dy = draw(dim_k), draw(dim_k), draw(dim_v), draw(dim_v)
    if kind == "normalized":
        q, k = q.abs(), k.abs()
    inputs = [x.to(dtype) for x in (q, k, v)]
    if kind != "taylor":
        inputs.append(-torch.rand(2, length, heads, device="cuda", generator=generator) * 0.2)
    settings = {
        "scale": 1.0 if kind == "normalized" else 0.2,
        "taylor": kind == "taylor",
        "normalized": kind != "decayed",
    }
    results = []
    for exact in (True, False):
        leaves = [(x.double() if exact else x).detach().clone().requires_grad_() for x in inputs]
        arguments = leaves if kind != "taylor" else [*leaves, None]
        y = reference(*arguments, **settings) if exact else short_attention(*arguments, **settings, **WHOLE)
        results.append([y, *torch.autograd.grad(y, leaves, dy.to(y.dtype))])
    for name, expected, actual in zip(("y", "dq", "dk", "dv", "d log decay"), *results, strict=False):
        error = ((actual.double() - expected).norm() / expected.norm()).item()
        assert error < 2e-2, f"{name}: {error:.2e}"
