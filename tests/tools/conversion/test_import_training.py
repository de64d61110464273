"""Check the configuration, shards and positions of imports, and training that starts from them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import train
from data.tokenizer import load_tokenizer
from data.train_sentencepiece import train_sentencepiece
from megatron_lite.checkpoint.reader import read_weights
from megatron_lite.config.loader import load_config
from models.config import ModelConfig
from tests.parity.launch import train_in_turn
from tests.tools.conversion.conftest import write_run
from tests.tools.conversion.test_import import error_of, tiny_llama, translated
from tests.tools.conversion.test_translate import SHAPE
from tools.conversion.logit_parity import load_export
from tools.convert_hf import main
from tools.loading.model import load_model
from tools.loading.tokenizer import save_tokenizer


def test_import_writes_a_configuration_for_training(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Find the tokenizer in each kind of file, limit the length to 2048, and print no train command over the tolerance."""
    torch.manual_seed(0)
    tiny_llama(vocab_size=300, max_position_embeddings=4096).save_pretrained(tmp_path / "llama")
    texts = ["some words of a text that go on " * 20, "and others of another text " * 20]
    train_sentencepiece(texts, tmp_path / "llama" / "tokenizer.model", vocab_size=280)
    assert main(["import", str(tmp_path / "llama"), str(tmp_path / "run")]) == 0
    config = load_config([tmp_path / "run" / "config.yml"], [], model_type=ModelConfig, world_size=1)
    assert config.data.tokenizer.type == "sentencepiece"
    assert config.data.tokenizer.path == str(tmp_path / "run" / "tokenizer" / "tokenizer.model")
    assert (config.batch.sequence_length, config.checkpoint.resume) == (2048, "auto")
    (tmp_path / "llama" / "tokenizer.model").rename(tmp_path / "tokenizer.model")
    (tmp_path / "llama" / "vocab.txt").write_text("[PAD]\n[UNK]\n[CLS]\n[SEP]\nthe\n")
    assert main(["import", str(tmp_path / "llama"), str(tmp_path / "words")]) == 0
    assert load_model(tmp_path / "words").tokenizer.type == "wordpiece"
    (tmp_path / "llama" / "vocab.txt").unlink()
    capsys.readouterr()
    assert main(["import", str(tmp_path / "llama"), str(tmp_path / "bare"), "--tolerance", "1e-12"]) == 1
    captured = capsys.readouterr()
    assert "the folder has no tokenizer: set data.tokenizer before training" in captured.out
    assert "over the tolerance of 1e-12" in captured.err
    assert "train.py" not in captured.out
    assert "type: bytes" in (tmp_path / "bare" / "config.yml").read_text()
    # The placeholder is no tokenizer of the model: text in bytes would have wrong ids.
    with pytest.raises(
        FileNotFoundError, match=r"bare was imported without a tokenizer.* import it again with --overwrite"
    ):
        load_model(tmp_path / "bare")
    save_tokenizer(load_tokenizer("bytes"), tmp_path / "bare")  # as the start of a training in bytes
    assert load_model(tmp_path / "bare").tokenizer.type == "bytes"


def test_rotary_settings_of_earlier_transformers_are_read() -> None:
    options = translated("gpt_neox", **SHAPE, rotary_pct=0.5, rotary_emb_base=5000).options_of("attention")
    assert (options.rotary_pct, options.rotary_base) == (0.5, 5000.0)
    options = translated("llama", **SHAPE, rope_theta=500000.0, rope_scaling=None).options_of("attention")
    assert (options.num_kv_heads, options.rotary_base) == (4, 500000.0)


@pytest.mark.parametrize("tensor", [1, 2])
def test_training_continues_from_an_import(tensor: int, exported: Path, tmp_path: Path) -> None:
    run = tmp_path / "again"
    assert main(["import", str(exported), str(run)]) == 0
    words = [str(run / "config.yml"), "schedule.train_steps=3", "logging.progress_bar=false", "precision.dtype=fp32"]
    if tensor == 1:
        assert train.main(words) == 0
    else:
        train_in_turn([[*words, f"parallel.tensor={tensor}"]])
    losses = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    first = next(line["loss"] for line in losses if line["kind"] == "train")
    assert first < 5, f"{first}: an untrained model starts at 6.2, the imported one was trained"
    assert (run / "checkpoints" / "latest").read_text().strip() == "step_00000003"


def test_import_of_sharded_sixteen_bit_weights(
    trained_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = str(tmp_path / "out")
    assert main(["export", str(trained_run), folder, "--dtype", "bf16", "--max-shard-size", "50KB"]) == 0
    assert main(["import", folder, str(tmp_path / "run")]) == 0
    trained, imported = read_weights(trained_run), read_weights(tmp_path / "run")
    assert all(torch.equal(trained[name].bfloat16().float(), imported[name]) for name in trained)
    part = next((tmp_path / "out").glob("model-00002-*"))
    content = part.read_bytes()
    part.unlink()
    assert f"{part} is missing: {tmp_path / 'out' / 'SHA256SUMS'} names it; copy it again" in error_of(
        ["import", folder, str(tmp_path / "run2")], capsys
    )
    (tmp_path / "out" / "SHA256SUMS").unlink()
    captured = error_of(["import", folder, str(tmp_path / "run2")], capsys)
    assert "is missing; model.safetensors.index.json names it" in captured
    part.write_bytes(content[:-1])
    captured = error_of(["import", folder, str(tmp_path / "run2")], capsys)
    assert f"{part} is no safetensors file, or is cut short" in captured
    part.write_bytes(content)
    index = tmp_path / "out" / "model.safetensors.index.json"
    index.write_text(index.read_text().replace(part.name, f"../{part.name}"))
    captured = error_of(["import", folder, str(tmp_path / "run2")], capsys)
    assert f"names '../{part.name}': only names of files inside" in captured


@pytest.mark.parametrize("objective", ["causal", "masked"])
def test_import_of_few_positions_and_of_save_pretrained(objective: str, tmp_path: Path) -> None:
    """Compare logits on fewer positions, and read a folder without the run's configuration, from save_pretrained."""
    shape = tmp_path / "model.yml"
    options = {
        "causal": "[metala], mixer_options: {metala: {decay_init: hippo}}",
        "masked": "[lion], mixer_options: {lion: {causal: false, decay_per: channel, decay_init: hippo, phi: sigmoid}}",
    }
    shape.write_text(
        "model: {num_layers: 1, hidden_size: 32, num_heads: 2, positions: learned, max_positions: 48, "
        f"vocab_size: 384, mixers: {options[objective]}}}\n"
    )
    words = ["data.corpus=stdlib", "data.tokenizer.type=bytes", "batch.sequence_length=48"]
    trained = write_run(tmp_path / "run", [*words, f"data.objective={objective}"], [str(shape)])
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "out")]) == 0
    assert main(["import", str(tmp_path / "out"), str(tmp_path / "again")]) == 0
    exported = load_export(tmp_path / "out", causal=objective == "causal", trust_remote_code=True)
    exported.save_pretrained(tmp_path / "saved")
    assert main(["import", str(tmp_path / "saved"), str(tmp_path / "other")]) == 0
    for run in ("again", "other"):
        config = load_config([tmp_path / run / "config.yml"], [], model_type=ModelConfig, world_size=1)
        assert (config.data.objective, config.batch.sequence_length) == (objective, 48)
        weights = read_weights(tmp_path / run)
        assert all(torch.equal(weights[name], p) for name, p in trained.named_parameters())
