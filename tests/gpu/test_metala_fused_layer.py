"""MetaLA's fused layer on a CUDA device in 16 bits, compared with gate, recurrence and epilogue in float32."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from models.operators.gla.gated_linear_attention import gated_linear_attention
from models.operators.metala import decay_and_key_reference, metala_epilogue
from tests.gpu.test_gla_kernels import PACKED


@pytest.mark.parametrize(
    ("shape", "kind", "dtype"),
    [
        ((2, 256, 2, 64, 128), "start", torch.bfloat16),
        ((2, 300, 2, 64, 128), "start", torch.float16),
        ((2, 300, 3, 24, 80), "start", torch.bfloat16),
        ((2, 300, 2, 128, 128), "start", torch.bfloat16),
        ((2, 300, 2, 128, 128), "strong", torch.bfloat16),
        ((1, 400, 2, 128, 128), "later", torch.bfloat16),
        ((2, 300, 2, 64, 128), "strong", torch.bfloat16),
        ((2, 300, 2, 64, 128), "later", torch.bfloat16),
        ((2, 300, 16, 4, 8), "start", torch.bfloat16),
        ((2, 300, 12, 4, 8), "strong", torch.float16),
        ((1, 400, 16, 8, 16), "later", torch.bfloat16),
        ((1, 4096, 2, 64, 128), "start", torch.bfloat16),
        ((1, 400, 2, 64, 128), "later", torch.bfloat16),
    ],
)
def test_fused_layer_equals_its_three_operators(shape, kind, dtype):
    from models.kernels.gla.gla import gla
    from models.kernels.metala import decay_and_key, metala_core

    batch, length, heads, dim_k, dim_v = shape
    generator = torch.Generator("cuda").manual_seed(0)

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, device="cuda", generator=generator)

    cu_seqlens = torch.tensor(PACKED, device="cuda", dtype=torch.int32) if length == PACKED[-1] else None
    sequences = batch if cu_seqlens is None else len(PACKED) - 1
    a = normal(batch, length, heads, dim_k)
    if kind == "strong":
        a *= 300.0
    elif kind == "later":
        a[:, length // 2 :] -= 60.0
    q, v, weight = normal(*a.shape), normal(batch, length, heads, dim_v), 0.3 * normal(heads * dim_k)
    gate, initial = normal(batch, length, heads * dim_v), normal(sequences, heads, dim_k, dim_v)
    inputs = [*(x.to(dtype) for x in (q, a, v, weight, gate)), initial]
    d_y, d_final = normal(*gate.shape), normal(*initial.shape)
    results = []
    for form in ("float32", "three steps", "one step"):
        leaves = [(x.float() if form == "float32" else x).detach().clone().requires_grad_() for x in inputs]
        q, a, v, weight, gate, initial = leaves
        if form == "float32":
            g, k = decay_and_key_reference(a)
            how = {"scale": 0.2, "initial_state": initial, "cu_seqlens": cu_seqlens, "form": "chunked"}
            o, final = gated_linear_attention(q, k, v, g, **how)
            y = metala_epilogue(o, q, k, v, weight, gate, form="reference")
        elif form == "three steps":
            g, k = decay_and_key(a)
            o, final = gla(q, k, v, g, 0.2, initial, cu_seqlens)
            y = metala_epilogue(o, q, k, v, weight, gate)
        else:
            y, final = metala_core(q, a, v, weight, gate, 0.2, initial, cu_seqlens)
        loss = (y * d_y).sum() + (final * d_final).sum()
        results.append([y, final, *torch.autograd.grad(loss, leaves)])
    names = "y", "final", "q", "a", "v", "weight", "gate", "state"
    for name, expected, three, one in zip(names, *results, strict=True):
        assert one.isfinite().all(), name
        errors = [((x.double() - expected.double()).norm() / expected.double().norm()).item() for x in (one, three)]
        # With strong decays, sums cancel in 16 bits in either form.
        assert errors[0] < max(8e-3, 1.1 * errors[1]), (name, errors)
