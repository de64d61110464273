"""Both directions of linear attention with decays per channel in one autograd node, against the chunked form in float64."""

from __future__ import annotations

import pytest
import torch

from models.operators.lion.bidirectional_attention import bidirectional_linear_attention as attend
from tests.models.kernels.conftest import apart


@pytest.mark.parametrize(
    ("shape", "bounds"),
    [
        ((2, 70, 2, 5, 3), None),
        ((1, 65, 3, 4, 20), [0, 0, 1, 30, 64, 64, 65]),
        ((3, 1, 1, 2, 2), None),
    ],
)
@pytest.mark.parametrize("of_values", [False, True])
def test_outputs_and_gradients_equal_those_of_the_chunked_form(
    device: str, shape: tuple[int, ...], bounds: list[int] | None, of_values: bool
) -> None:
    from models.kernels.gla.both_directions import both_directions

    if device == "cuda":
        pytest.skip("float32, which the kernels refuse on CUDA; tests/gpu/test_lion_kernels.py runs them in 16 bits")
    batch, length, heads, dim_k, dim_v = shape
    generator = torch.Generator().manual_seed(length)
    q, k = (torch.randn(batch, length, heads, dim_k, generator=generator) for _ in range(2))
    v, dy = (torch.randn(batch, length, heads, dim_v, generator=generator) for _ in range(2))
    decay = -torch.randn(v.shape if of_values else k.shape, generator=generator).exp()
    decay[:, 10:11] = -torch.inf
    cu_seqlens = None if bounds is None else torch.tensor(bounds, dtype=torch.int32)
    results = []
    for dtype in (torch.float32, torch.float64):
        leaves = [x.to(dtype).requires_grad_() for x in (q, k, v, decay)]
        if dtype == torch.float32:
            y = both_directions(*(apart(x) for x in leaves), 0.3, cu_seqlens, of_values)
        else:
            options = {"normalized": False, "cu_seqlens": cu_seqlens, "of_values": of_values, "form": "chunked"}
            y = 0.3 * attend(*leaves, **options)
        gradients = torch.autograd.grad((y * dy.to(dtype)).sum(), leaves)
        results.append([y.detach().double(), *(x.double() for x in gradients)])
    for got, expected in zip(*results, strict=True):
        assert got.isfinite().all()
        assert (got - expected).abs().max() <= 2e-5 * expected.abs().max().clamp_min(1e-3)
