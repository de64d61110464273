"""The embedding's gradient without a sort equals PyTorch's."""

from __future__ import annotations

import pytest
import torch

from models.layers.embedding import look_up
from tests.models.kernels.conftest import apart


@pytest.mark.parametrize(("number", "vocabulary", "size"), [(300, 7, 20), (256, 500, 130), (5, 3, 64)])
def test_gradient_of_repeated_tokens(device: str, number: int, vocabulary: int, size: int) -> None:
    from models.kernels.embedding_backward import look_up_repeated

    generator = torch.Generator().manual_seed(number)
    tokens = torch.randint(vocabulary, (1, 2 * number), generator=generator).to(device)[:, ::2]
    # A run of one token that fills whole tiles.
    tokens[:, 40:200] = 1
    weight, vectors, dy = (
        torch.randn(*shape, generator=generator).to(device)
        for shape in ((vocabulary, size), (1, number, size), (1, number, size))
    )
    leaves = weight.requires_grad_(), vectors.requires_grad_()
    actual, expected = look_up_repeated(tokens, weight, vectors), look_up(tokens, weight, vectors)
    assert torch.equal(actual, expected)
    for x, y in zip(
        torch.autograd.grad(apart(actual), leaves, dy), torch.autograd.grad(expected, leaves, dy), strict=True
    ):
        torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-5)
    assert look_up_repeated(tokens[:, :0], weight, None).shape == (1, 0, size)
