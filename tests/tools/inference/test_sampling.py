"""Sampling against a naive implementation, row by row and token by token."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tools.inference.sampling import check_sampling, keep_likely, next_tokens


def naive_kept(logits: list[float], top_k: int, top_p: float) -> set[int]:
    """Ids that may be drawn, by walking down the list of probabilities."""
    order = sorted(range(len(logits)), key=lambda i: (-logits[i], i))
    if top_k > 0:
        order = order[:top_k]
    weights = [float(torch.tensor(logits[i], dtype=torch.float64).exp()) for i in order]
    total = sum(weights)
    kept, reached = set(), 0.0
    for i, weight in zip(order, weights, strict=True):
        if kept and top_p < 1 and reached >= top_p - 1e-12:
            break
        kept.add(i)
        reached += weight / total
    return kept


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    logits=st.lists(st.integers(-40, 40), min_size=1, max_size=12),
    top_k=st.integers(0, 13),
    top_p=st.sampled_from([0.01, 0.13, 0.37, 0.5, 0.77, 0.93, 0.999, 1.0]),
)
def test_keep_likely_equals_a_plain_loop(logits: list[int], top_k: int, top_p: float) -> None:
    # Tenths keep cumulative sums away from the border values by more than rounding does.
    values = [x / 10 + 0.0137 * i for i, x in enumerate(logits)]
    kept = keep_likely(torch.tensor([values, values], dtype=torch.float64), top_k=top_k, top_p=top_p)
    expected = naive_kept(values, top_k, top_p)
    for row in kept:
        assert {i for i, x in enumerate(row.tolist()) if x != -float("inf")} == expected
    assert all(row[i] == values[i] for row in kept for i in expected)


def test_ties_stay_by_smaller_id() -> None:
    kept = keep_likely(torch.zeros(1, 4), top_k=2)
    assert kept[0].tolist() == [0.0, 0.0, -float("inf"), -float("inf")]
    # Two of four reach one half exactly: no third.
    assert keep_likely(torch.zeros(1, 4), top_p=0.5).isfinite().tolist() == [[True, True, False, False]]


def test_top_p_is_a_share_of_the_top_k() -> None:
    assert keep_likely(torch.zeros(1, 4), top_k=2, top_p=0.4).isfinite().tolist() == [[True, False, False, False]]


def draws(logits: Tensor, count: int, **arguments: float) -> Tensor:
    generator = torch.Generator().manual_seed(5)
    ids = [next_tokens(logits[None], [generator], **arguments) for _ in range(count)]
    return torch.bincount(torch.cat(ids), minlength=len(logits)) / count


def test_frequencies_follow_the_distribution() -> None:
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0, -8.0])
    torch.testing.assert_close(draws(logits, 4000), logits.softmax(0), atol=0.03, rtol=0)
    torch.testing.assert_close(draws(logits, 4000, temperature=2.0), (logits / 2).softmax(0), atol=0.03, rtol=0)
    two = draws(logits, 4000, top_k=2)
    assert two[2:].sum() == 0
    torch.testing.assert_close(two[:2], logits[:2].softmax(0), atol=0.03, rtol=0)


def test_top_p_counts_in_the_tempered_distribution() -> None:
    logits = torch.tensor([2.0, 1.0, 0.0])  # 0.67, 0.24, 0.09; at temperature 3 0.45, 0.32, 0.23
    kept = draws(logits, 2000, temperature=3.0, top_p=0.66)
    torch.testing.assert_close(kept[:2], (logits[:2] / 3).softmax(0), atol=0.03, rtol=0)
    assert kept[2] == 0


def test_sixteen_bits_are_drawn_from_in_float32() -> None:
    logits = torch.randn(400, generator=torch.Generator().manual_seed(2)).bfloat16()
    torch.testing.assert_close(draws(logits, 300, temperature=0.7), draws(logits.float(), 300, temperature=0.7))


def streams(rows: list[int]) -> list[torch.Generator]:
    return [torch.Generator().manual_seed(100 + row) for row in rows]


def test_temperature_zero_is_the_most_likely() -> None:
    logits = torch.randn(7, 50, generator=torch.Generator().manual_seed(0))
    assert torch.equal(next_tokens(logits, streams([0] * len(logits)), temperature=0.0), logits.argmax(-1))


@pytest.mark.parametrize("temperature", [1e-20, 1e-40, 5e-324])
def test_temperatures_down_to_zero_are_drawn_at(temperature: float) -> None:
    logits = torch.tensor([[3.0, 50.0, -1e4], [0.0, -torch.inf, -8.0]])
    assert next_tokens(logits, streams([0, 1]), temperature=temperature).tolist() == [1, 0]
    assert next_tokens(logits, streams([0, 1]), temperature=temperature, top_k=2, top_p=0.9).tolist() == [1, 0]


def test_each_row_uses_its_own_generator() -> None:
    logits = torch.randn(3, 40, generator=torch.Generator().manual_seed(1))
    together = next_tokens(logits, streams([0, 1, 2]))
    alone = next_tokens(logits[1:2], streams([1]))
    assert together[1] == alone[0]


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p", "named"),
    [
        (-0.1, 0, 1.0, "temperature = -0.1"),
        (float("nan"), 0, 1.0, "temperature = nan"),
        (1.0, 0, 1.1, "top_p = 1.1"),
        (1.0, -1, 1.0, "top_k = -1"),
        (1.0, 0, 0.0, "top_p = 0.0"),
    ],
)
def test_values_out_of_range(temperature: float, top_k: int, top_p: float, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        check_sampling(temperature, top_k, top_p)
