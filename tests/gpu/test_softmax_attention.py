"""FlashAttention for windows and packed segments, and cuDNN over ranks, on a CUDA device, compared with float32."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from models.config import ModelConfig
from models.mixers.attention import Attention
from models.operators import dot_product as module
from models.operators.dot_product import (
    cudnn_backward,
    cudnn_forward,
    dot_product,
    fixed_length_attention,
    prefers_cudnn,
    supports_flash,
)
from tests.gpu.test_context_parallel import results as layer_results
from tests.models.rank_threads import over_ranks


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


@pytest.fixture
def cudnn(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int, int, bool]]:
    """Return the list of calls of cuDNN: function, queries, keys, is_causal."""
    q = torch.zeros(1, 2, 128, 64, device="cuda", dtype=torch.bfloat16)
    if not prefers_cudnn(q, q, q, True):
        pytest.skip("PyTorch does not prefer cuDNN's attention on this device")
    calls: list[tuple[str, int, int, bool]] = []

    def recorded(name: str, function: Callable[..., Any], first: int) -> Callable[..., Any]:
        def call(*inputs: Any) -> Any:
            q, k = inputs[first : first + 2]
            calls.append((name, q.shape[2], k.shape[2], inputs[-1]))
            return function(*inputs)

        return call

    monkeypatch.setattr(module, "cudnn_forward", recorded("forward", cudnn_forward, 0))
    monkeypatch.setattr(module, "cudnn_backward", recorded("backward", cudnn_backward, 1))
    return calls


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize(("queries", "keys", "is_causal"), [(512, 512, True), (300, 1100, True), (512, 2048, False)])
def test_key_blocks_of_cudnn_equal_float32(
    queries: int, keys: int, is_causal: bool, head_dim: int, dtype: torch.dtype, cudnn: list[tuple[str, int, int, bool]]
) -> None:
    generator = torch.Generator("cuda").manual_seed(0)
    shapes = [(2, n, 4, head_dim) for n in (queries, keys, keys, queries)]
    q, k, v, do = (torch.randn(x, device="cuda", generator=generator).to(dtype).transpose(1, 2) for x in shapes)
    outputs = []
    for kind, function in ((torch.float32, lambda *x: dot_product(*x, None, is_causal)), (dtype, None)):
        inputs = [x.detach().to(kind).requires_grad_() for x in (q, k, v)]
        o = function(*inputs) if function else fixed_length_attention(*inputs, is_causal)
        # The gradient of a part of a tensor has other strides than the output.
        torch.cat([o, torch.zeros_like(o)], 2).backward(torch.cat([do, do], 2).to(kind))
        outputs.append([o.detach(), *(x.grad for x in inputs)])
    for expected, value in zip(*outputs, strict=True):
        assert relative(value, expected) < 2e-2
    earlier = keys - queries if is_causal else keys
    blocks = ([(queries, earlier, False)] if earlier else []) + ([(queries, queries, True)] if is_causal else [])
    assert sorted(cudnn) == sorted((name, *block) for name in ("forward", "backward") for block in blocks)


@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("options", [{}, {"num_kv_heads": 2}, {"head_dim": 128, "num_kv_heads": 1}, {"causal": False}])
def test_attention_over_ranks_by_cudnn_equals_float32(
    options: dict[str, object], count: int, cudnn: list[tuple[str, int, int, bool]], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = ModelConfig(8, 2, 256, 4, mixers=("attention",), mixer_options={"attention": options})
    torch.manual_seed(0)
    length = 1024
    layer = Attention(config, 0, config.options_of("attention")).to("cuda", torch.bfloat16)
    x, weight = torch.randn(2, 2, length, 256, device="cuda").bfloat16()
    exact = layer_results(copy.deepcopy(layer).float(), x.float(), weight.float())
    whole = layer_results(layer, x, weight)
    assert cudnn == []
    copies = [copy.deepcopy(layer) for _ in range(count)]

    def refuse(*_: Any) -> Tensor:
        raise AssertionError("scaled_dot_product_attention was called in place of cuDNN")

    def work(index: int) -> list[Tensor]:
        return layer_results(copies[index], x.chunk(count, 1)[index], weight.chunk(count, 1)[index])

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", refuse)
    parts = list(zip(*over_ranks(count, work), strict=True))
    joined = [torch.cat(pieces, 1) for pieces in parts[:2]] + [sum(pieces) for pieces in parts[2:]]
    for number, (value, reference, expected) in enumerate(zip(joined, whole, exact, strict=True)):
        error, usual = ((t - expected).norm() / expected.norm() for t in (value, reference))
        assert value.isfinite().all(), number
        assert error < max(2e-2, 2 * usual), (number, error.item(), usual.item())
    # A piece of a causal layer is half a shard. The first one has no earlier keys.
    calls_per_pass = 4 * count - 1 if options.get("causal", True) else count
    assert sorted(name for name, *_ in cudnn) == ["backward"] * calls_per_pass + ["forward"] * calls_per_pass
