"""Check the tokenizers and vocabularies of translated GPT-NeoX configurations."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

import train
from tests.tools.conversion.test_neox_config import SMALL
from tools import preprocess_data
from tools.conversion.tokenizer import check_same_ids, export_tokenizer
from tools.loading.tokenizer import saved_tokenizer
from tools.neox_config import main


@pytest.mark.parametrize(
    ("multiple", "ranks", "rows"), [(128, 1, 50304), (128, 2, 50432), (128, 4, 50688), (1, 1, 50277)]
)
def test_vocabulary_is_padded_as_in_gpt_neox(multiple: int, ranks: int, rows: int, tmp_path: Path) -> None:
    more = f"tokenizer_type: HFTokenizer\nmake_vocab_size_divisible_by: {multiple}\nmodel_parallel_size: {ranks}\n"
    (tmp_path / "neox.yml").write_text(SMALL + more)
    assert main([str(tmp_path / "neox.yml"), "-o", str(tmp_path / "run.yml")]) == 0
    assert yaml.safe_load((tmp_path / "run.yml").read_text())["model"]["vocab_size"] == rows


def test_gpt2_tokenizer_of_a_config_trains(tmp_path: Path) -> None:
    """Preprocess with GPT-NeoX's options, translate, train, and export the tokenizer that the run saved."""
    write_gpt2(tmp_path)
    (tmp_path / "text.jsonl").write_text('{"text": "the cat sat on the mat <|endoftext|> again"}\n' * 200)
    files = ["--vocab-file", str(tmp_path / "gpt2-vocab.json"), "--merge-file", str(tmp_path / "gpt2-merges.txt")]
    words = ["--input", str(tmp_path / "text.jsonl"), "--tokenizer-type", "GPT2BPETokenizer", *files, "--workers", "1"]
    assert preprocess_data.main([*words, "--append-eod", "--output-prefix", str(tmp_path / "data")]) == 0
    overlay = f"data_path: {tmp_path}/data_text_document\nvocab_file: {files[1]}\nmerge_file: {files[3]}\n"
    (tmp_path / "model.yml").write_text(SMALL.replace("seq_length: 128", "seq_length: 32"))
    (tmp_path / "local.yml").write_text(overlay + f"save: {tmp_path}/run/checkpoints\n")
    run = tmp_path / "run.yml"
    assert main([str(tmp_path / "model.yml"), str(tmp_path / "local.yml"), "-o", str(run)]) == 0
    small = ["schedule.train_steps=2", "evaluation.interval=0", f"run.directory={tmp_path}/run", "run.device=cpu"]
    assert train.main([str(run), *small, "logging.progress_bar=false"]) == 0
    for name in ("gpt2-vocab.json", "gpt2-merges.txt"):
        (tmp_path / name).unlink()
    tokenizer = saved_tokenizer(tmp_path / "run")
    assert tokenizer is not None
    export_tokenizer(tokenizer, tmp_path, causal=True)
    assert check_same_ids(tokenizer, tmp_path, ["the cat <|endoftext|> again"]) > 100
    assert preprocess_data.main([*words[:4], "--merge-file", "m.txt", "--output-prefix", str(tmp_path / "x")]) == 2


def write_gpt2(folder: Path) -> None:
    """Write GPT-2's 256 bytes, three merges and the end of a document."""
    from tokenizers.pre_tokenizers import ByteLevel

    merges = ["t h", "th e", "\u0120 the"]
    entries = [*sorted(ByteLevel.alphabet()), *(merge.replace(" ", "") for merge in merges), "<|endoftext|>"]
    (folder / "gpt2-vocab.json").write_text(json.dumps({entry: number for number, entry in enumerate(entries)}))
    (folder / "gpt2-merges.txt").write_text("\n".join(["#version: 0.2", *merges]) + "\n")
