"""GLA kernels with one decay per channel, on a CUDA device in 16 bits, compared with float32."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from models.operators.gla.gated_linear_attention import gated_linear_attention
from models.operators.gla.select_kernel import supports_triton


def relative(actual: Tensor, expected: Tensor) -> float:
    return ((actual.double() - expected.double()).norm() / expected.double().norm()).item()


def inputs(shape: tuple[int, int, int, int, int], kind: str, dtype: torch.dtype) -> list[Tensor]:
    """Return q, k, v, log decay and initial state."""
    batch, length, heads, dim_k, dim_v = shape
    generator = torch.Generator("cuda").manual_seed(0)

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, device="cuda", generator=generator)

    q, k = (normal(batch, length, heads, dim_k).to(dtype) for _ in range(2))
    v = normal(batch, length, heads, dim_v).to(dtype)
    g = -torch.rand(batch, length, heads, dim_k, device="cuda", generator=generator)
    if kind == "single":
        g = torch.where(torch.rand(g.shape, device="cuda", generator=generator) < 0.02, -80.0, g * 0.05)
    elif kind == "later":
        g[:, length // 2 :] *= 40.0
        g *= 0.1
    else:
        g *= {"none": 0.0, "mild": 0.1, "middling": 4.0, "strong": 160.0}[kind]
    return [q, k, v, g, normal(batch, heads, dim_k, dim_v)]


# An empty sequence at the start, one between others and one at the end, one of a single token, one of two chunks.
PACKED = [0, 0, 1, 60, 188, 188, 300, 400, 400]


@pytest.mark.parametrize(
    ("shape", "kind", "dtype"),
    [
        ((2, 300, 2, 64, 128), "none", torch.bfloat16),
        ((2, 300, 2, 64, 128), "middling", torch.bfloat16),
        ((2, 300, 2, 64, 128), "strong", torch.bfloat16),
        ((2, 256, 2, 64, 128), "single", torch.bfloat16),
        ((2, 256, 2, 64, 128), "later", torch.float16),
        ((2, 300, 2, 64, 128), "single", torch.float16),
        ((2, 300, 3, 24, 80), "mild", torch.bfloat16),
        ((2, 300, 3, 16, 32), "single", torch.bfloat16),
        ((2, 300, 2, 128, 96), "later", torch.bfloat16),
        ((2, 300, 2, 128, 128), "strong", torch.bfloat16),
        ((2, 300, 2, 128, 128), "mild", torch.float16),
        # Heads of at most 16 channels, as in Long Range Arena.
        ((2, 300, 16, 4, 8), "mild", torch.bfloat16),
        ((2, 300, 3, 4, 8), "strong", torch.bfloat16),
        ((2, 256, 2, 16, 16), "single", torch.float16),
        ((2, 256, 2, 16, 16), "later", torch.bfloat16),
        ((1, 5000, 2, 4, 8), "mild", torch.bfloat16),
        ((1, 400, 4, 4, 8), "single", torch.bfloat16),
        # Few long sequences, which are split into segments.
        ((1, 5000, 2, 64, 128), "mild", torch.bfloat16),
        ((1, 4096, 2, 64, 128), "later", torch.bfloat16),
        # Packed.
        ((1, 400, 2, 64, 128), "mild", torch.bfloat16),
        ((1, 400, 2, 32, 64), "single", torch.bfloat16),
    ],
)
def test_kernels_equal_the_reference(shape, kind, dtype):
    from models.kernels.gla.gla import gla

    tensors = inputs(shape, kind, dtype)
    cu_seqlens = torch.tensor(PACKED, device="cuda", dtype=torch.int32) if shape[1] == PACKED[-1] else None
    if cu_seqlens is not None:
        tensors[4] = torch.randn(len(PACKED) - 1, *tensors[4].shape[1:], device="cuda")
    weights = torch.randn_like(tensors[2], dtype=torch.float32), torch.randn_like(tensors[4])
    results = []
    for exact in (True, False):
        leaves = [x.detach().float() if exact else x.detach().clone() for x in tensors]
        leaves = [x.requires_grad_() for x in leaves]
        # The kernels clamp log decays at -80.
        g = leaves[3].clamp_min(-80.0) if exact else leaves[3]
        if exact:
            o, final = gated_linear_attention(
                *leaves[:3], g, scale=0.2, initial_state=leaves[4], cu_seqlens=cu_seqlens, form="chunked"
            )
        else:
            o, final = gla(*leaves[:3], g, 0.2, leaves[4], cu_seqlens)
        loss = (o * weights[0]).sum() + (final * weights[1]).sum()
        results.append([o, final, *torch.autograd.grad(loss, leaves)])
    for name, actual, expected in zip(("o", "final", "q", "k", "v", "g", "state"), *reversed(results), strict=True):
        assert actual.isfinite().all(), name
        assert relative(actual, expected) < (1e-2 if name in ("o", "final") else 2e-2), name


def test_gradients_of_the_last_token():
    """Check that strong decays of earlier tokens leave no rounding error in the way of a chunk's last token to its end."""
    from models.kernels.gla.gla import gla

    q, k, v, g, state = inputs((2, 64, 2, 64, 128), "strong", torch.bfloat16)
    k, v = k.requires_grad_(), v.requires_grad_()
    _, final = gla(q, k, v, g, 0.2, state, None)
    weights = torch.randn_like(final)
    dk, dv = torch.autograd.grad((final * weights).sum(), [k, v])
    expected = [
        torch.einsum(f"bhkv,bh{x}->bh{y}", weights, z[:, -1].float()) for x, y, z in (("v", "k", v), ("k", "v", k))
    ]
    for actual, exact in zip((dk, dv), expected, strict=True):
        assert relative(actual[:, -1], exact) < 5e-3


def test_supported_inputs():
    """Check that the kernels support only mild decays per channel, 16 bits and the measured head sizes."""
    q, k, v, g, _ = inputs((1, 100, 2, 64, 128), "mild", torch.bfloat16)
    q.requires_grad_()
    o, _ = gated_linear_attention(q, k, v, g, fits_matmul_form=True)
    assert "GLA" in type(o.grad_fn).__name__
    assert not supports_triton(q, k, v, g[..., :1], fits_matmul_form=True)
    assert not supports_triton(q.float(), k.float(), v.float(), g, fits_matmul_form=True)
    assert not supports_triton(*(x.repeat(1, 1, 1, 2) for x in (q, k, v, g)), fits_matmul_form=True)
    with torch.no_grad():
        assert supports_triton(q, k, v, g, fits_matmul_form=True)
        assert not supports_triton(*(x[:, :16] for x in (q, k, v, g)), fits_matmul_form=True)
