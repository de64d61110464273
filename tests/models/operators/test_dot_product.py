"""Attention of fixed lengths in blocks of keys that are merged by their logsumexp, with plain PyTorch in place of cuDNN."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from models.operators import dot_product as module
from models.operators.dot_product import dot_product, fixed_length_attention
from tests.models.mixer_cases import assert_close, build, tokens
from tests.models.operators.test_context_parallel import compare
from tests.models.rank_threads import over_ranks

Shapes = list[tuple[int, int, bool]]


def logits(q: Tensor, k: Tensor, is_causal: bool) -> Tensor:
    scores = q @ k.mT * q.shape[-1] ** -0.5
    if not is_causal:
        return scores
    assert q.shape == k.shape, "the causal mask of cuDNN needs as many queries as keys"
    return scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -torch.inf)


@pytest.fixture(params=[True, False], ids=["lse of four dimensions", "lse of three dimensions"])
def blocks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Shapes:
    """Replace the functions of cuDNN by formulas. Return the list of computed blocks: queries, keys, is_causal."""
    computed: Shapes = []
    keepdim = request.param

    def forward(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> tuple[Tensor, Tensor]:
        computed.append((q.shape[2], k.shape[2], is_causal))
        scores = logits(q, k, is_causal)
        return scores.softmax(-1) @ v, scores.logsumexp(-1, keepdim=keepdim)

    def backward(
        do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, is_causal: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        assert do.stride() == o.stride()
        assert lse.dim() == 3 + keepdim
        scale = q.shape[-1] ** -0.5
        p = (logits(q, k, is_causal) - lse.view(*q.shape[:3], 1)).exp()
        ds = p * (do @ v.mT - (do * o).sum(-1, keepdim=True))
        return ds @ k * scale, ds.mT @ q * scale, p.mT @ do

    monkeypatch.setattr(module, "cudnn_forward", forward)
    monkeypatch.setattr(module, "cudnn_backward", backward)
    monkeypatch.setattr(module, "prefers_cudnn", lambda *_: True)
    return computed


@pytest.mark.parametrize(
    ("queries", "keys", "is_causal", "expected"),
    [
        (6, 6, True, [(6, 6, True)]),
        (6, 20, True, [(6, 14, False), (6, 6, True)]),
        (1, 9, True, [(1, 8, False), (1, 1, True)]),
        (6, 20, False, [(6, 20, False)]),
    ],
)
@pytest.mark.parametrize("size", [1.0, 30.0])
def test_merged_blocks_equal_one_softmax(
    queries: int, keys: int, is_causal: bool, expected: Shapes, size: float, blocks: Shapes
) -> None:
    """Outputs and gradients, also if one block has nearly all of the probability."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(2, n, 3, 8) for n in (queries, keys, keys, queries)]
    inputs = [torch.randn(shape, generator=generator, dtype=torch.float64).transpose(1, 2) for shape in shapes]
    q, k, v = (x.clone().requires_grad_() for x in inputs[:3])
    weight = inputs[3]
    results = []
    for function in (
        lambda: dot_product(size * q, k, v, None, is_causal),
        lambda: fixed_length_attention(size * q, k, v, is_causal),
    ):
        o = function()
        results.append([o.detach(), *torch.autograd.grad((o * weight).sum(), (q, k, v))])
    assert blocks == expected
    for reference, result in zip(*results, strict=True):
        assert_close(result, reference, 1e-12)


@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("options", [{}, {"num_kv_heads": 2}, {"causal": False}], ids=str)
def test_local_shards_in_blocks_equal_the_whole(options: dict[str, Any], count: int, blocks: Shapes) -> None:
    x = tokens(8 * count, batch=2, dtype=torch.float64)
    compare(build(("attention", options), torch.float64), x, count, 1e-9)
    if options.get("causal", True):
        # Half a shard per piece: its own keys, and the keys before it.
        expected = [(4, 4, True)] * 2 * count + [(4, 4 * piece, False) for piece in range(1, 2 * count)]
    else:
        expected = [(8, 8 * count, False)] * count
    assert sorted(blocks) == sorted(expected)


def test_odd_shards_in_blocks_equal_the_whole(blocks: Shapes) -> None:
    compare(build(("attention", {}), torch.float64), tokens(15, dtype=torch.float64), 3, 1e-9)
    assert sorted(blocks) == sorted([(5, 5, True)] * 3 + [(5, 5, False), (5, 10, False)])


def test_changing_lengths_masks_and_other_functions_make_no_plans(blocks: Shapes) -> None:
    """Packed sequences have other lengths in every batch. Masks, windows and dropout are not those of plain blocks."""
    x = tokens(16, dtype=torch.float64)
    mask = torch.arange(16)[None] >= 3
    cases: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({}, {"cu_seqlens": torch.tensor([0, 5, 16])}),
        ({}, {"mask": mask}),
        ({"window": 5}, {}),
    ]
    for options, context in cases:
        compare(build(("attention", options), torch.float64), x, 2, 1e-9, **context)
    mixer = build(("attention", {}), torch.float64)
    mixer.dot_product = lambda q, k, v, *more: F.dropout(dot_product(q, k, v, *more))
    over_ranks(2, lambda index: mixer(x.chunk(2, 1)[index]))
    assert blocks == []
