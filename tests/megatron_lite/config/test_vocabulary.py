"""An unset `model.vocab_size` becomes the number of the tokenizer's entries, padded to a multiple of 128."""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest

from data.tokenizer import padded_vocab_size
from megatron_lite.config.files import CONFIGS
from tools.loading.vocab_size import vocabulary_override
from tools.planning.estimate import read_config

DEFAULT = [CONFIGS / "default.yml"]


@pytest.mark.parametrize(("entries", "rows"), [(1, 128), (128, 128), (129, 256), (50277, 50304), (30522, 30592)])
def test_padding(entries, rows):
    assert padded_vocab_size(entries) == rows


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ((), []),
        (("model.vocab_size=null",), ["model.vocab_size=4096"]),
        (("model.vocab_size=null", "data.tokenizer.vocab_size=4000"), ["model.vocab_size=4096"]),
        (("model.vocab_size=null", "data.tokenizer={type: bytes}"), ["model.vocab_size=384"]),
        (("model.vocab_size=null", "data.tokenizer={vocab_size: null}"), ["model.vocab_size=4096"]),
        (("model.vocab_size=null", "model=3"), []),
    ],
)
def test_unset_vocab_size_is_derived_from_the_tokenizer(overrides, expected):
    assert vocabulary_override(DEFAULT, overrides) == expected


def test_the_mask_token_has_a_row_where_the_vocabulary_fills_its_rows(monkeypatch):
    full = SimpleNamespace(vocab_size=384, mask_id=384)
    monkeypatch.setattr("tools.loading.vocab_size.load_tokenizer", lambda kind, path: full)
    words = ["model.vocab_size=null", "data.tokenizer={type: hf, path: t.json}"]
    assert vocabulary_override(DEFAULT, words) == ["model.vocab_size=384"]
    assert vocabulary_override(DEFAULT, [*words, "data.objective=masked"]) == ["model.vocab_size=512"]


def test_plan_derives_an_unset_vocab_size():
    words = [str(DEFAULT[0]), "model.vocab_size=null", "data.tokenizer={type: bytes}"]
    assert read_config(words, 1).model.vocab_size == 384


@pytest.mark.parametrize(
    "key",
    [
        "tokenizer=3",
        "tokenizer.nosuch=3",
        "tokenizer.vocab_size=abc",
        "tokenizer.path=5",
        "tokenizer.type=5",
        "images.nosuch=1",
        "images.padding=-1",
        "images.train=null",
        "images.train=[]",
    ],
)
def test_invalid_data_is_reported_without_the_size_that_it_would_give(key, capsys):
    import train

    config = CONFIGS / "cifar10_lion_s.yml" if "images" in key else DEFAULT[0]
    assert train.main([str(config), "--dry-run", "model.vocab_size=null", f"data.{key}"]) == 2
    start = re.escape(f"error: The configuration has a problem:\n  - data.{key.partition('=')[0]} ")
    assert re.fullmatch(rf"{start}[^\n]*\n", capsys.readouterr().err)


def test_missing_tokenizer_file_is_reported(capsys):
    import train

    words = ["model.vocab_size=null", "data.tokenizer={type: hf, path: nowhere.json}"]
    assert train.main(words) == 2
    assert "model.vocab_size is missing, and tokenizer or images do not give it: " in capsys.readouterr().err
    with pytest.raises(
        FileNotFoundError, match=r"nowhere\.json does not exist: .*tools\.train_tokenizer; make data-pile-sample"
    ):
        vocabulary_override(DEFAULT, words)
