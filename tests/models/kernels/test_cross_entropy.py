"""The kernels of the cross entropy against PyTorch, and the whole loss with them."""

from __future__ import annotations

import pytest
import torch

from models.operators import cross_entropy


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("vocab", [7, 48, 129, 5000])
def test_statistics_and_gradient(device: str, vocab: int, with_bias: bool) -> None:
    from models.kernels.cross_entropy import gradient_in_place, row_statistics

    generator = torch.Generator().manual_seed(vocab)
    rows = 5
    logits = (4 * torch.randn(rows, vocab, generator=generator)).to(device)
    logits[1, 3:] = -torch.inf
    logits[2, 2], logits[2, vocab - 2] = 50.0, 50.0  # the first of equals is the best
    bias = torch.randn(vocab, generator=generator).to(device) if with_bias else None
    if bias is not None:
        bias[2] = bias[vocab - 2] = 0.0
    label = torch.tensor([0, 1, vocab - 1, 3, 5], device=device)
    z = logits.double() if bias is None else logits.double() + bias.double()
    largest, best, mass, chosen = row_statistics(logits, bias, label)
    torch.testing.assert_close(largest.double(), z.amax(1))
    assert best.tolist() == z.argmax(1).tolist()
    torch.testing.assert_close(mass.log().double() + largest.double(), z.logsumexp(1))
    torch.testing.assert_close(chosen.double(), z.gather(1, label[:, None])[:, 0])
    weight = torch.linspace(0, 1, rows, device=device)
    there = torch.where(torch.arange(rows, device=device) == 3, -1, label)
    expected = z.softmax(1)
    expected[torch.arange(rows), label] -= (there >= 0).double()
    expected *= weight[:, None].double()
    gradient_in_place(logits, bias, there, mass.log() + largest, weight)
    torch.testing.assert_close(logits.double(), expected, rtol=1e-5, atol=1e-7)


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # -inf less itself, in the interpreter
@pytest.mark.parametrize("vocab", [200, 9000])
def test_equal_logits_and_rows_without_finite_logits(device: str, vocab: int) -> None:
    """Statistics select the first of equal logits at any position. A row of -inf only, as of padding, has a mass of 0."""
    from models.kernels.cross_entropy import row_statistics

    logits = torch.zeros(4, vocab, device=device)
    logits[1, :128] = -1.0
    logits[2, : vocab - 5] = -1.0
    logits[3] = -torch.inf
    largest, best, mass, _ = row_statistics(logits, None, torch.zeros(4, dtype=torch.int64, device=device))
    assert largest.tolist() == [0.0, 0.0, 0.0, -torch.inf]
    assert best is not None
    assert best.tolist() == [0, 128, vocab - 5, 0]
    torch.testing.assert_close(mass, logits.exp().sum(1))


def test_nan_propagates(device: str) -> None:
    from models.kernels.cross_entropy import row_statistics

    logits = torch.zeros(2, 9, device=device)
    logits[1, 4] = torch.nan
    mass = row_statistics(logits, None, torch.zeros(2, dtype=torch.int64, device=device))[2]
    assert mass.isnan().tolist() == [False, True]


@pytest.mark.parametrize("with_bias", [False, True])
def test_loss_with_kernels_equals_loss_without(device: str, monkeypatch: pytest.MonkeyPatch, with_bias: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(11, 16, generator=generator), torch.randn(40, 16, generator=generator)
    bias = torch.randn(40, generator=generator) if with_bias else None
    labels = torch.randint(0, 40, (11,), generator=generator)
    labels[4] = -100
    loss_weight = torch.rand(11, generator=generator)
    results = []
    for kernels in (False, True):
        monkeypatch.setattr(cross_entropy, "is_supported", lambda x, kernels=kernels: kernels)
        leaves = [
            None if x is None else x.to(device).clone().requires_grad_() for x in (hidden, weight, bias, loss_weight)
        ]
        num_correct = torch.zeros((), device=device)
        loss = cross_entropy.cross_entropy_sum(
            leaves[0], leaves[1], labels.to(device), leaves[3], bias=leaves[2], num_correct=num_correct, chunk=4
        )
        (3 * loss).backward()
        results.append([loss.detach(), num_correct, *(x.grad for x in leaves if x is not None)])
    for expected, actual in zip(*results, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)
