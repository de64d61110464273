"""Associative recall in context, on models whose answers are known."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from data.indexed import IndexedWriter
from tools.evaluation import associative_recall as recall
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


def recall_of(knows: Tensor) -> tuple[float, float]:
    """Return the recall of a model that predicts the token after the last occurrence of its input, or the first value.

    knows: [64] bool, whether it copies in a row.
    """

    def hidden_states(tokens: Tensor) -> tuple[Tensor, list[Any]]:
        same = (tokens[:, :, None] == tokens[:, None, :]).float().tril(-1)
        following = torch.nn.functional.one_hot(tokens.roll(-1, 1), 200).float()
        return torch.where(knows[:, None, None], same @ following, following[:, :1]), []

    model: Any = SimpleNamespace(hidden_states=hidden_states, head=lambda x: x)
    loaded: Any = SimpleNamespace(model=model, device=torch.device("cpu"))
    return associative_recall(loaded, IDS, pairs=8, examples=64)


def test_recall_is_one_for_a_model_that_copies_and_chance_for_one_that_does_not() -> None:
    assert recall_of(torch.ones(64, dtype=torch.bool)) == (1.0, 0.0)
    assert recall_of(torch.zeros(64, dtype=torch.bool)) == (1 / 8, 0.0)


def test_standard_error_counts_rows_since_the_queries_of_a_row_depend_on_one_another() -> None:
    score, error = recall_of(torch.arange(64) % 2 == 0)
    assert score == pytest.approx((1 + 1 / 8) / 2)
    assert error == pytest.approx(np.std([1.0, 1 / 8] * 32, ddof=1) / 8)


def test_pairs_are_frequent_tokens_of_the_first_documents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with IndexedWriter(tmp_path / "text", np.dtype("<u2")) as writer:
        for document in ([*range(8)] * 12, [*range(8, 20)], [*range(20, 30)] * 12):
            writer.add_document(np.array(document))
    drawn: list[list[int]] = []
    monkeypatch.setattr(recall, "_TOKENS", 100)  # ends in the second document
    monkeypatch.setattr(recall, "validation_text", lambda _: SimpleNamespace(prefix=tmp_path / "text"))
    monkeypatch.setattr(recall, "associative_recall", lambda _, ids, pairs: drawn.append(ids.tolist()) or (0.5, 0.1))
    added: list[Any] = []
    monkeypatch.setattr(recall, "add_to_run", lambda _, *scores: added.extend(scores))
    loaded: Any = SimpleNamespace(tokenizer=SimpleNamespace(end_of_document_id=0))
    recall.add_recall(loaded)
    assert drawn == [[*range(1, 8)]] * 2
    assert added[0] == {"mqar": {f"MQAR with {pairs} pairs": {"accuracy": 0.5} for pairs in (8, 32)}}
    assert added[1]["mqar"]["MQAR with 8 pairs"] == {"accuracy": {"stderr": 0.1, "chance": 1 / 8}}
