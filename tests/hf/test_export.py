"""An export is the trainer's model: same weights, same logits, same tokens, whole or not there."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from megatron_lite.checkpoint import read_weights
from tools.convert_hf import main
from tools.load_model import load_model


@pytest.fixture(scope="session")
def exported(trained_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("export") / "tiny"
    assert main(["export", str(trained_run), str(folder)]) == 0
    return folder


def test_logits_are_the_trainers(trained_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", str(trained_run), str(tmp_path / "out")]) == 0
    said = capsys.readouterr().out
    difference = float(said.split("largest difference to the trainer's ")[1].split()[0])
    assert difference <= 1e-5
    assert "same ids on" in said


def test_weights_are_the_trainers(trained_run: Path, exported: Path) -> None:
    stored = load_file(exported / "model.safetensors")
    weights = read_weights(trained_run)
    assert stored.keys() == weights.keys()
    assert all(torch.equal(stored[name], weights[name]) for name in weights)
