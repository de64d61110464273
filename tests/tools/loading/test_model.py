"""A checkpoint is loaded as the model that was trained, or refused with the reason."""

from pathlib import Path

import pytest
import torch

from megatron_lite.checkpoint.reader import CheckpointError, read_config_yaml, read_weights
from models.config import ModelConfig
from models.language_model import LanguageModel
from models.mixers import MIXERS
from tools.loading.model import build_model, load_model, model_config, run_of


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


def test_run_folder_is_relative_inside_the_working_folder(trained_run: Path, monkeypatch) -> None:
    monkeypatch.chdir(trained_run.parent)
    assert run_of(trained_run.name) == Path(trained_run.name)
    monkeypatch.chdir(trained_run)
    assert run_of(".").name == trained_run.name


def test_loss_of_a_trained_model_is_below_that_of_a_uniform_guess(trained_run: Path) -> None:
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
        ValueError, match=r"2 tensors do not fit.*q_proj\.weight is \[3, 3\], the configuration needs \[32, 64\]"
    ):
        build_model(config, weights)


def test_a_tokenizer_larger_than_the_model(trained_run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Larger:
        path, type, vocab_size = "big.model", "sentencepiece", 513

    monkeypatch.setattr("tools.loading.model.read_tokenizer", lambda run, config, manifest: Larger())
    with pytest.raises(ValueError, match=r"big\.model has 513 entries and the model 512 rows"):
        load_model(trained_run)


def test_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="is not a checkpoint"):
        load_model(tmp_path)


@pytest.mark.parametrize("mixer", sorted(MIXERS))
def test_every_mixer_comes_back(mixer: str) -> None:
    """Also what is no weight, and so in no checkpoint: numbers of heads."""
    config = ModelConfig(vocab_size=32, num_layers=2, hidden_size=32, num_heads=4, mixers=(mixer,))
    model = LanguageModel(config, seed=0)
    back = build_model(config, {name: p.detach() for name, p in model.named_parameters()}).to("cpu")
    tokens = torch.arange(9)[None]
    assert torch.equal(back(tokens), model(tokens))
