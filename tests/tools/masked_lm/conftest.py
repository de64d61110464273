"""A masked model with a checkpoint, a WordPiece vocabulary and token files, untrained."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.tools.conversion.conftest import WORDS, write_run
from tools.preprocess_data import main as preprocess

VOCABULARY = list(dict.fromkeys(WORDS.split(" ")))


@pytest.fixture(scope="session")
def masked_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("masked")
    vocabulary = root / "vocab.txt"
    vocabulary.write_text("\n".join(VOCABULARY) + "\n")
    draw = random.Random(0)
    text = root / "text.jsonl"
    lines = [" ".join(draw.choices(["the", "a", "cat", "dog", "sat", "on", "mat"], k=40)) for _ in range(30)]
    text.write_text("".join(f'{{"text": "{line}"}}\n' for line in lines))
    prefix = root / "text"
    kind = ["--tokenizer-type", "wordpiece", "--vocab-file", str(vocabulary), "--append-eod"]
    assert preprocess(["--input", str(text), "--output-prefix", str(prefix), *kind]) == 0
    write_run(
        root / "run",
        [
            "data.corpus=null",
            f"data.train={prefix}_text_document",
            f"data.validation={prefix}_text_document",
            "data.tokenizer.type=wordpiece",
            f"data.tokenizer.path={vocabulary}",
            "model.head=mlm",
            "model.num_layers=1",
            "model.vocab_size=128",
            "batch.sequence_length=16",
        ],
        ["configs/model/lion_bidirectional_tiny.yml"],
    )
    return root / "run"
