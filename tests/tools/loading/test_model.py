"""A checkpoint comes back as the model that was trained, with its tokenizer, or says why not."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from data.tokenizer import load_tokenizer
from megatron_lite.checkpoint.reader import read_config_yaml, read_weights
from models.config import ModelConfig
from models.language_model import LanguageModel
from models.mixers import MIXERS
from tools.loading.model import (
    CheckpointError,
    build_model,
    check_same_tokenizer,
    load_model,
    model_config,
    read_tokenizer,
)

OLD: dict[str, Any] = {"state": {}}  # a manifest without the tokenizer's hash


def test_the_newest_checkpoint_or_the_named_one(trained_run: Path) -> None:
    newest = load_model(trained_run)
    assert newest.step == 30
    assert newest.run == trained_run
    assert newest.device == torch.device("cpu")
    assert load_model(trained_run / "checkpoints" / "step_00000010").step == 10
    stored = read_weights(trained_run)
    for name, parameter in newest.model.named_parameters():
        assert torch.equal(parameter, stored[name]), name
        assert not parameter.requires_grad
    assert newest.model.head.weight is newest.model.embedding.weight
    assert not newest.model.training


def test_it_learned_something(trained_run: Path) -> None:
    loaded = load_model(trained_run)
    tokens = torch.tensor(
        [loaded.tokenizer.encode("def alpha(beta, gamma):\n    total = alpha + 12\n    return beta\n")]
    )
    trained = loaded.model(tokens[:, :-1], tokens[:, 1:]) / tokens[:, 1:].numel()
    untrained_nats = torch.log(torch.tensor(float(loaded.model.config.vocab_size)))
    assert trained < 0.8 * untrained_nats


def test_dtype(trained_run: Path) -> None:
    model = load_model(trained_run, dtype="bf16").model
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    with pytest.raises(ValueError, match="dtype = 'int8': allowed are auto, fp32"):
        load_model(trained_run, dtype="int8")


def test_weights_of_another_shape(trained_run: Path) -> None:
    config = model_config(read_config_yaml(trained_run))
    weights = read_weights(trained_run)
    weights["blocks.0.mixer.q_proj.weight"] = torch.zeros(3, 3)
    del weights["blocks.1.norm1.weight"]
    with pytest.raises(
        ValueError, match=r"2 tensors do not fit.*q_proj\.weight: \(3, 3\) there, \(32, 64\) in the model"
    ):
        build_model(config, weights)


def test_a_tokenizer_larger_than_the_model(trained_run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Larger:
        path, type, vocab_size = "big.model", "sentencepiece", 513

    monkeypatch.setattr("tools.loading.model.read_tokenizer", lambda run, config, manifest: Larger())
    with pytest.raises(ValueError, match=r"big\.model has 513 entries and the model 512 rows"):
        load_model(trained_run)


def test_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="is no checkpoint"):
        load_model(tmp_path)


def test_the_kept_tokenizer_needs_no_corpus(trained_run: Path, tmp_path: Path) -> None:
    config = read_config_yaml(trained_run)
    config["data"]["corpus"] = str(tmp_path / "gone")
    tokenizer = read_tokenizer(trained_run, config, OLD)
    assert tokenizer.vocab_size == 400
    assert tokenizer.decode(tokenizer.encode("naïve 🙂")) == "naïve 🙂"


def test_without_a_kept_tokenizer_none_is_trained(trained_run: Path, tmp_path: Path) -> None:
    config = read_config_yaml(trained_run)
    with pytest.raises(FileNotFoundError, match=r"tokenizer is missing: .*Copy it from where the run was made"):
        read_tokenizer(tmp_path, config, OLD)
    kept = read_tokenizer(trained_run, config, OLD)
    config["data"]["tokenizer"]["path"] = kept.path
    assert read_tokenizer(tmp_path, config, OLD).hash == kept.hash
    assert read_tokenizer(tmp_path, config, {"state": {"tokenizer": kept.hash}}).hash == kept.hash


def test_a_tokenizer_that_is_not_the_checkpoints_is_refused(trained_run: Path) -> None:
    other: dict[str, Any] = {"state": {"tokenizer": "0" * 32}}
    with pytest.raises(ValueError, match=r"tokenizer\.model is not the tokenizer that the checkpoint was trained with"):
        read_tokenizer(trained_run, read_config_yaml(trained_run), other)
    kept = read_tokenizer(trained_run, {}, OLD)
    check_same_tokenizer(kept, trained_run, OLD)
    with pytest.raises(ValueError, match=r"with another tokenizer .*Go on with that tokenizer, or .*resume=never"):
        check_same_tokenizer(kept, trained_run, other)
    own = {"state": {"tokenizer": kept.hash}}
    with pytest.raises(
        ValueError, match=r"\(bytes, bytes-257\)\. Go on with data\.tokenizer\.path=.*tokenizer\.model, or"
    ):
        check_same_tokenizer(load_tokenizer("bytes"), trained_run, own)


def test_a_tokenizer_that_was_exchanged(trained_run: Path, tmp_path: Path) -> None:
    shutil.copytree(trained_run / "tokenizer", tmp_path / "tokenizer")
    description = tmp_path / "tokenizer" / "description.json"
    description.write_text(json.dumps({**json.loads(description.read_text()), "hash": "0" * 32}))
    with pytest.raises(ValueError, match=r"description\.json is damaged: .* copy it again, or remove its folder"):
        read_tokenizer(tmp_path, {}, OLD)
    (description.parent / "SHA256SUMS").unlink()  # as earlier versions wrote it
    with pytest.raises(ValueError, match="was changed after training"):
        read_tokenizer(tmp_path, {}, OLD)
    description.write_text(json.dumps({**json.loads(description.read_text()), "file": "../../tokenizer.model"}))
    with pytest.raises(ValueError, match=r"names '\.\./\.\./tokenizer\.model': only names of files inside"):
        read_tokenizer(tmp_path, {}, OLD)


@pytest.mark.parametrize("mixer", sorted(MIXERS))
def test_every_mixer_comes_back(mixer: str) -> None:
    """Also what is no weight, and so in no checkpoint: numbers of heads."""
    config = ModelConfig(vocab_size=32, num_layers=2, hidden_size=32, num_heads=4, mixers=(mixer,))
    model = LanguageModel(config, seed=0)
    back = build_model(config, {name: p.detach() for name, p in model.named_parameters()}).to("cpu")
    tokens = torch.arange(9)[None]
    assert torch.equal(back(tokens), model(tokens))
