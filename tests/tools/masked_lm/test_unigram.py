"""The unigram baseline against counts by hand."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from data.indexed import IndexedWriter
from tools.pretraining import unigram_baseline as unigram


def write(prefix: Path, *documents: list[int]) -> str:
    with IndexedWriter(prefix, np.dtype(np.uint16)) as writer:
        for document in documents:
            writer.add_document(np.array(document))
    return str(prefix)


def test_special_tokens_do_not_count(tmp_path, monkeypatch):
    tokenizer = SimpleNamespace(vocab_size=5, special_ids=[0])
    train = write(tmp_path / "train", [1, 2, 2, 0], [2, 3, 0], [0, 0])
    validation = write(tmp_path / "valid", [2, 1, 4, 4, 0])
    actual = unigram.unigram_baseline(train, validation, tokenizer)
    assert actual["accuracy"] == 1 / 4
    shares = [3 + 1, 1 + 1, 0 + 1, 0 + 1]  # of tokens 2, 1, 4, 4: counts plus one
    assert actual["loss"] == pytest.approx(-sum(math.log(share / 9) for share in shares) / 4)
    monkeypatch.setattr(unigram, "TOKENS", 4)  # the first document alone: its counts are 1 and 2
    assert unigram.unigram_baseline(train, validation, tokenizer)["loss"] < actual["loss"] + 1


def test_text_without_ordinary_tokens(tmp_path):
    tokenizer = SimpleNamespace(vocab_size=3, special_ids=[0])
    prefix = write(tmp_path / "train", [0, 0])
    assert math.isnan(unigram.unigram_baseline(prefix, prefix, tokenizer)["accuracy"])
