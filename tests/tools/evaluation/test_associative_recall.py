"""Associative recall in context, on models whose answers are known."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tools.evaluation.associative_recall import associative_recall, recall_rows

IDS = np.arange(5, 105)


def test_rows_repeat_their_pairs_in_another_order() -> None:
    tokens, order = recall_rows(IDS, pairs=8, examples=6)
    first, again = tokens.view(6, 2, 8, 2).unbind(1)
    for row in range(6):
        assert len(first[row].unique()) == 16
        assert (again[row] == first[row][order[row]]).all()
    assert (order != torch.arange(8)).any(1).all()
    assert (recall_rows(IDS, 8, 6)[0] == tokens).all()
    with pytest.raises(ValueError, match="60 pairs need 120 different tokens; the text has 100"):
        recall_rows(IDS, 60, 1)


@pytest.mark.parametrize(("knows", "expected"), [(True, 1.0), (False, 1 / 8)])
def test_recall_is_one_for_a_model_that_copies_and_chance_for_one_that_does_not(knows: bool, expected: float) -> None:
    """Use a model that predicts the token after the last occurrence of its input, or always the first value."""

    def block(tokens: Tensor) -> Tensor:
        same = (tokens[:, :, None] == tokens[:, None, :]).float().tril(-1)
        following = torch.nn.functional.one_hot(tokens.roll(-1, 1), 200).float()
        return same @ following if knows else following[:, :1].expand(-1, tokens.shape[1], -1)

    model: Any = SimpleNamespace(embedding=lambda x: x, blocks=[block], head=lambda x: x)
    loaded: Any = SimpleNamespace(model=model, device=torch.device("cpu"))
    score, error = associative_recall(loaded, IDS, pairs=8, examples=64)
    assert score == pytest.approx(expected)
    assert error == 0
