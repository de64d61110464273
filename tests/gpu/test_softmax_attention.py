"""FlashAttention for windows and packed segments on a CUDA device, compared with masks in float32."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from models.config import ModelConfig
from models.mixers.attention import Attention
from models.operators.dot_product import dot_product, supports_flash


def relative(x: Tensor, expected: Tensor) -> float:
    """Return the largest error divided by the largest expected value, or by 1 if that is greater: gradients can be zero."""
    return float((x.float() - expected).abs().max() / expected.abs().max().clamp(min=1))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("queries", "window"), [(700, 100), (700, 1), (300, 513)])
def test_window_equals_a_mask_in_float32(queries: int, window: int, dtype: torch.dtype) -> None:
    generator = torch.Generator("cuda").manual_seed(0)
    shapes = [(2, 4, n, 64) for n in (queries, 700, 700, queries)]
    q, k, v, dy = (torch.randn(shape, device="cuda", generator=generator).to(dtype) for shape in shapes)
    assert supports_flash(q)
    results = []
    for kind in (torch.float32, dtype):
        inputs = [x.to(kind).requires_grad_() for x in (q, k, v)]
        o = dot_product(*inputs, None, True, window)
        o.backward(dy.to(kind))
        results.append([o.detach(), *(x.grad for x in inputs)])
    for expected, x in zip(*results, strict=True):
        assert relative(x, expected) < 2e-2


@pytest.mark.parametrize("options", [{"num_kv_heads": 2}, {"window": 50}, {"causal": False}])
def test_packed_segments_equal_padded_rows_in_float32(options: dict[str, object]) -> None:
    config = ModelConfig(8, 2, 256, 4, mixers=("attention",), mixer_options={"attention": options})
    torch.manual_seed(0)
    layer = Attention(config, 0, config.options_of("attention")).cuda()
    x, cu_seqlens = torch.randn(1, 600, 256, device="cuda"), torch.tensor([0, 100, 100, 107, 600, 600], device="cuda")
    results = []
    for dtype in (torch.float32, torch.bfloat16):
        layer.to(dtype).zero_grad()
        y = layer(x.to(dtype), cu_seqlens=cu_seqlens)
        y.square().sum().backward()
        results.append([y.detach(), *(p.grad.clone() for p in layer.parameters())])
    for expected, value in zip(*results, strict=True):
        assert relative(value, expected) < 5e-2
