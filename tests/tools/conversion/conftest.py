"""Runs to convert: a trained causal hybrid, and an untrained masked model with a WordPiece vocabulary."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from data.tokenizer import load_tokenizer
from megatron_lite.checkpoint.storage import write_weights
from megatron_lite.config.loader import dump_config, load_config
from megatron_lite.parallel.sharding_plan import sharding_specs
from models.config import ModelConfig
from models.language_model import LanguageModel
from tests.tools.conftest import trained_run
from tools.convert_hf import main
from tools.loading.tokenizer import save_tokenizer

__all__ = ["trained_run"]

WORDS = "[PAD] [UNK] [CLS] [SEP] [MASK] the a cat dog sat on mat ##s ##ing run . , the ##r"


@pytest.fixture(scope="session")
def exported(trained_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("export") / "tiny"
    assert main(["export", str(trained_run), str(folder)]) == 0
    return folder


def write_run(run: Path, overrides: list[str], files: list[str], seed: int = 0, noise: bool = True) -> LanguageModel:
    """Write a run folder with the checkpoint of an untrained model, whose parameters have added noise."""
    required = ["batch.micro_batch_size=2", "batch.global_batch_size=2", "optimizer.lr=1e-3", "schedule.train_steps=4"]
    config = load_config(
        files,
        [f"run.directory={run}", "run.name=untrained", *required, *overrides],
        model_type=ModelConfig,
        world_size=1,
    )
    model = LanguageModel(config.model, seed=seed).eval()
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters() if noise else ():
            parameter.add_(0.05 * torch.randn_like(parameter))
    if config.data.tokenizer.type == "bytes":
        save_tokenizer(load_tokenizer("bytes"), run)
    weights = dict(model.named_parameters())
    write_weights(
        run / "checkpoints",
        weights.items(),
        {name: tuple(p.shape) for name, p in weights.items()},
        specs=sharding_specs(model),
        config_yaml=dump_config(config),
    )
    return model


@pytest.fixture(scope="session")
def masked_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("masked") / "run"
    vocabulary = run.parent / "vocab.txt"
    vocabulary.write_text("\n".join(dict.fromkeys(WORDS.split(" "))) + "\n")
    write_run(
        run,
        ["data.corpus=stdlib", "data.tokenizer.type=wordpiece", f"data.tokenizer.path={vocabulary}"],
        ["configs/model/lion_bidirectional_tiny.yml"],
    )
    return run


@pytest.fixture(scope="session")
def masked_export(masked_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("export") / "masked"
    assert main(["export", str(masked_run), str(folder)]) == 0
    return folder
